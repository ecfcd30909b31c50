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
    presence_penalty         -2 to 2                                      0
    frequency_penalty        -2 to 2                                      0
    repetition_penalty       above 0, to 100                              1
    logit_bias               up to 1,024 token ids, each -100 to 100      none
    seed                     any; 0 is a seed like others                 drawn anew for every choice
    max_tokens               at least 1, within the context; 0 with       completions 16 (or what is left, if less),
                             echo (completions)                           chat all that is left of the context
    max_completion_tokens    the same (chat); wins over max_tokens
    min_tokens               0 to max_tokens                              0
    n                        at least 1; prompts * n is bounded           1
    stop                     up to 16 strings of 1 to 1,000 characters    none
    stop_token_ids           up to 256 ids of the vocabulary              none
    logprobs                 completions: 0 to 20; chat: a boolean        none
    top_logprobs             chat: 0 to 20, with logprobs                 0
    prompt_logprobs          0 to 20, not in a stream                     none
    echo                     completions: a boolean; with logprobs it     false
                             tells those of the prompt too
    response_format          text, json_object, json_schema               text
    structured_outputs       vLLM's json, json_object, regex, choice,     none
                             grammar; also guided_json, guided_regex,
                             guided_choice, guided_grammar
    service_tier             auto, default, or a class of the router's    auto: the default class
    priority                 -100 to 100, lower is first; not below what  the class's own
                             the router allows
    tbt_target_seconds,      above 0, to 3,600; not below what the        the class's own
    ttft_target_seconds      router allows
    cache_salt               1 to 1,000 characters                        none
    prompt                   a string, token ids, or a list of either;    required
                             up to 1,000,000 ids or prompts, never empty
    messages                 1 to 10,000                                  required
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.openai_fields import (
    UNSUPPORTED_ERROR_TYPE,
    Content,
    JsonSchema,
    LogitBias,
    NoToolCalls,
    Prompts,
    Role,
    StopStrings,
    Unsupported,
    too_many,
)
from stallfree_shared.wire import MAX_LOGPROBS, FinishReason

COMPLETION_DEFAULT_MAX_TOKENS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_MESSAGES = 10_000
MAX_CACHE_SALT_CHARACTERS = 1000
MAX_SERVICE_TIER_CHARACTERS = 64
MAX_TARGET_SECONDS = 3600

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class JsonSchemaFormat(RequestModel):
    """A JSON schema, as OpenAI's `response_format` holds it."""

    definition: dict[str, object] = Field(alias="schema")


class ResponseFormat(RequestModel):
    """What the answer's text must be, as OpenAI says it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(RequestModel):
    """What the answer's text must be, as vLLM says it; one of the fields."""

    json_schema: JsonSchema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None


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
    min_tokens: int = Field(0, ge=0, le=_INT64_MAX)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: LogitBias = Field(default_factory=dict)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    service_tier: str | None = Field(None, max_length=MAX_SERVICE_TIER_CHARACTERS)
    priority: int | None = Field(None, ge=-100, le=100)
    tbt_target_seconds: float | None = Field(None, gt=0, le=MAX_TARGET_SECONDS)
    ttft_target_seconds: float | None = Field(None, gt=0, le=MAX_TARGET_SECONDS)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @field_validator("prompt_logprobs")
    @classmethod
    def _are_not_streamed(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise PydanticCustomError(UNSUPPORTED_ERROR_TYPE, "not supported in a stream")
        return value

    @property
    def has_structured_output(self) -> bool:
        """Whether something is said of what the text must be."""
        named = (
            self.response_format,
            self.structured_outputs,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
        )
        return any(value is not None for value in named)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens are told besides each output token; None: no log-probabilities at all."""
        return None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """The same for each prompt token."""
        return self.prompt_logprobs

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
    max_tokens: int | None = Field(None, ge=0, le=_INT64_MAX)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        of_echo = self.logprobs if self.echo else None
        wanted = [number for number in (self.prompt_logprobs, of_echo) if number is not None]
        return max(wanted, default=None)


class ChatMessage(RequestModel):
    """One message. Text parts of a list are joined by a newline: the same tokens as that string."""

    role: Role
    content: Content
    name: str | None = None
    tool_calls: NoToolCalls = None
    function_call: NoToolCalls = None


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT64_MAX)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _need_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("needs_logprobs", "logprobs must be true where this is more than 0")
        return value

    @field_validator("messages", mode="before")
    @classmethod
    def _are_objects(cls, value: object) -> object:
        if isinstance(value, list) and len(value) > MAX_MESSAGES:
            raise too_many("messages", MAX_MESSAGES, len(value))
        if isinstance(value, list) and not all(isinstance(item, dict) for item in value):
            raise PydanticCustomError("messages_type", "must be a list of objects with role and content")
        return value

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def wanted_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _is_none(value: object) -> bool:
    return value is None


class ResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(ResponseModel):
    """`cached_tokens`: of each prompt, those that the prefix cache spared; what one choice of a prompt computed for the
    others is not among them."""

    cached_tokens: int


class CompletionUsage(ResponseModel):
    """`prompt_tokens` counts every prompt once, however many choices; `completion_tokens` all generated tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(ResponseModel):
    """vLLM's: one token at one place of a prompt."""

    logprob: float
    rank: int | None
    """1 is the likeliest; None: it is not among those that are told as the likeliest."""
    decoded_token: str


PromptLogprobs = SkipValidation[list[dict[int, PromptLogprob] | None]]
"""One for each prompt token, by token id: the likeliest ones and the token itself. None for the first. There may
be many, and each look at all of them holds up every stream of a router, so they are not validated."""


class CompletionLogprobs(ResponseModel):
    """OpenAI's older shape: four lists, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest ones and the token itself."""
    text_offset: list[int]
    """Where the token's text begins in the choice's text, in characters."""


class ChatTopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8; None: the token is no text."""


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(ResponseModel):
    """One entry for each token of the text."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | None = Field(None, exclude_if=_is_none)
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=_is_none)
    prompt_token_ids: tuple[int, ...] | None = Field(None, exclude_if=_is_none)


class Completion(ResponseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: CompletionUsage | None = Field(None, exclude_if=_is_none)
    service_tier: str | None = Field(None, exclude_if=_is_none)


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | None = Field(None, exclude_if=_is_none)


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: CompletionUsage
    service_tier: str | None = Field(None, exclude_if=_is_none)
    prompt_logprobs: PromptLogprobs | None = Field(None, exclude_if=_is_none)
    prompt_token_ids: tuple[int, ...] | None = Field(None, exclude_if=_is_none)


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = Field(None, exclude_if=_is_none)
    content: str | None = Field(None, exclude_if=_is_none)


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] | None = Field(None, exclude_if=_is_none)


class ChatCompletionChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: CompletionUsage | None = Field(None, exclude_if=_is_none)
    service_tier: str | None = Field(None, exclude_if=_is_none)
    prompt_token_ids: tuple[int, ...] | None = Field(None, exclude_if=_is_none)


class Model(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stallfree"
    max_model_len: int


class ModelList(ResponseModel):
    """What can be served now."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]


class ErrorBody(ResponseModel):
    """The body of every refusal, and the data of an error event in a stream."""

    error: ErrorInfo
