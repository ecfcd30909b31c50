"""Router ↔ worker: the messages, and the HTTP routes they travel on.

    GET    /wire/model                      → ModelCard       what the worker serves
    GET    /wire/tokenizer                  → tokenizer.json  bytes, ETag = ModelCard.tokenizer_sha256; and HEAD. There
                                                              before the model is, which takes longer to load
    GET    /wire/frames?connection_id=…     → Frame, Frame, … one JSON object a line, until either side leaves
    POST   /wire/requests    SubmitRequest  → 202 SubmitAccepted | error body
    DELETE /wire/requests/{request_id}?attempt=…   → 204      cancel; true also for one that is not there

A router opens one frame stream per worker under a fresh connection id, and submits requests that name it. A request
lives no longer than the stream that carries its events: when the stream closes, the worker frees its requests. Each
engine step becomes at most one frame per stream. A worker with nothing to say still sends a frame with its status
every `STATUS_INTERVAL_SECONDS`, so silence means that it is gone or frozen.

The worker knows tokens only: text, stop strings and OpenAI shapes are the router's.
"""

from __future__ import annotations

from typing import Literal, NewType

from pydantic import BaseModel, ConfigDict, Field

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.worker_status import WorkerStatus

STATUS_INTERVAL_SECONDS = 0.5
MODEL_PATH = "/wire/model"
TOKENIZER_PATH = "/wire/tokenizer"
FRAMES_PATH = "/wire/frames"
REQUESTS_PATH = "/wire/requests"
MAX_LOGPROBS = 20
MAX_DEFINITION_BYTES = 131_072
"""Of a structured output, in UTF-8."""

RequestId = NewType("RequestId", str)
ConnectionId = NewType("ConnectionId", str)
FinishReason = Literal["stop", "length"]


class WireModel(BaseModel):
    """What one version adds, another one skips: routers and workers are rolled one after the other."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class StructuredOutput(WireModel):
    """What the text of an output must be."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    definition: str = ""
    """The JSON schema as JSON; the regular expression; the grammar in Lark's syntax; the choices as a JSON list of
    strings; empty for json_object."""


class TokenLogprobs(WireModel):
    """How likely a token was: natural logarithms, of the model's own distribution before temperature and penalties."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest token ids with theirs, best first; as many as were asked for."""


GREEDY_BELOW_TEMPERATURE = 1e-5
"""Logits are not divided by less."""


class SamplingParams(WireModel):
    """How one request's tokens are drawn and when it ends. The router has resolved every default already.

    The draw of output token `i` depends on `(seed, i)` and the logits alone, never on the batch.
    """

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0, lt=2**64)
    stop_token_ids: frozenset[int] = frozenset()
    """Ends the request besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Neither end-of-sequence nor stop token ids end the request."""
    min_tokens: int = Field(default=0, ge=0)
    """Before so many output tokens no end-of-sequence or stop token is drawn."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that the output has."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken off the logits of tokens that the output has, as often as it has them."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Divides positive and multiplies negative logits of tokens that prompt or output have."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of these token ids."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """How many of the likeliest tokens are told besides each drawn one; None: no log-probabilities at all."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """The same for every prompt token but the first."""
    structured_output: StructuredOutput | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def adjusts_logits(self) -> bool:
        """Whether what the model says is changed before tokens are drawn."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    @property
    def wants_only_likeliest(self) -> bool:
        """Whether each token is the likeliest by what the model says, from `min_tokens` on, and nothing is told of the
        others."""
        return self.is_greedy and not self.adjusts_logits and self.logprobs is None


class SubmitRequest(WireModel):
    request_id: RequestId
    attempt: int = Field(ge=1)
    connection_id: ConnectionId
    prompt_token_ids: tuple[int, ...] = Field(min_length=1)
    sampling: SamplingParams
    expected_output_tokens: float = Field(ge=0, allow_inf_nan=False)
    """The router's prediction, told back summed in `WorkerStatus.expected_output_tokens_left`."""
    tbt_target_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """None: the worker's own default."""
    ttft_target_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """None: the worker's own default."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Lower comes first."""
    cache_salt: str = Field(default="", max_length=256)
    """Requests share cached prefixes only with those of the same salt."""


class SubmitAccepted(WireModel):
    status_sequence: int
    """Statuses with a higher sequence include this request."""
    tbt_target_seconds: float
    """The target that holds for this request, the worker's default filled in."""


class Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int
    """All generated tokens, an end-of-sequence or stop token included."""
    cached_tokens: int = 0
    """Those of the prompt whose keys and values were in the worker's prefix cache when the request was admitted."""


class TokenEvent(WireModel):
    """Tokens of one request that one step gave, or its end by an error. `finish_reason` "stop" means that the last
    token is an end-of-sequence or stop token: it is counted and never part of the text."""

    request_id: RequestId
    attempt: int
    index: int
    """Position of the first of `token_ids` in the request's output, from 0."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """The next prompt tokens' own, from the second on, as chunks are computed; all come before the first token or with
    it. `token_ids` may be empty then."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """So far; set on the event with the first token, and on the last."""
    error: ErrorInfo | None = None
    """The request ended here without an answer; `token_ids` is empty."""

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Frame(WireModel):
    events: tuple[TokenEvent, ...] = ()
    status: WorkerStatus | None = None


class SamplingDefaults(WireModel):
    """What the model's own generation_config asks for where a client says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class ModelCard(WireModel):
    """All that a router needs to know of the served model to turn text into tokens and back."""

    model: str
    max_model_len: int
    """Most tokens of prompt and output together, KV capacity already considered."""
    vocab_size: int
    """Token ids the tokenizer knows: `0 <= id < vocab_size`."""
    eos_token_ids: frozenset[int]
    tokenizer_sha256: str
    chat_template: str | None = None
    special_tokens: dict[str, str] = Field(default_factory=dict)
    """Named special tokens as the chat template knows them: bos_token, eos_token, …"""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
