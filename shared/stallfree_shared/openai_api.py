"""Bodies of the public API, in OpenAI's shapes. Owns names, types and ranges; never reads a socket or a model.

The router parses requests with these and writes answers with them; load tests and tests read answers with them.

Every optional field may be null, which is the same as leaving it out. Types are strict: "2" is not a number and
"true" is not a boolean; integers have 64 bits, signed. Fields that are not listed are ignored; those that would
change the answer are refused by name (see the router's `routes/bodies.py`).

    field                    accepted                                     default
    temperature              0 to 2                                       the model's own, else 1
    top_p                    above 0, to 1                                the model's own, else 1
    top_k                    -1 and 0 (off), or at least 1                the model's own, else off
    min_p                    0 to 1                                       the model's own, else 0
    seed                     any; 0 is a seed like others                 drawn anew for every choice
    max_tokens               at least 1, within the context               completions 16 (or what is left, if less),
                                                                          chat all that is left of the context
    max_completion_tokens    the same (chat); wins over max_tokens
    n                        at least 1; prompts * n is bounded           1
    stop                     up to 16 strings of 1 to 1,000 characters    none
    stop_token_ids           up to 256 ids of the vocabulary              none
    prompt                   a string, token ids, or a list of either;    required
                             up to 1,000,000 ids or prompts, never empty
    messages                 1 to 10,000                                  required
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, field_validator
from pydantic_core import PydanticCustomError

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import FinishReason

COMPLETION_DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 256
MAX_PROMPT_ITEMS = 1_000_000
MAX_MESSAGES = 10_000
UNSUPPORTED_ERROR_TYPE = "unsupported_parameter"
"""Type of a validation error that means: known, and not supported here."""

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def _is_int(value: object) -> bool:
    return type(value) is int


def _too_many(what: str, limit: int, value: int) -> PydanticCustomError:
    # Said before anything looks at the items: a refusal must not cost more than the request.
    return PydanticCustomError(
        "too_many", "at most {limit} {what}, got {value}", {"what": what, "limit": limit, "value": value}
    )


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        raise _too_many("stop strings", MAX_STOP_STRINGS, len(strings))
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
        raise _too_many("items", MAX_PROMPT_ITEMS, len(value))
    if all(map(_is_int, value)):
        return (tuple(value),)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and all(map(_is_int, item)) for item in value):
        return tuple(map(tuple, value))
    raise PydanticCustomError("prompt_mixed", "must hold strings only, token ids only, or lists of token ids only")


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


Prompt = str | tuple[int, ...]
"""Text, or token ids."""
StopStrings = Annotated[tuple[str, ...], PlainValidator(_stop_strings)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
Content = Annotated[str, PlainValidator(_content)]
Role = Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_role)]


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class GenerationBody(RequestModel):
    """What both generation routes take."""

    model: str
    n: int = Field(1, ge=1, le=_INT64_MAX)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1, le=_INT64_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT64_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=_INT64_MIN, le=_INT64_MAX)
    stop: StopStrings = ()
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options.include_usage)

    @property
    def wanted_max_tokens(self) -> int | None:
        """None: the route's default."""
        return self.max_tokens


class CompletionRequest(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts


class ChatMessage(RequestModel):
    """One message. Text parts of a list are joined by a newline: the same tokens as that string."""

    role: Role
    content: Content
    name: str | None = None
    tool_calls: Annotated[None, PlainValidator(_no_tool_calls)] = None
    function_call: Annotated[None, PlainValidator(_no_tool_calls)] = None


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT64_MAX)

    @field_validator("messages", mode="before")
    @classmethod
    def _are_objects(cls, value: object) -> object:
        if isinstance(value, list) and len(value) > MAX_MESSAGES:
            raise _too_many("messages", MAX_MESSAGES, len(value))
        if isinstance(value, list) and not all(isinstance(item, dict) for item in value):
            raise PydanticCustomError("messages_type", "must be a list of objects with role and content")
        return value

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _is_none(value: object) -> bool:
    return value is None


class ResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True)


class CompletionUsage(ResponseModel):
    """`prompt_tokens` counts every prompt once, however many choices; `completion_tokens` all generated tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None
    token_ids: Sequence[int] | None = Field(None, exclude_if=_is_none)
    prompt_token_ids: Sequence[int] | None = Field(None, exclude_if=_is_none)


class Completion(ResponseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: CompletionUsage | None = Field(None, exclude_if=_is_none)


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None
    token_ids: Sequence[int] | None = Field(None, exclude_if=_is_none)


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: Sequence[int] | None = Field(None, exclude_if=_is_none)


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = Field(None, exclude_if=_is_none)
    content: str | None = Field(None, exclude_if=_is_none)


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None
    token_ids: Sequence[int] | None = Field(None, exclude_if=_is_none)


class ChatCompletionChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: CompletionUsage | None = Field(None, exclude_if=_is_none)
    prompt_token_ids: Sequence[int] | None = Field(None, exclude_if=_is_none)


class Model(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stallfree"
    max_model_len: int


class ModelList(ResponseModel):
    """What can be served now."""

    object: Literal["list"] = "list"
    data: Sequence[Model]


class ErrorBody(ResponseModel):
    """The body of every refusal, and the data of an error event in a stream."""

    error: ErrorInfo
