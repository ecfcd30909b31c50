"""Types of single fields of the public API that JSON's own types do not tell: what is read, and what is refused.

Used by openai_api.py alone. A refusal is said before anything looks at the items of a long list, and names the limit.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1000
MAX_PROMPT_ITEMS = 1_000_000
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100
UNSUPPORTED_ERROR_TYPE = "unsupported_parameter"
"""Type of a validation error that means: known, and not supported here."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,11}")
_MAX_NUMBER_CHARACTERS = 24


def _is_int(value: object) -> bool:
    return type(value) is int


def too_many(what: str, limit: int, value: int) -> PydanticCustomError:
    # Said before anything looks at the items: a refusal must not cost more than the request.
    return PydanticCustomError(
        "too_many", "at most {limit} {what}, got {value}", {"what": what, "limit": limit, "value": value}
    )


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        raise too_many("stop strings", MAX_STOP_STRINGS, len(strings))
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if "" in strings:
        raise PydanticCustomError("stop_empty", "a stop string may not be empty")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_STRING_CHARACTERS:
        raise PydanticCustomError(
            "stop_length",
            "a stop string has at most {limit} characters, got {value}",
            {"limit": MAX_STOP_STRING_CHARACTERS, "value": longest},
        )
    return tuple(dict.fromkeys(strings))


def _prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "must be a string, a list of token ids, or a list of either")
    if not value:
        raise PydanticCustomError("prompt_empty", "must not be empty")
    if len(value) > MAX_PROMPT_ITEMS:
        raise too_many("items", MAX_PROMPT_ITEMS, len(value))
    if all(map(_is_int, value)):
        return (tuple(value),)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and all(map(_is_int, item)) for item in value):
        return tuple(map(tuple, value))
    raise PydanticCustomError("prompt_mixed", "must hold strings only, token ids only, or lists of token ids only")


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias_type", "must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise too_many("token ids", MAX_LOGIT_BIASES, len(value))
    return {_bias_id(name): _bias(bias) for name, bias in value.items()}


def _bias_id(name: object) -> int:
    if isinstance(name, str) and _TOKEN_ID.fullmatch(name):
        return int(name)
    raise PydanticCustomError("logit_bias_id", "must have token ids as names: whole numbers from 0 on")


def _bias(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_LOGIT_BIAS:
        return float(value)
    shown = f", got {str(value)[:_MAX_NUMBER_CHARACTERS]}" if isinstance(value, int | float) else ""
    raise PydanticCustomError(
        "logit_bias_value",
        "must hold numbers from -{limit} to {limit}{shown}",
        {"limit": MAX_LOGIT_BIAS, "shown": shown},
    )


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    return "\n".join(_part_text(index, part) for index, part in enumerate(value))


def _part_text(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("part_type", "part {index} must be an object with a type", {"index": index})
    if kind != "text":
        raise PydanticCustomError(
            UNSUPPORTED_ERROR_TYPE, "part {index} is not of type text, and this model reads text only", {"index": index}
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise PydanticCustomError("part_text", "part {index} must have a text", {"index": index})
    return text


def _role(value: object) -> object:
    if value in ("tool", "function"):
        raise PydanticCustomError(UNSUPPORTED_ERROR_TYPE, "tool messages are not supported")
    return value


def _no_tool_calls(value: object) -> None:
    if value:
        raise PydanticCustomError(UNSUPPORTED_ERROR_TYPE, "tool calls are not supported")


def _unsupported(value: object) -> None:
    if value:
        raise PydanticCustomError(UNSUPPORTED_ERROR_TYPE, "not supported")


def _json_schema(value: object) -> str | dict[str, object]:
    if isinstance(value, str | dict):
        return value
    raise PydanticCustomError("json_schema_type", "must be a JSON schema: an object, or its text")


Prompt = str | tuple[int, ...]
"""Text, or token ids."""
StopStrings = Annotated[tuple[str, ...], PlainValidator(_stop_strings)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias)]
Content = Annotated[str, PlainValidator(_content)]
NoToolCalls = Annotated[None, PlainValidator(_no_tool_calls)]
Unsupported = Annotated[None, PlainValidator(_unsupported)]
JsonSchema = Annotated[str | dict[str, object], PlainValidator(_json_schema)]
Role = Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_role)]
