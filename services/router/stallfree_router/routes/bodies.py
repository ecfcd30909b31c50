"""Request bodies: read within the limit, parsed, and checked for what is not supported. Raises, never answers.

No message repeats what the client sent, but for short numbers: an error is never larger than the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pydantic_core
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from stallfree_shared.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedEncodingError,
    UnsupportedParameterError,
)
from stallfree_shared.openai_api import GenerationBody
from stallfree_shared.openai_fields import UNSUPPORTED_ERROR_TYPE

BodyT = TypeVar("BodyT", bound=GenerationBody)

_MAX_PROBLEMS_SHOWN = 3
_MAX_PARAM_CHARACTERS = 100
_MAX_NUMBER_CHARACTERS = 24


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLargeError: it is larger, by its own word or once that many bytes have come.
        UnsupportedEncodingError: it is compressed.
        starlette.requests.ClientDisconnect: the client left while sending.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncodingError("the body must not be compressed", param="Content-Encoding")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:_MAX_NUMBER_CHARACTERS]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body may have {max_bytes} bytes at most")


def parse_body(body_type: type[BodyT], raw: bytes) -> BodyT:
    """A request in the types of openai_api.py. A field that is null counts as absent.

    Raises:
        InvalidRequestError: not JSON, or a field is missing, of the wrong type or out of range.
        UnsupportedParameterError: a field asks for what this server cannot do.
    """
    fields = _json_object(raw)
    _refuse_unsupported(fields, body_type)
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)) from None


def _json_object(raw: bytes) -> dict[str, object]:
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:  # its text names a place, and repeats nothing
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return {name: field for name, field in value.items() if field is not None}


def _explain(problems: list[ErrorDetails]) -> InvalidRequestError:
    first = problems[0]
    message = "; ".join(map(_sentence, problems[:_MAX_PROBLEMS_SHOWN]))
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        message += f"; and {len(problems) - _MAX_PROBLEMS_SHOWN} more"
    kind = UnsupportedParameterError if first["type"] == UNSUPPORTED_ERROR_TYPE else InvalidRequestError
    return kind(message, param=_path(first))


def _sentence(problem: ErrorDetails) -> str:
    value = problem["input"]
    is_number = isinstance(value, int | float) and problem["type"] != "missing"
    shown = f", got {repr(value)[:_MAX_NUMBER_CHARACTERS]}" if is_number else ""
    return f"{_path(problem)}: {problem['msg']}{shown}"


def _path(problem: ErrorDetails) -> str:
    return ".".join(map(str, problem["loc"]))[:_MAX_PARAM_CHARACTERS]


def _refuse_unsupported(fields: Mapping[str, object], body_type: type[GenerationBody]) -> None:
    for name, is_harmless in _HARMLESS_ONLY.items():
        if name in fields and name not in body_type.model_fields and not is_harmless(fields[name]):
            if name in ("tools", "functions") and _declines_tools(fields):
                continue
            raise UnsupportedParameterError(f"{name} is not supported with this value", param=name)
    best_of = fields.get("best_of")
    if best_of is not None and best_of != fields.get("n", 1):
        raise UnsupportedParameterError("best_of is not supported unless it equals n", param="best_of")


def _declines_tools(fields: Mapping[str, object]) -> bool:
    return "none" in (fields.get("tool_choice"), fields.get("function_call"))


def _never(_: object) -> bool:
    return False


def _only(*values: object) -> Callable[[object], bool]:
    """A test for these values of these very types: 0 is not False here."""

    def is_harmless(value: object) -> bool:
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)

    return is_harmless


_HARMLESS_ONLY: Mapping[str, Callable[[object], bool]] = {
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "modalities": _only(["text"], []),
    "audio": _never,
    "web_search_options": _never,
    "reasoning_effort": _only("none"),
    "verbosity": _only("medium"),
    "top_logprobs": _only(0),
    "length_penalty": _only(1),
    "use_beam_search": _only(False),
    "bad_words": _only([]),
    "allowed_token_ids": _never,
    "truncate_prompt_tokens": _never,
    "include_stop_str_in_output": _only(False),
    "skip_special_tokens": _only(True),
    "echo": _only(False),
    "suffix": _only(""),
    "guided_whitespace_pattern": _never,
    "logits_processors": _only([]),
    "return_tokens_as_token_ids": _only(False),
    "chat_template": _never,
    "chat_template_kwargs": _only({}),
    "continue_final_message": _only(False),
    "add_generation_prompt": _only(True),
    "documents": _only([]),
    "prompt_embeds": _never,
}
"""Fields of OpenAI's and vLLM's APIs that would change the answer, with the values that change nothing; those that only
one route has are here for the other. Fields that never change it (user, metadata, store, parallel_tool_calls, …) are
ignored like unknown ones."""
