"""Decides what each step computes, and what its results mean.

Owns every request inside the engine, the queues and the block manager. It reads no clock, computes nothing and starts
nothing. `Engine`, the simulator and the property tests call it: `schedule`, then `apply` with the result of that very
plan, then `schedule` again. `submit` and `cancel` may come between any two of these.

While a plan is being computed, `prepare` may compose the step after it, as if every request in the plan drew its token
and went on. `schedule` then has only to leave out those that did not, and to fill in the tokens. What each request gets
is the same either way; a place that an end leaves is filled one step later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stallfree_shared.wire import RequestId, TokenLogprobs
from stallfree_worker.engine.batching.batch import Batch, BatchLimits
from stallfree_worker.engine.batching.rule import BatchingRule
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import IntegrityError, require
from stallfree_worker.engine.order import Order
from stallfree_worker.engine.prefix_hashes import PrefixHashes
from stallfree_worker.engine.queues import RequestQueues
from stallfree_worker.engine.request import Request
from stallfree_worker.engine.step import Chunk, EngineEvent, NewRequest, StepPlan, StepResult
from stallfree_worker.engine.token_budget import TokenBudget
from stallfree_worker.engine.token_events import failure_event, prompt_logprobs_event, token_event


class SchedulerLoad(NamedTuple):
    """What is still to be done, and how long somebody has waited for it."""

    num_prefill_tokens_left: int
    """Tokens to compute before every request is decoding, those lost to preemptions included."""
    num_expected_output_tokens_left: int
    longest_decode_wait_seconds: float
    """Since the last token of the request, among those that have drawn one, that waits longest for the next."""
    longest_prefill_wait_seconds: float
    """Without a chunk, since its last or its submission, of the prompt that waits longest for one."""


class Scheduler:
    def __init__(
        self,
        *,
        rule: BatchingRule,
        order: Order,
        budget: TokenBudget,
        blocks: BlockManager,
        limits: BatchLimits,
        eos_token_ids: frozenset[int],
        has_prefix_cache: bool,
    ) -> None:
        self._rule = rule
        self._budget = budget
        self._blocks = blocks
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._has_prefix_cache = has_prefix_cache
        self._queues = RequestQueues(order)
        self._plan: StepPlan | None = None
        """The one in flight."""
        self._requests_of_plan: list[Request] = []
        self._is_advanced = False
        """Whether the tokens of the plan in flight are counted as computed."""
        self._prepared: Batch | None = None
        """The step after the one in flight."""
        self._ended_request_ids: list[RequestId] = []
        """Since the last plan: requests that the runner is to forget."""
        self._num_submitted = 0
        self._num_steps = 0

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._queues

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._queues.waiting.num_tokens

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    def load(self, now: float) -> SchedulerLoad:
        """Costs nothing for requests that wait for their first chunk, but for the first of each line."""
        waiting = self._queues.waiting
        num_prefill, num_output = waiting.num_tokens, waiting.num_expected_output_tokens
        for request in self._queues.running:
            num_output += request.expected_output_tokens_left
            if not request.is_decoding:
                num_prefill += request.num_tokens_left
        last_token_at = waits_since = now
        for request in self._present():
            if request.last_token_at is None:
                waits_since = min(waits_since, request.waits_since)
            else:
                last_token_at = min(last_token_at, request.last_token_at)
        return SchedulerLoad(num_prefill, num_output, now - last_token_at, now - waits_since)

    def submit(self, new: NewRequest, now: float) -> None:
        """Takes a new request. It must fit the KV cache when it runs alone; the engine sees to that."""
        require(new.request_id not in self._queues, f"{new.request_id} is here already")
        request = Request(
            new=new, arrival_number=self._num_submitted, submitted_at=now, prefix_hashes=self._prefix_hashes(new)
        )
        prefix = self._blocks.find_prefix(request.readable_hashes, request.num_tokens)
        request.num_spared_tokens = prefix.num_computed_tokens
        self._queues.enqueue(request)
        self._num_submitted += 1

    def cancel(self, request_id: RequestId) -> bool:
        """Ends a request without an event; False if it is not here.

        Its blocks are free at once, or, while a step that writes to them is running, as soon as that step is applied.
        """
        removed = self._queues.remove(request_id)
        if removed is None:
            return False
        request, was_running = removed
        request.is_cancelled = True
        self._note_end(request)
        if was_running and not self._is_in_flight(request):
            self._blocks.free(request_id)
        return True

    def schedule(self, now: float) -> StepPlan | None:
        """The step that begins at `now`; None if there is nothing to compute. Costs nothing for requests that wait."""
        require(self._plan is None, "the step before has not been applied")
        batch = self._take_prepared(now)
        self._plan = batch.plan(self._num_steps, ended_request_ids=tuple(self._ended_request_ids))
        if self._plan is None and not self._is_idle:
            raise IntegrityError(f"the rule left every request out: {self._needs_of_first()}")
        self._requests_of_plan = batch.requests
        self._is_advanced = False
        if self._plan is not None:
            self._num_steps += 1
            self._ended_request_ids.clear()
        if self._plan is not None and batch.is_limited:
            self._budget.note_limited(self._plan.num_tokens)
        return self._plan

    def prepare(self, expected_end: float) -> None:
        """Composes the step after the one in flight, which will likely end at `expected_end`. Does nothing where that
        one's draws may be postponed: then nobody knows what comes next."""
        plan = self._plan
        if plan is None or any(chunk.sampling.structured_output is not None for chunk in plan.chunks):
            return
        self._advance()
        self._prepared = self._compose(expected_end)

    def apply(self, result: StepResult, now: float) -> tuple[EngineEvent, ...]:
        """Takes in what the planned step gave. `now` is the instant of its end. Events are in the order of the plan.

        Raises:
            IntegrityError: the result is not that of the plan, or lacks a token.
        """
        plan = self._plan
        if plan is None or plan.step_id != result.step_id:
            raise IntegrityError(f"step {result.step_id} is not the one in flight")
        self._advance()
        self._plan = None
        if result.not_finite_request_ids and self._prepared is not None:
            self._prepared.dismiss_admitted()
        events = []
        for request, chunk in zip(self._requests_of_plan, plan.chunks, strict=True):
            if request.is_cancelled:
                if request.prefix_hashes is not None and request.request_id in result.not_finite_request_ids:
                    self._blocks.forget(request.prefix_hashes)
                if request.request_id in self._blocks.owners:  # else it was preempted for the step after this one
                    self._blocks.free(request.request_id)
                continue
            request.waits_since = now
            if request.request_id in result.postponed_request_ids:
                request.postpone_draw()
            event = self._take(request, chunk, result, now=now, plan=plan)
            if event is not None:
                events.append(event)
        self._requests_of_plan = []
        return tuple(events)

    def check_integrity(self) -> None:
        """Raises IntegrityError where a queue, a block or a request contradicts another."""
        self._queues.check_integrity()
        self._blocks.check_integrity()
        leaving = [
            request
            for request in self._requests_of_plan
            if request.is_cancelled and request.request_id in self._blocks.owners
        ]
        self._check_owners([*self._queues.running, *leaving])
        require(self._queues.num_running <= self._limits.max_num_seqs, "more requests run than may")
        require(self._plan is not None or not self._requests_of_plan, "requests of a step that is over")

    @property
    def _is_idle(self) -> bool:
        return self._queues.num_running == 0 and self._queues.num_waiting == 0

    def _take_prepared(self, now: float) -> Batch:
        """What `prepare` has composed, as far as it still holds; composed `now` where that is nothing."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return self._compose(now)
        prepared.leave_out_ended()
        return prepared if prepared.requests else self._compose(now, preempted_ids=prepared.preempted_ids)

    def _compose(self, now: float, *, preempted_ids: Sequence[RequestId] = ()) -> Batch:
        """A batch for the step that begins at `now`. Tokens that are still pending count as drawn then."""
        due = [request.decode_due_at(now) for request in self._queues.running]
        batch = Batch(
            queues=self._queues,
            blocks=self._blocks,
            budget=self._budget.for_step(token_deadlines=[each for each in due if each is not None], now=now),
            limits=self._limits,
            now=now,
            preempted_ids=preempted_ids,
        )
        self._rule.compose(batch)
        return batch

    def _advance(self) -> None:
        """Counts what the plan in flight computes as computed, once."""
        plan = self._plan
        if plan is None or self._is_advanced:
            return
        self._is_advanced = True
        for request, chunk in zip(self._requests_of_plan, plan.chunks, strict=True):
            if not request.is_cancelled:
                request.advance(len(chunk.token_ids), draws=chunk.output_index is not None)
                self._blocks.commit(request.request_id, chunk.num_computed_tokens + len(chunk.token_ids))

    def _present(self) -> Iterator[Request]:
        """All that have had a chunk, and of those that have not the longest waiting of each line."""
        yield from self._queues.running
        yield from self._queues.waiting.longest_waiting()

    def _needs_of_first(self) -> str:
        """What the request that would be the next to compute asks for, and what there is."""
        first = next(self._present())
        return (
            f"{first.request_id} has {first.num_tokens_left} tokens to compute; {self.num_running} run, "
            f"{self.num_waiting} wait, {self.num_free_blocks} of {self._blocks.num_blocks} blocks are free"
        )

    def _is_in_flight(self, request: Request) -> bool:
        return any(request is other for other in self._requests_of_plan)

    def _take(
        self, request: Request, chunk: Chunk, result: StepResult, *, now: float, plan: StepPlan
    ) -> EngineEvent | None:
        """What the outside is told of a chunk: a failure, a token, log-probabilities of the prompt, or nothing."""
        failure = result.failure_by_request.get(request.request_id)
        if failure is not None:
            if request.prefix_hashes is not None and request.request_id in result.not_finite_request_ids:
                self._blocks.forget(request.prefix_hashes)
            self._end(request)
            return failure_event(request, failure)
        scores = result.prompt_logprobs_by_request.get(request.request_id)
        fresh = None if scores is None else request.take_prompt_logprobs(chunk.num_computed_tokens + 1, scores)
        if chunk.output_index is not None and not request.is_draw_postponed:
            return self._take_output(request, result, fresh, now=now, plan=plan)
        return None if fresh is None else prompt_logprobs_event(request, fresh)

    def _take_output(
        self,
        request: Request,
        result: StepResult,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
        *,
        now: float,
        plan: StepPlan,
    ) -> EngineEvent:
        token_id = result.token_id_by_request.get(request.request_id)
        if token_id is None:
            raise IntegrityError(f"step {plan.step_id} gave no token for {request.request_id}")
        is_complete = request.request_id in result.completed_request_ids
        finish_reason = "stop" if is_complete else request.finish_reason(token_id, self._eos_token_ids)
        event = token_event(
            request, result, now=now, plan=plan, finish_reason=finish_reason, prompt_logprobs=prompt_logprobs
        )
        request.add_output(token_id, now)
        if finish_reason is not None:
            self._end(request)
        return event

    def _prefix_hashes(self, new: NewRequest) -> PrefixHashes | None:
        if not self._has_prefix_cache:
            return None
        block_size = self._blocks.layout.block_size
        return PrefixHashes(new.prompt_token_ids, block_size=block_size, salt=new.cache_salt)

    def _end(self, request: Request) -> None:
        removed = self._queues.remove(request.request_id)
        if removed is not None and removed[1]:  # one that was preempted for the step after this one holds nothing
            self._blocks.free(request.request_id)
        self._note_end(request)

    def _note_end(self, request: Request) -> None:
        if request.new.sampling.structured_output is not None:
            self._ended_request_ids.append(request.request_id)

    def _check_owners(self, requests: Iterable[Request]) -> None:
        by_id = {request.request_id: request for request in requests}
        require(by_id.keys() == self._blocks.owners, "blocks are held by others than the running requests")
        for request_id, request in by_id.items():
            num_covered = self._blocks.num_covered_tokens(request_id)
            require(request.num_computed_tokens <= num_covered, f"{request_id}: computed tokens without a block")
            require(request.num_tokens_left > 0, f"{request_id}: runs with nothing to compute")
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids) + request.is_token_pending
            require(request.num_tokens == num_tokens, f"{request_id}: its tokens are counted wrongly")
