"""One step's batch while a rule composes it: the moves that a rule has, and what they cost.

Created by the scheduler for one step. It is the only place that admits and preempts.
"""

from __future__ import annotations

from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.queues import RequestQueues
from stallfree_worker.engine.request import Request
from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.engine.token_budget import TokenBudget


class Batch:
    def __init__(self, *, queues: RequestQueues, blocks: BlockManager, budget: TokenBudget, max_num_seqs: int) -> None:
        self._queues = queues
        self._blocks = blocks
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._chunks: list[Chunk] = []
        self._num_decode_tokens = 0
        self._num_prefill_tokens = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self.requests: list[Request] = []
        """The request of every chunk, in the order of the chunks."""

    @property
    def tokens_left(self) -> int:
        """What the token budget leaves for prefill tokens; 0 where decodes alone use it up."""
        return self._budget.tokens_left(self._num_decode_tokens + self._num_prefill_tokens)

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
            self._num_decode_tokens += 1
            self._add(request, 1)

    def add_prefill(self, request: Request) -> None:
        """Adds as many of the request's tokens as the budget leaves. Its blocks were reserved when it was admitted."""
        num_tokens = min(request.num_tokens_left, self.tokens_left)
        if num_tokens > 0:
            self._num_prefill_tokens += num_tokens
            self._add(request, num_tokens)

    def admit(self) -> Request | None:
        """Lets the first waiting request run, with blocks for all its tokens; None where it must wait.

        One block per running request stays free, so that each of them can grow once before anyone is preempted. A
        preempted request is under the same rule: it returns only when its whole recompute fits.
        """
        request = self._queues.first_waiting
        if request is None or self._queues.num_running >= self._max_num_seqs:
            return None
        if not self._blocks.can_allocate(request.num_tokens, num_spare_blocks=self._queues.num_running):
            return None
        self._blocks.allocate(request.request_id, request.num_tokens)
        return self._queues.admit_first()

    def plan(self, step_id: int) -> StepPlan | None:
        """The composed step; None if it is empty."""
        if not self._chunks:
            return None
        return StepPlan(
            step_id=step_id,
            chunks=tuple(self._chunks),
            num_decode_tokens=self._num_decode_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
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

    def _add(self, request: Request, num_tokens: int) -> None:
        self._num_recomputed_tokens += request.num_recomputed_tokens(num_tokens)
        self._chunks.append(request.next_chunk(num_tokens, self._blocks.block_table(request.request_id)))
        self.requests.append(request)
