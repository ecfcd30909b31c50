"""One step's batch while a rule composes it: the moves that a rule has, and what they cost.

Created by the scheduler for one step. It is the only place that admits and preempts.
"""

from __future__ import annotations

from dataclasses import dataclass

from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.queues import RequestQueues
from stallfree_worker.engine.request import Request
from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.engine.step_time import StepShape
from stallfree_worker.engine.token_budget import StepBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What every step keeps to."""

    max_num_seqs: int
    """Most requests that run at once."""
    max_model_len: int
    """Most tokens of one request, prompt and output together."""


class Batch:
    def __init__(self, *, queues: RequestQueues, blocks: BlockManager, budget: StepBudget, limits: BatchLimits) -> None:
        self._queues = queues
        self._blocks = blocks
        self._budget = budget
        self._limits = limits
        self._shape = StepShape()
        self._chunks: list[Chunk] = []
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self.requests: list[Request] = []
        """The request of every chunk, in the order of the chunks."""

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    @property
    def num_tokens(self) -> int:
        return self._shape.num_tokens

    @property
    def num_tokens_of_first_waiting(self) -> int:
        """Tokens that the request which waits first has to compute; 0 where none waits."""
        request = self._queues.first_waiting
        return 0 if request is None else request.num_tokens

    @property
    def has_room_for_prefill(self) -> bool:
        """Whether the token budget leaves anything for a new request; not where decodes alone use it up."""
        return self._budget.tokens_left(self._shape, context_tokens=0, most=1) > 0

    def decoding(self) -> list[Request]:
        """Running requests with one token left, the one drawn last; oldest first."""
        return [request for request in self._queues.running if request.is_decoding]

    def prefilling(self) -> list[Request]:
        """Running requests with prompt tokens, or tokens lost to a preemption, left to compute; oldest first."""
        return [request for request in self._queues.running if not request.is_decoding]

    def add_decode(self, request: Request) -> None:
        """Adds the request's one token, if memory allows; the token budget does not hold it back.

        Where it needs a new block and none is free, the requests that arrived last are preempted until one is. The
        request itself is preempted only if it is the last.
        """
        if self._has_room_for_decode(request):
            self._shape = self._shape.with_decode(request.num_tokens)
            self._add(request, 1)

    def add_prefill(self, request: Request) -> None:
        """Adds as many of the request's tokens as the budget leaves. Its blocks were reserved when it was admitted."""
        num_tokens = self._budget.tokens_left(
            self._shape, context_tokens=request.num_computed_tokens, most=request.num_tokens_left
        )
        if num_tokens > 0:
            self._add_chunk(request, num_tokens)

    def add_whole_prefill(self, request: Request) -> None:
        """Adds all that the request has to compute, whatever the token budget says."""
        self._add_chunk(request, request.num_tokens_left)

    def admit(self, *, num_reserved_tokens: int = 0) -> Request | None:
        """Lets the first waiting request run, with blocks for all its tokens, or for `num_reserved_tokens` if that is
        more; None where it must wait.

        One block per running request stays free, so that each of them can grow once before anyone is preempted. A
        preempted request is under the same rule: it returns only when its whole recompute fits.
        """
        request = self._queues.first_waiting
        if request is None or self._queues.num_running >= self._limits.max_num_seqs:
            return None
        num_tokens = max(request.num_tokens, num_reserved_tokens)
        if not self._blocks.can_allocate(num_tokens, num_spare_blocks=self._queues.num_running):
            return None
        self._blocks.allocate(request.request_id, num_tokens)
        return self._queues.admit_first()

    def plan(self, step_id: int) -> StepPlan | None:
        """The composed step; None if it is empty."""
        if not self._chunks:
            return None
        return StepPlan(
            step_id=step_id,
            chunks=tuple(self._chunks),
            shape=self._shape,
            num_decode_tokens=self._shape.num_tokens - self._shape.num_prefill_tokens,
            num_prefill_tokens=self._shape.num_prefill_tokens,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    def _has_room_for_decode(self, request: Request) -> bool:
        while self._queues.is_running(request):
            if self._blocks.can_append(request.request_id, request.num_tokens):
                self._blocks.append(request.request_id, request.num_tokens)
                return True
            self._preempt_last()
        return False

    def _preempt_last(self) -> None:
        victim = self._queues.preempt_last()
        require(victim not in self.requests, f"{victim.request_id}: preempted by a step that it is part of")
        self._blocks.free(victim.request_id)
        self._num_preemptions += 1

    def _add_chunk(self, request: Request, num_tokens: int) -> None:
        is_last = num_tokens == request.num_tokens_left
        self._shape = self._shape.with_chunk(num_tokens, request.num_computed_tokens, is_last=is_last)
        self._add(request, num_tokens)

    def _add(self, request: Request, num_tokens: int) -> None:
        self._num_recomputed_tokens += request.num_recomputed_tokens(num_tokens)
        self._chunks.append(request.next_chunk(num_tokens, self._blocks.block_table(request.request_id)))
        self.requests.append(request)
