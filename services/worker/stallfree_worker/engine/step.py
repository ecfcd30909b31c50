"""The messages of a step: what the engine plans, what the runner answers, what the engine then tells the outside.

All are immutable; live request objects never cross a boundary. The engine and the model share this module only.

What every step makes, or makes for every one of its tokens, is a tuple: between two steps, a frozen dataclass takes
four times as long to make.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import FinishReason, RequestId, SamplingParams, TokenLogprobs
from stallfree_worker.engine.step_time import StepShape, StepTimeLine

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
    ttft_target_seconds: float = 5.0
    priority: int = 0
    """Lower comes first."""
    cache_salt: str = ""
    """Prefixes are shared only among requests of the same salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """All tokens of a request before the one that is drawn next."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers of a model that share one block table: each block of the group holds the same tokens in all of them.

    The blocks of all groups come from one pool and are equal in size, so that memory moves freely between groups, as
    in vLLM's hybrid KV cache. A group without a window keeps all tokens.
    """

    window_tokens: int | None = None
    """A token sees itself and the `window_tokens - 1` before it; None sees all."""
    num_layers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """The blocks that hold a request's tokens in one KV group, in order of position.

    Position `p` is in `blocks[p // block_size - num_forgotten]`.
    """

    blocks: tuple[int, ...]
    num_forgotten: int = 0
    """Blocks before `blocks[0]` that lay wholly behind the group's window and are given back."""
    packed: array[int] = field(init=False, repr=False, compare=False)
    """`blocks` as 32-bit integers, which kernels read where they stand: a table goes into every step of its request,
    and rarely changes. Nobody may change these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", array("i", self.blocks))


class BlockTables(tuple[BlockTable, ...]):  # noqa: SLOT001 - a tuple has no room for slots
    """Those of one request, one for each of the runner's `kv_groups`."""

    packed: bytes
    """Of each table, the address of its `packed` and `num_forgotten`, as 64-bit integers: `BlockTable` of
    `native/attention.h`. It holds for as long as this object lives. A change here is one of the kernels' interface."""
    num_reached_blocks: int
    """Blocks of the text, from the first on, as far as every table reaches."""

    def __init__(self, tables: Iterable[BlockTable]) -> None:
        del tables  # they are in it already
        numbers = [number for table in self for number in (table.packed.buffer_info()[0], table.num_forgotten)]
        self.packed = array("q", numbers).tobytes()
        self.num_reached_blocks = min([table.num_forgotten + len(table.blocks) for table in self])

    def __reduce__(self) -> tuple[type[BlockTables], tuple[tuple[BlockTable, ...]]]:
        """A copy has addresses of its own."""
        return BlockTables, (tuple(self),)


class Chunk(NamedTuple):
    """The slice of one request's tokens that is computed in one step. A decode is a chunk of one token."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    """Tokens of this request whose keys and values are in the cache already: the position of `token_ids[0]`."""
    block_tables: BlockTables
    """They reach to the chunk's last token, at least, and back to the first that a window of the group lets the chunk
    look at. Tables of groups with equal windows begin alike."""
    sampling: SamplingParams
    output_index: int | None
    """Index of the output token drawn after this chunk; None while tokens of the request are left to compute."""
    needs_logits: bool = True
    """Whether its draw takes more than knowing the likeliest token."""
    num_shared_tokens: int = 0
    """Tokens in blocks that other requests may use too: their keys and values stand there already and are not written
    again, not even where one of them is computed once more to draw what follows it."""
    history: TokenHistory | None = None
    """Set where penalties or a structured output look back at what the text has so far, with an `output_index`; and
    where log-probabilities of prompt tokens are still to be told, which the chunk predicts."""


class StepPlan(NamedTuple):
    """One hybrid batch: all running decodes, then prefill chunks."""

    step_id: int
    chunks: tuple[Chunk, ...]
    num_decode_tokens: int
    num_prefill_tokens: int
    shape: StepShape = StepShape()
    """What drives the step's time."""
    ended_request_ids: tuple[RequestId, ...] = ()
    """Requests with a structured output that ended in any way since the step before: the runner forgets them."""
    preempted_request_ids: tuple[RequestId, ...] = ()
    """Requests that lost their blocks while this step was planned. One of them may be in it, begun anew, where what it
    gave way to has ended meanwhile."""
    num_recomputed_tokens: int = 0
    """Tokens of the chunks that had been computed before and were lost to a preemption."""
    num_prefix_query_tokens: int = 0
    """Tokens that were looked up in the prefix cache while this step was planned."""
    num_prefix_hit_tokens: int = 0
    """Those of them that the cache had."""
    budget_seconds: float | None = None
    """What the token budget let this step take; None where it does not reckon in seconds."""
    budget_tokens: int | None = None
    """What the token budget let this step hold; None where it is no one number."""

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_prefill_tokens


class StepResult(NamedTuple):
    """What the runner computed: for every chunk with an `output_index`, one token or one failure. A chunk that had to
    tell log-probabilities of its prompt may fail without one."""

    step_id: int
    token_id_by_request: Mapping[RequestId, int]
    failure_by_request: Mapping[RequestId, str]
    """Requests that cannot go on, with the reason. They fail alone."""
    not_finite_request_ids: frozenset[RequestId] = frozenset()
    """Those of them whose logits were not finite: nothing that they read or computed may be shared any more."""
    logprobs_by_request: Mapping[RequestId, TokenLogprobs] = MappingProxyType({})
    """Of the drawn tokens, for requests that asked for them."""
    prompt_logprobs_by_request: Mapping[RequestId, tuple[TokenLogprobs, ...]] = MappingProxyType({})
    """For requests that asked for them, of the prompt tokens that this step's chunk predicts: those at the positions
    one behind the chunk's own, as far as the prompt reaches."""
    completed_request_ids: frozenset[RequestId] = frozenset()
    """Requests whose structured output was whole before this draw: their token, whatever it is, ends them and is no
    text."""
    postponed_request_ids: frozenset[RequestId] = frozenset()
    """Requests that nothing can be drawn for yet, because their structured output is not ready: whatever else is said
    of their token does not count. The last token of their chunk is to be computed again."""


class Runner(Protocol):
    """Computes steps. The only thing of the model that the engine sees."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The model's layers by what they keep; at least one group."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, by the model; the KV capacity is the engine's own business."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


class EngineEvent(NamedTuple):
    """One token of one request, or its end by an error, or log-probabilities of its prompt while that is computed."""

    request_id: RequestId
    output_index: int
    """Of the token, or of the one that would be next."""
    token_id: int | None
    """None with an `error`, and where `prompt_logprobs` come before the first token."""
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had when the request was first admitted."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the next prompt tokens, each told once, whatever is computed again after a preemption."""
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    time_to_first_token_seconds: float | None = None
    """From `Engine.submit` to the end of the step that drew the token; on the first token only."""
    time_between_tokens_seconds: float | None = None
    """Since the token before; on every token but the first."""
    stall_seconds: float = 0.0
    """The part of that gap beyond the request's TBT target."""
    stall_cause: StallCause | None = None


class EngineStatus(NamedTuple):
    """The engine's state between two steps."""

    requests_running: int
    requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    token_budget_tokens: int
    """What a step holds now where prefills are waiting."""
    prefill_tokens_left: int
    expected_output_tokens_left: int
    step_time: StepTimeLine
    step_time_error_ratio: float
    """|predicted - real| / real of the last steps, a running mean."""
    longest_decode_wait_seconds: float = 0.0
    """How long the decode that waits longest has waited for its next token."""
    longest_prefill_wait_seconds: float = 0.0
    """How long the prompt that waits longest has gone without a chunk."""


class StepRecord(NamedTuple):
    """What one step held and how long it took, to be looked at: measured by the clock around what the step does anyway,
    never by an extra synchronisation of the device. Durations and instants are in seconds of the engine's clock.
    """

    step_id: int
    started_at: float
    schedule_seconds: float
    execute_seconds: float
    apply_seconds: float
    idle_seconds: float | None
    """Since the end of the step before, while there was work: the inter-batch delay. None where nothing waited."""
    predicted_seconds: float
    """The expectation for this shape, before the step ran."""
    predicted_quantile_seconds: float
    """The quantile of the prediction that a budget in seconds uses."""
    budget_seconds: float | None
    budget_tokens: int | None
    request_ids: tuple[RequestId, ...]
    """One for each chunk, decodes first; `chunk_tokens` and `context_tokens` go with them."""
    chunk_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    """Tokens of the request that were in the KV cache before the chunk."""
    num_decodes: int
    num_recomputed_tokens: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    preempted_request_ids: tuple[RequestId, ...]
    requests_running: int
    """After the step, like those that wait and the free blocks."""
    requests_waiting: int
    num_free_blocks: int

    @property
    def seconds(self) -> float:
        """Schedule, execute and apply."""
        return self.schedule_seconds + self.execute_seconds + self.apply_seconds

    @property
    def ended_at(self) -> float:
        return self.started_at + self.seconds

    @property
    def num_decode_tokens(self) -> int:
        """A decode is a chunk of one token."""
        return self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.chunk_tokens) - self.num_decodes

    @property
    def prediction_error_ratio(self) -> float | None:
        """|predicted - real| / real; None for a step without a duration."""
        return abs(self.predicted_seconds - self.seconds) / self.seconds if self.seconds > 0 else None


class StepReport(NamedTuple):
    """What one step gave."""

    events: tuple[EngineEvent, ...]
    status: EngineStatus
    record: StepRecord | None = None
    """None where nothing was computed (only cancellations, say)."""

    @property
    def step_seconds(self) -> float:
        return 0.0 if self.record is None else self.record.seconds

    @property
    def num_decode_tokens(self) -> int:
        return 0 if self.record is None else self.record.num_decode_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return 0 if self.record is None else self.record.num_prefill_tokens

    @property
    def num_preemptions(self) -> int:
        return 0 if self.record is None else len(self.record.preempted_request_ids)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens of this step's chunks that had been computed before and were lost to a preemption."""
        return 0 if self.record is None else self.record.num_recomputed_tokens

    @property
    def num_prefix_query_tokens(self) -> int:
        return 0 if self.record is None else self.record.num_prefix_query_tokens

    @property
    def num_prefix_hit_tokens(self) -> int:
        return 0 if self.record is None else self.record.num_prefix_hit_tokens
