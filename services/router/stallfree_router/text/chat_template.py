"""Chat messages to the prompt text a model was trained on, by the model's own Jinja template.

The template comes from the model, never from a client. It runs in a sandbox and knows what the transformers library
gives it (`apply_chat_template`): messages, add_generation_prompt, the special tokens by name, raise_exception,
strftime_now, tojson without HTML escapes, loop controls and the `generation` block.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.openai_api import ChatMessage

_MAX_REASON_CHARACTERS = 300
_MAX_COMPILED_TEMPLATES = 32


def render_chat(template: str, messages: Sequence[ChatMessage], *, special_tokens: Mapping[str, str]) -> str:
    """The prompt, ready for the model's answer.

    Raises:
        InvalidRequestError: the template refuses the messages, or cannot render them.
    """
    try:
        return _compile(template).render(
            messages=[_as_template_sees(message) for message in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **special_tokens,
        )
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        reason = str(error)[:_MAX_REASON_CHARACTERS]
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {reason}", param="messages"
        ) from error


def _as_template_sees(message: ChatMessage) -> dict[str, str]:
    # Templates know the older name of what OpenAI now calls developer.
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": message.content}
    return fields if message.name is None else {**fields, "name": message.name}


@functools.lru_cache(maxsize=_MAX_COMPILED_TEMPLATES)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlock],
        autoescape=False,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().astimezone().strftime(pattern)
