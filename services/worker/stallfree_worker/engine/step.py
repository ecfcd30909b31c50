"""The messages of a step: what the engine plans, what the runner answers, what the engine then tells the outside.

All are immutable; live request objects never cross a boundary. The engine and the model share this module only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import FinishReason, RequestId, SamplingParams
from stallfree_shared.worker_status import StepTimeCoefficients
from stallfree_worker.engine.step_time import StepShape

StallCause = Literal["prefill", "decode", "preemption"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What a request brings to the engine."""

    request_id: RequestId
    """Unique among all requests that this engine has not yet ended."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tbt_target_seconds: float
    expected_output_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The slice of one request's tokens that is computed in one step. A decode is a chunk of one token."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    """Tokens of this request whose keys and values are in the cache already: the position of `token_ids[0]`."""
    block_table: tuple[int, ...]
    """Blocks that hold positions 0 to `num_computed_tokens + len(token_ids) - 1`, at least."""
    sampling: SamplingParams
    output_index: int | None
    """Index of the output token drawn after this chunk; None while tokens of the request are left to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One hybrid batch: all running decodes, then prefill chunks."""

    step_id: int
    chunks: tuple[Chunk, ...]
    num_decode_tokens: int
    num_prefill_tokens: int
    shape: StepShape = field(default_factory=StepShape)
    """What drives the step's time."""
    num_preemptions: int = 0
    """Requests that lost their blocks while this step was planned; none of them is in it."""
    num_recomputed_tokens: int = 0
    """Tokens of the chunks that had been computed before and were lost to a preemption."""

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the runner computed: for every chunk with an `output_index`, one token or one failure."""

    step_id: int
    token_id_by_request: Mapping[RequestId, int]
    failure_by_request: Mapping[RequestId, str]
    """Requests whose logits were not finite, with the reason. They fail alone."""


class Runner(Protocol):
    """Computes steps. The only thing of the model that the engine sees."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, by the model; the KV capacity is the engine's own business."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """One token of one request, or its end by an error."""

    request_id: RequestId
    index: int
    token_id: int | None
    """None only with an `error`."""
    num_prompt_tokens: int
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    time_to_first_token_seconds: float | None = None
    """From `Engine.submit` to the end of the step that drew the token; on the first token only."""
    time_between_tokens_seconds: float | None = None
    """Since the token before; on every token but the first."""
    stall_seconds: float = 0.0
    """The part of that gap beyond the request's TBT target."""
    stall_cause: StallCause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The engine's state between two steps."""

    requests_running: int
    requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    token_budget_tokens: int
    """What a step holds now where prefills are waiting."""
    prefill_tokens_left: int
    expected_output_tokens_left: int
    step_time: StepTimeCoefficients
    step_time_error_ratio: float
    """|predicted - real| / real of the last steps, a running mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step gave. `step_seconds` is 0 where nothing was computed (only cancellations, say)."""

    events: tuple[EngineEvent, ...]
    status: EngineStatus
    step_seconds: float = 0.0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Tokens of this step's chunks that had been computed before and were lost to a preemption."""
