"""What the text of an answer must be: from the fields of a body to a `StructuredOutput` that every worker can serve.

Pure, and slow for a large or bad definition (seconds, where it has thousands of properties): generation.py has it done
in threads, by `StructuredOutputChecks`, and the library lets go of the interpreter's lock while it compiles. Nothing is
half enforced: a schema with a keyword that cannot be is refused by name.

A grammar is compiled here for an alphabet of single bytes, which every text consists of: what compiles for it, and can
begin, does so for the tokens of any model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from stallfree_shared.errors import InvalidRequestError, UnsupportedParameterError
from stallfree_shared.grammars import LIMITS, grammar_threads, make_grammar
from stallfree_shared.openai_api import GenerationBody, ResponseFormat, StructuredOutputs
from stallfree_shared.wire import MAX_DEFINITION_BYTES, StructuredOutput

_MAX_MESSAGE_CHARACTERS = 300
_UNSUPPORTED = ("Unimplemented keys", "not supported", "Unknown format")
"""What the library says of things that it knows and cannot do."""


class StructuredOutputChecks:
    """Owns the threads for it. They do nothing else: whoever sends bad definitions holds up others that need a check,
    and nobody's prompts."""

    def __init__(self, *, num_threads: int = 2) -> None:
        self._threads = grammar_threads(num_threads, name="structured-output")

    async def structured_output(self, body: GenerationBody) -> StructuredOutput | None:
        """As the function of that name."""
        if not body.has_structured_output:
            return None
        return await asyncio.wrap_future(self._threads.submit(structured_output, body))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def structured_output(body: GenerationBody) -> StructuredOutput | None:
    """What the answer's text must be; None where it is free.

    Raises:
        InvalidRequestError: more than one of the fields is given, or a definition is too large, cannot be compiled, or
            is one that no text satisfies.
        UnsupportedParameterError: it needs something that cannot be enforced, such as uniqueItems or a look-ahead.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        names = " and ".join(param for param, _ in asked)
        raise InvalidRequestError(f"only one of {names} may be given", param=asked[1][0])
    if not asked:
        return None
    [(param, output)] = asked
    _check(param, output)
    return output


def _asked(body: GenerationBody) -> Iterator[tuple[str, StructuredOutput]]:
    """Every field that says something, and what it says."""
    if body.response_format is not None:
        yield from _asked_by_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _asked_by_structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield "guided_json", _json_schema(body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", StructuredOutput(kind="regex", definition=body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", _choice("guided_choice", body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", StructuredOutput(kind="grammar", definition=body.guided_grammar)


def _asked_by_format(asked: ResponseFormat) -> Iterator[tuple[str, StructuredOutput]]:
    """OpenAI's field. A schema is enforced whether or not it is called strict."""
    if asked.type == "json_object":
        yield "response_format", StructuredOutput(kind="json_object")
    elif asked.type == "json_schema":
        if asked.json_schema is None:
            raise InvalidRequestError("response_format.json_schema is missing", param="response_format.json_schema")
        yield "response_format.json_schema.schema", _json_schema(asked.json_schema.definition)


def _asked_by_structured_outputs(asked: StructuredOutputs) -> Iterator[tuple[str, StructuredOutput]]:
    """vLLM's field."""
    name = "structured_outputs"
    found = []
    if asked.json_schema is not None:
        found.append((f"{name}.json", _json_schema(asked.json_schema)))
    if asked.json_object:
        found.append((f"{name}.json_object", StructuredOutput(kind="json_object")))
    if asked.regex is not None:
        found.append((f"{name}.regex", StructuredOutput(kind="regex", definition=asked.regex)))
    if asked.choice is not None:
        found.append((f"{name}.choice", _choice(f"{name}.choice", asked.choice)))
    if asked.grammar is not None:
        found.append((f"{name}.grammar", StructuredOutput(kind="grammar", definition=asked.grammar)))
    if not found:
        raise InvalidRequestError(f"{name} must have one of json, json_object, regex, choice, grammar", param=name)
    yield from found


def _json_schema(schema: str | dict[str, object]) -> StructuredOutput:
    """The order of the properties is kept: it is the order in which they are written."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput(kind="json_schema", definition=text)


def _choice(param: str, choices: list[str]) -> StructuredOutput:
    if not choices:
        raise InvalidRequestError(f"{param} must have at least one choice", param=param)
    return StructuredOutput(kind="choice", definition=json.dumps(choices, ensure_ascii=False))


def _check(param: str, output: StructuredOutput) -> None:
    num_bytes = len(output.definition.encode())
    if num_bytes > MAX_DEFINITION_BYTES:
        raise InvalidRequestError(
            f"{param} may have {MAX_DEFINITION_BYTES} bytes at most, and has {num_bytes}", param=param
        )
    problem = _problem(output)
    if problem is None:
        return
    kind = UnsupportedParameterError if any(text in problem for text in _UNSUPPORTED) else InvalidRequestError
    raise kind(f"{param} cannot be served: {_shortened(problem)}", param=param)


def _problem(output: StructuredOutput) -> str | None:
    """Why no text can be drawn by `output`, in the library's words; None if it can."""
    try:
        matcher = LLMatcher(_BYTES, make_grammar(output), log_level=0, limits=LIMITS)
    except ValueError as error:
        return str(error)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what may come first is found out here, or that nothing may
    if not matcher.is_error():
        return None
    problem = matcher.get_error()
    return "no text satisfies it" if problem.startswith("NoExtension") else problem


def _shortened(problem: str) -> str:
    text = " ".join(problem.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else f"{text[:_MAX_MESSAGE_CHARACTERS]}…"


class _ByteAlphabet:
    """A tokenizer, as the library wants one, whose tokens are the 256 bytes and the end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


_BYTES = LLTokenizer(TokenizerWrapper(_ByteAlphabet()))
