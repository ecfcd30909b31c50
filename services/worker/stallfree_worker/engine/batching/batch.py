"""One step's batch while a rule composes it: the moves that a rule has, and what they cost.

Created by the scheduler for one step. It is the only place that admits and preempts. It may be composed while the step
before is being computed; what that step ends is left out when the batch is made into a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.order import OLDEST_SHARE, Ranking
from stallfree_worker.engine.prefix_cache import CachedPrefix
from stallfree_worker.engine.queues import RequestQueues
from stallfree_worker.engine.request import Line, Request
from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.engine.step_time import StepShape
from stallfree_worker.engine.token_budget import StepBudget

_SCORED_CHUNK_TOKENS = (256, 64, 16)
"""Sizes of a chunk whose prompt tokens' log-probabilities are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What every step keeps to."""

    max_num_seqs: int
    """Most requests that run at once."""
    max_model_len: int
    """Most tokens of one request, prompt and output together."""


class _Part(NamedTuple):
    """What one request has in the step."""

    request: Request
    num_tokens: int
    context_tokens: int
    """Tokens before these: of a decode, with its own."""
    is_decode: bool
    is_last: bool = False
    """Whether a token is drawn after a prefill's chunk."""
    num_scored_tokens: int = 0
    num_recomputed_tokens: int = 0

    def join(self, shape: StepShape) -> StepShape:
        """`shape` with this prefill."""
        shape = shape.with_chunk(
            self.num_tokens, self.context_tokens, is_last=self.is_last, needs_logits=self.request.needs_logits
        )
        return shape.with_rows(self.num_scored_tokens) if self.num_scored_tokens > 0 else shape


class Batch:
    def __init__(
        self,
        *,
        queues: RequestQueues,
        blocks: BlockManager,
        budget: StepBudget,
        limits: BatchLimits,
        now: float,
        preempted_ids: Iterable[RequestId] = (),
    ) -> None:
        """For a step that begins at `now`. `preempted_ids` are those that a batch gave up before this one had
        preempted."""
        self._now = now
        self._queues = queues
        self._blocks = blocks
        self._budget = budget
        self._limits = limits
        self._parts: list[_Part] = []
        self._shape_so_far = StepShape(windows=blocks.layout.window_shares)
        self._num_parts_so_far = 0
        """So many of the parts are in that shape."""
        self.preempted_ids = list(preempted_ids)
        """Requests that lost their blocks for it."""
        self._admitted: list[Request] = []
        self._num_prefix_query_tokens = 0
        self._num_prefix_hit_tokens = 0
        self._prefixes: dict[RequestId, CachedPrefix] = {}
        """What the cache has of waiting requests; forgotten whenever a block moves."""
        self._reserved: tuple[Request, int] | None = None
        """A begun prefill that has not had its turn, and the tokens that the others must leave it."""
        self.requests: list[Request] = []
        """Those that are in the step, in the order of its chunks."""
        self.is_limited = False
        """Whether a prefill got fewer tokens than it has left."""

    @cached_property
    def ranking(self) -> Ranking:
        """Of prefills: a step of decodes alone needs none."""
        return self._queues.order.at(self._now, best_priority=self._queues.best_priority)

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    @property
    def num_tokens(self) -> int:
        return self._shape.num_tokens

    @property
    def running(self) -> Collection[Request]:
        return self._queues.running

    @property
    def first_waiting(self) -> Request | None:
        """Of all that wait, where the order is that of arrival; of the first line elsewhere."""
        return next(self._queues.waiting.firsts(), None)

    @property
    def has_room_for_prefill(self) -> bool:
        """Whether the token budget leaves anything for anyone; not where decodes alone use it up."""
        return self._budget.tokens_left(self._shape_with_reserve(), context_tokens=0, most=1) > 0

    @property
    def has_place(self) -> bool:
        """Whether one more request may run, as far as their number goes."""
        return self._queues.num_running < self._limits.max_num_seqs

    def decoding(self) -> list[Request]:
        """Running requests with one token left, so that the next is drawn in this step. Where memory may not do for all
        of them, those first that keep their blocks longest."""
        decoding = [request for request in self._queues.running if _draws_next(request)]
        if self._blocks.num_free_blocks >= len(decoding) * self._blocks.layout.num_groups:
            return decoding
        return [request for request in self._keeping() if _draws_next(request)]

    def prefilling(self) -> list[Request]:
        """Running requests with prompt tokens, or tokens lost to a preemption, left to compute."""
        return [request for request in self._queues.running if not request.is_decoding]

    def waiting(self) -> list[Request]:
        """The first of every line."""
        return list(self._queues.waiting.firsts())

    def is_running(self, request: Request) -> bool:
        return self._queues.is_running(request)

    def waiting_in(self, line: Line, place: int) -> Request | None:
        """Who waits at this place of the line, from 0."""
        return self._queues.waiting.at(line, place)

    def is_being_spared(self, request: Request) -> bool:
        """Whether a running request, of no worse priority, is computing now what the waiting one needs next: waiting
        for it spares that. Who has waited too long already waits only for what is in this step."""
        owner_id = self._blocks.computing_owner(
            request.readable_hashes, self._prefix_of(request), request.num_known_tokens
        )
        owner = None if owner_id is None else self._queues.running_by_id(owner_id)
        if owner is None or owner.new.priority > request.new.priority:
            return False
        return owner in self.requests or not self.ranking.is_overdue(request)

    def add_decode(self, request: Request) -> None:
        """Adds the request's one token, if memory allows; the token budget does not hold it back.

        Where it needs a new block and none is free, others that are not in the step yet are preempted until one is:
        the last that the order keeps. The request itself is preempted only if it is that one.
        """
        if self._has_room_for_decode(request):
            self._add(
                _Part(
                    request=request,
                    num_tokens=1,
                    context_tokens=request.num_tokens,
                    is_decode=True,
                    num_recomputed_tokens=request.num_recomputed_tokens(1),
                )
            )

    def reserve_share(self, request: Request) -> None:
        """Keeps a share of the prefill tokens for a begun prefill until `add_prefill` is called for it."""
        num_tokens = self._num_tokens_that_fit(request) // OLDEST_SHARE
        if num_tokens > 0:
            self._reserved = (request, num_tokens)

    def has_room_for(self, request: Request) -> bool:
        """Whether the token budget leaves anything for this prefill."""
        return self._num_tokens_that_fit(request) > 0

    def add_prefill(self, request: Request) -> bool:
        """Adds as many of the request's tokens as the budget leaves, and tells whether that is all of them. Its blocks
        were reserved when it was admitted."""
        if self._reserved is not None and self._reserved[0] is request:
            self._reserved = None
        num_tokens_left, num_tokens = request.num_tokens_left, self._num_tokens_that_fit(request)
        if num_tokens > 0:
            self._add_chunk(request, num_tokens)
        is_whole = num_tokens == num_tokens_left
        self.is_limited |= not is_whole
        return is_whole

    def add_whole_prefill(self, request: Request) -> None:
        """Adds all that the request has to compute, whatever the token budget says."""
        self._add_chunk(request, request.num_tokens_left)

    def can_admit(self, request: Request, *, num_reserved_tokens: int = 0, without: Sequence[Request] = ()) -> bool:
        """Whether a waiting request may run, with blocks for all its tokens, or for `num_reserved_tokens` if that is
        more; with the blocks and places of the running requests `without` besides.

        One block of each KV group per running request stays free, so that each of them can grow once before anyone is
        preempted. A preempted request is under the same rule: it returns only when its whole recompute fits, and all
        its tokens are known.
        """
        if request.is_token_pending:
            return False
        num_running = self._queues.num_running - len(without)
        return num_running < self._limits.max_num_seqs and self._blocks.can_allocate(
            self._prefix_of(request),
            request.num_tokens,
            num_reserved_tokens=num_reserved_tokens,
            num_spare_blocks=num_running * self._blocks.layout.num_groups,
            without=[other.request_id for other in without],
        )

    def admit(self, request: Request, *, num_reserved_tokens: int = 0) -> None:
        """Lets a waiting request run. Ask `can_admit` first."""
        prefix = self._prefix_of(request)
        if request.num_cached_tokens is None and request.readable_hashes is not None:
            self._num_prefix_query_tokens += request.num_tokens
            self._num_prefix_hit_tokens += prefix.num_computed_tokens
        self._blocks.allocate(
            request.request_id,
            prefix,
            request.num_tokens,
            hashes=request.prefix_hashes,
            num_reserved_tokens=num_reserved_tokens,
        )
        self._prefixes.clear()
        self._queues.admit(request)
        self._admitted.append(request)
        request.begin(prefix.num_computed_tokens)

    def admit_first(self, *, num_reserved_tokens: int = 0) -> Request | None:
        """Lets the first that waits run, where the order is that of arrival; None where it must wait."""
        request = self.first_waiting
        if request is None or not self.can_admit(request, num_reserved_tokens=num_reserved_tokens):
            return None
        self.admit(request, num_reserved_tokens=num_reserved_tokens)
        return request

    def admit_by_displacing(self, request: Request) -> bool:
        """Lets a waiting request run in place of running ones that give way to it, as few as do, those first that the
        order keeps least. Changes nothing where it cannot run even so."""
        giving_way = [other for other in reversed(self._keeping()) if self.ranking.may_displace(request, other)]
        if not self.can_admit(request, without=giving_way):
            return False
        displaced: list[Request] = []
        while not self.can_admit(request, without=displaced):
            displaced.append(giving_way[len(displaced)])
        for other in tuple(displaced):
            if self.can_admit(request, without=[one for one in displaced if one is not other]):
                displaced.remove(other)
        for other in displaced:
            self._preempt(other)
        self.admit(request)
        return True

    def dismiss_admitted(self) -> None:
        """Sends back whom this batch has admitted, before anything of them is computed: what they were to read of the
        prefix cache is not to be read."""
        admitted = [one for one in self._admitted if self._queues.running_by_id(one.request_id) is one]
        self._leave_out(admitted)
        for request in reversed(admitted):  # each goes before those that wait
            self._preempt(request)

    def leave_out_ended(self) -> None:
        """Leaves out the requests that have ended since they were added."""
        self._leave_out([one for one in self.requests if self._queues.running_by_id(one.request_id) is not one])

    def plan(self, step_id: int, *, ended_request_ids: tuple[RequestId, ...] = ()) -> StepPlan | None:
        """The composed step; None if it is empty. No token of it may be pending."""
        if not self._parts:
            return None
        return StepPlan(
            step_id=step_id,
            ended_request_ids=ended_request_ids,
            chunks=tuple([self._chunk(part) for part in self._parts]),
            shape=self._shape,
            num_decode_tokens=self._shape.num_tokens - self._shape.num_prefill_tokens,
            num_prefill_tokens=self._shape.num_prefill_tokens,
            preempted_request_ids=tuple(self.preempted_ids),
            budget_seconds=self._budget.limit_seconds,
            budget_tokens=self._budget.limit_tokens,
            num_recomputed_tokens=sum([part.num_recomputed_tokens for part in self._parts]),
            num_prefix_query_tokens=self._num_prefix_query_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
        )

    def _has_room_for_decode(self, request: Request) -> bool:
        while self._queues.is_running(request):
            if self._blocks.append(request.request_id, request.num_tokens):
                self._prefixes.clear()
                return True
            # what others would lose changes with every eviction: the last may come to be one that is in the step
            self._preempt(next(other for other in reversed(self._keeping()) if other not in self.requests))
        return False

    def _keeping(self) -> list[Request]:
        """Running requests; the last is evicted first."""
        for request in self._queues.running:
            request.num_spared_tokens = self._blocks.num_kept_tokens(request.request_id)
        return self._queues.order.keeping(self._queues.running)

    def _prefix_of(self, request: Request) -> CachedPrefix:
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            prefix = self._blocks.find_prefix(request.readable_hashes, request.num_known_tokens)
            self._prefixes[request.request_id] = prefix
        return prefix

    def _preempt(self, victim: Request) -> None:
        require(victim not in self.requests, f"{victim.request_id}: preempted by a step that it is part of")
        self._prefixes.clear()
        self._queues.preempt(victim)
        self._blocks.free(victim.request_id)
        self.preempted_ids.append(victim.request_id)

    def _num_tokens_that_fit(self, request: Request) -> int:
        num_computed = request.num_computed_tokens
        if not self._queues.is_running(request):
            num_computed = self._prefix_of(request).num_computed_tokens
        most = min(request.num_tokens - num_computed, self._blocks.layout.largest_chunk_tokens)
        shape = self._shape_with_reserve()
        if request.new.sampling.prompt_logprobs is not None:
            return self._scored_tokens_that_fit(shape, context_tokens=num_computed, most=most)
        return self._budget.tokens_left(
            shape, context_tokens=num_computed, most=most, needs_logits=request.needs_logits
        )

    def _scored_tokens_that_fit(self, shape: StepShape, *, context_tokens: int, most: int) -> int:
        """Where log-probabilities of a prompt are told, the output layer computes a row for each of its tokens, which
        may cost more than all else: the first of a few sizes that fits together with its rows, or what does of the
        last."""
        fitting = 0
        for size in _SCORED_CHUNK_TOKENS:
            wanted = min(size, most)
            fitting = self._budget.tokens_left(shape.with_rows(wanted), context_tokens=context_tokens, most=wanted)
            if fitting == wanted:
                break
        return fitting

    @property
    def _shape(self) -> StepShape:
        """Of all parts. Decodes are taken in together: they are many."""
        if self._num_parts_so_far < len(self._parts):
            new = self._parts[self._num_parts_so_far :]
            decodes = [part for part in new if part.is_decode]
            shape = self._shape_so_far.with_decodes(
                [part.context_tokens for part in decodes],
                needs_logits=any(part.request.needs_logits for part in decodes),
            )
            for part in new:
                if not part.is_decode:
                    shape = part.join(shape)
            self._shape_so_far, self._num_parts_so_far = shape, len(self._parts)
        return self._shape_so_far

    def _shape_with_reserve(self) -> StepShape:
        if self._reserved is None:
            return self._shape
        request, num_tokens = self._reserved
        return self._shape.with_chunk(num_tokens, request.num_computed_tokens, is_last=False)

    def _add_chunk(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        self._blocks.advance(request.request_id, start, start + num_tokens)
        self._prefixes.clear()
        self._add(
            _Part(
                request=request,
                num_tokens=num_tokens,
                context_tokens=start,
                is_decode=False,
                is_last=num_tokens == request.num_tokens_left,
                num_scored_tokens=request.num_scored_tokens(num_tokens),
                num_recomputed_tokens=request.num_recomputed_tokens(num_tokens),
            )
        )

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self.requests.append(part.request)

    def _leave_out(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        self._parts = [part for part in self._parts if part.request not in requests]
        self.requests = [part.request for part in self._parts]
        self._shape_so_far = StepShape(windows=self._shape_so_far.windows)
        self._num_parts_so_far = 0

    def _chunk(self, part: _Part) -> Chunk:
        request_id = part.request.request_id
        return part.request.next_chunk(
            part.num_tokens,
            self._blocks.block_tables(request_id),
            num_shared_tokens=self._blocks.num_shared_tokens(request_id),
        )


def _draws_next(request: Request) -> bool:
    return request.is_decoding and not request.wants_nothing_more
