"""Decides what each step computes, and what its results mean.

Owns every request inside the engine, the queues and the block manager. It reads no clock, computes nothing and starts
nothing. `Engine`, the simulator and the property tests call it: `schedule`, then `apply` with the result of that very
plan, then `schedule` again. `submit` and `cancel` may come at any time between.
"""

from __future__ import annotations

from collections.abc import Iterable

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.batching.batch import Batch, BatchLimits
from stallfree_worker.engine.batching.rule import BatchingRule
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import IntegrityError, require
from stallfree_worker.engine.queues import RequestQueues
from stallfree_worker.engine.request import Request
from stallfree_worker.engine.step import EngineEvent, NewRequest, StepPlan, StepResult
from stallfree_worker.engine.token_budget import TokenBudget
from stallfree_worker.engine.token_events import failure_event, token_event


class Scheduler:
    def __init__(
        self,
        *,
        rule: BatchingRule,
        budget: TokenBudget,
        blocks: BlockManager,
        limits: BatchLimits,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._rule = rule
        self._budget = budget
        self._blocks = blocks
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._queues = RequestQueues()
        self._plan: StepPlan | None = None
        self._requests_of_plan: list[Request] = []
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
        return self._queues.num_waiting_tokens

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    @property
    def num_prefill_tokens_left(self) -> int:
        """Tokens to compute before every request is decoding, those lost to preemptions included."""
        running = sum(request.num_tokens_left for request in self._queues.running if not request.is_decoding)
        return running + self._queues.num_waiting_tokens

    @property
    def num_expected_output_tokens_left(self) -> int:
        running = sum(request.expected_output_tokens_left for request in self._queues.running)
        return running + self._queues.num_waiting_expected_output_tokens

    def submit(self, new: NewRequest, now: float) -> None:
        """Puts a request behind all others. It must fit the KV cache when it runs alone; the engine sees to that."""
        require(new.request_id not in self._queues, f"{new.request_id} is here already")
        self._queues.enqueue(Request(new=new, arrival_number=self._num_submitted, submitted_at=now))
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
        if was_running and not self._is_in_flight(request):
            self._blocks.free(request_id)
        return True

    def schedule(self, now: float) -> StepPlan | None:
        """The step that begins at `now`; None if there is nothing to compute. Costs nothing for requests that wait."""
        require(self._plan is None, "the step before has not been applied")
        deadlines = [request.next_token_due_at for request in self._queues.running if request.is_decoding]
        budget = self._budget.for_step(token_deadlines=deadlines, now=now)
        batch = Batch(queues=self._queues, blocks=self._blocks, budget=budget, limits=self._limits)
        self._rule.compose(batch)
        self._plan = batch.plan(self._num_steps)
        require(self._plan is not None or self._is_idle, "the rule left every request out")
        self._requests_of_plan = batch.requests
        if self._plan is not None:
            self._num_steps += 1
        return self._plan

    def apply(self, result: StepResult, now: float) -> tuple[EngineEvent, ...]:
        """Takes in what the planned step gave. `now` is the instant of its end. Events are in the order of the plan.

        Raises:
            IntegrityError: the result is not that of the plan, or lacks a token.
        """
        plan = self._plan
        if plan is None or plan.step_id != result.step_id:
            raise IntegrityError(f"step {result.step_id} is not the one in flight")
        self._plan = None
        events = []
        for request, chunk in zip(self._requests_of_plan, plan.chunks, strict=True):
            if request.is_cancelled:
                self._blocks.free(request.request_id)
                continue
            request.advance(len(chunk.token_ids))
            if chunk.output_index is not None:
                events.append(self._take_output(request, result, now=now, plan=plan))
        self._requests_of_plan = []
        return tuple(events)

    def check_integrity(self) -> None:
        """Raises IntegrityError where a queue, a block or a request contradicts another."""
        self._queues.check_integrity()
        self._blocks.check_integrity()
        leaving = [request for request in self._requests_of_plan if request.is_cancelled]
        self._check_owners([*self._queues.running, *leaving])
        require(self._queues.num_running <= self._limits.max_num_seqs, "more requests run than may")
        require(self._plan is not None or not self._requests_of_plan, "requests of a step that is over")

    @property
    def _is_idle(self) -> bool:
        return self._queues.num_running == 0 and self._queues.num_waiting == 0

    def _is_in_flight(self, request: Request) -> bool:
        return any(request is other for other in self._requests_of_plan)

    def _take_output(self, request: Request, result: StepResult, *, now: float, plan: StepPlan) -> EngineEvent:
        failure = result.failure_by_request.get(request.request_id)
        if failure is not None:
            self._end(request)
            return failure_event(request, failure)
        token_id = result.token_id_by_request.get(request.request_id)
        if token_id is None:
            raise IntegrityError(f"step {plan.step_id} gave no token for {request.request_id}")
        finish_reason = request.finish_reason(token_id, self._eos_token_ids)
        event = token_event(request, token_id, now=now, plan=plan, finish_reason=finish_reason)
        request.add_output(token_id, now)
        if finish_reason is not None:
            self._end(request)
        return event

    def _end(self, request: Request) -> None:
        self._queues.remove(request.request_id)
        self._blocks.free(request.request_id)

    def _check_owners(self, requests: Iterable[Request]) -> None:
        by_id = {request.request_id: request for request in requests}
        require(by_id.keys() == self._blocks.owners, "blocks are held by others than the running requests")
        for request_id, request in by_id.items():
            num_slots = len(self._blocks.block_table(request_id)) * self._blocks.block_size
            require(request.num_computed_tokens <= num_slots, f"{request_id}: computed tokens without a block")
            require(request.num_tokens_left > 0, f"{request_id}: runs with nothing to compute")
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
            require(request.num_tokens == num_tokens, f"{request_id}: its tokens are counted wrongly")
