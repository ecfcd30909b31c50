"""The engine: a step is schedule → execute → apply; with overlap the next one is composed while a step executes.

Turns requests of tokens into events of tokens. Owns the scheduler and the model of step times; knows nothing of
processes, sockets or tensors. The engine's process calls it, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError, OverloadedError
from stallfree_shared.wire import RequestId
from stallfree_worker.engine.batching import RULES
from stallfree_worker.engine.batching.batch import BatchLimits
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.execution import Execution, InlineExecution
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.order import ArrivalOrder, UrgencyOrder
from stallfree_worker.engine.scheduler import Scheduler
from stallfree_worker.engine.step import EngineStatus, NewRequest, Runner, StepPlan, StepRecord, StepReport, StepResult
from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from stallfree_worker.engine.token_budget import BUDGET_QUANTILE, TokenBudget, make_token_budget
from stallfree_worker.settings import SchedulerSettings

_MAX_RETRY_AFTER_SECONDS = 60.0


class _BegunStep(NamedTuple):
    plan: StepPlan
    prediction: tuple[float, float]
    started_at: float
    scheduled_at: float
    result: Callable[[], StepResult]
    """Waits for it."""


class Engine:
    def __init__(
        self,
        settings: SchedulerSettings,
        runner: Runner,
        clock: Callable[[], float],
        *,
        budget: TokenBudget | None = None,
        has_prefix_cache: bool = True,
        execution: Execution | None = None,
    ) -> None:
        """`clock` gives monotonic seconds. `budget` is by default that of the settings, `execution` by default one
        without overlap."""
        self._settings = settings
        self._runner = runner
        self._execution = execution or InlineExecution(runner)
        self._begun: _BegunStep | None = None
        self._clock = clock
        rule = RULES[settings.batching]()
        self._layout = _kv_layout(
            runner, largest_chunk_tokens=None if rule.takes_whole_prompts else settings.max_step_tokens
        )
        self._step_time = StepTimeModel(StepShape(windows=self._layout.window_shares))
        self._last_ended_at: float | None = None
        """The end of the step before, where it left work behind."""
        self._budget = budget or make_token_budget(settings, self._step_time)
        self._max_model_len = self._layout.most_tokens(runner.num_blocks, limit=runner.max_model_len)
        self._scheduler = Scheduler(
            rule=rule,
            order=ArrivalOrder() if rule.is_by_arrival else UrgencyOrder(settings, self._prefill_seconds_per_token),
            budget=self._budget,
            blocks=BlockManager(num_blocks=runner.num_blocks, layout=self._layout),
            limits=BatchLimits(max_num_seqs=settings.max_num_seqs, max_model_len=self.max_model_len),
            eos_token_ids=runner.eos_token_ids,
            has_prefix_cache=has_prefix_cache,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together: by the model, and by what the whole KV cache holds."""
        return self._max_model_len

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds in requests of the longest kind."""
        return self._layout.tokens_held(self._runner.num_blocks, num_tokens=self.max_model_len)

    @property
    def overlaps(self) -> bool:
        """Whether a step that was begun is computed while the caller does something else."""
        return self._execution.overlaps

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self._scheduler.num_running + self._scheduler.num_waiting > 0

    def submit(self, new: NewRequest) -> None:
        """Takes a request; its TTFT counts from now.

        Raises:
            InvalidRequestError: the prompt is empty, or a request of this id is not yet ended.
            ContextLengthExceededError: prompt and output together cannot fit `max_model_len`.
            OverloadedError: too many requests or tokens wait.
        """
        self._refuse_invalid(new)
        self._refuse_too_long(new)
        self._refuse_overload(new)
        self._scheduler.submit(new, self._clock())

    def cancel(self, request_id: RequestId) -> bool:
        """Ends a request without an event, in any state; False if it is not here (any more)."""
        return self._scheduler.cancel(request_id)

    def step(self) -> StepReport:
        """Computes one step, or nothing where there is no work: `begin_step`, then `end_step`."""
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """Plans a step and begins it, if there is work. With overlap it is being computed when this returns.

        Raises:
            IntegrityError: there is work, and no token of it can be computed.
        """
        require(self._begun is None, "the step before has not ended")
        started_at = self._clock()
        plan = self._scheduler.schedule(started_at)
        if plan is None:
            self._last_ended_at = None
            return
        prediction = self._predict(plan)
        self._begun = _BegunStep(plan, prediction, started_at, self._clock(), self._execution.begin(plan))

    def end_step(self) -> StepReport:
        """Waits for the step that was begun, and tells what it gave. With overlap the next one is composed meanwhile.
        What the runner raises is not caught: an engine that cannot compute must not go on."""
        begun, self._begun = self._begun, None
        if begun is None:
            return StepReport(events=(), status=self.status())
        if self._execution.overlaps:
            self._scheduler.prepare(begun.started_at + begun.prediction[0])
        result = begun.result()
        executed_at = self._clock()
        events = self._scheduler.apply(result, executed_at)
        record = self._record(begun, executed_at=executed_at, applied_at=self._clock())
        self._step_time.observe(begun.plan.shape, record.seconds)
        self._last_ended_at = record.ended_at if self.has_work else None
        return StepReport(events=events, status=self.status(), record=record)

    def status(self) -> EngineStatus:
        scheduler = self._scheduler
        load = scheduler.load(self._clock())
        return EngineStatus(
            requests_running=scheduler.num_running,
            requests_waiting=scheduler.num_waiting,
            num_blocks=self._runner.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            token_budget_tokens=self._budget.typical_tokens,
            prefill_tokens_left=load.num_prefill_tokens_left,
            expected_output_tokens_left=load.num_expected_output_tokens_left,
            step_time=self._step_time.summary,
            step_time_error_ratio=self._step_time.error_ratio,
            longest_decode_wait_seconds=load.longest_decode_wait_seconds,
            longest_prefill_wait_seconds=load.longest_prefill_wait_seconds,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError where something inside the engine contradicts itself."""
        self._scheduler.check_integrity()

    def _predict(self, plan: StepPlan) -> tuple[float, float]:
        """Seconds that the step will take: the expectation, and what it stays below most often."""
        seconds = self._step_time.predict(plan.shape)
        return seconds, seconds * self._step_time.quantile_ratio(plan.shape, BUDGET_QUANTILE)

    def _record(self, begun: _BegunStep, *, executed_at: float, applied_at: float) -> StepRecord:
        plan = begun.plan
        return StepRecord(
            step_id=plan.step_id,
            started_at=begun.started_at,
            schedule_seconds=begun.scheduled_at - begun.started_at,
            execute_seconds=executed_at - begun.scheduled_at,
            apply_seconds=applied_at - executed_at,
            idle_seconds=None if self._last_ended_at is None else begun.started_at - self._last_ended_at,
            predicted_seconds=begun.prediction[0],
            predicted_quantile_seconds=begun.prediction[1],
            budget_seconds=plan.budget_seconds,
            budget_tokens=plan.budget_tokens,
            request_ids=tuple([chunk.request_id for chunk in plan.chunks]),
            chunk_tokens=tuple([len(chunk.token_ids) for chunk in plan.chunks]),
            context_tokens=tuple([chunk.num_computed_tokens for chunk in plan.chunks]),
            num_decodes=plan.num_decode_tokens,
            num_recomputed_tokens=plan.num_recomputed_tokens,
            num_prefix_query_tokens=plan.num_prefix_query_tokens,
            num_prefix_hit_tokens=plan.num_prefix_hit_tokens,
            preempted_request_ids=plan.preempted_request_ids,
            requests_running=self._scheduler.num_running,
            requests_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._scheduler.num_free_blocks,
        )

    def _refuse_invalid(self, new: NewRequest) -> None:
        if not new.prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt_token_ids")
        if new.request_id in self._scheduler:
            raise InvalidRequestError(f"a request with id {new.request_id} is running", param="request_id")

    def _refuse_too_long(self, new: NewRequest) -> None:
        num_prompt, max_tokens = len(new.prompt_token_ids), new.sampling.max_tokens
        if num_prompt + max_tokens <= self.max_model_len:
            return
        is_prompt_too_long = num_prompt + 1 > self.max_model_len
        raise ContextLengthExceededError(
            f"the maximum context length is {self.max_model_len} tokens, but the request has {num_prompt} prompt "
            f"tokens and asks for up to {max_tokens} output tokens, {num_prompt + max_tokens} in all",
            param="prompt_token_ids" if is_prompt_too_long else "max_tokens",
        )

    def _refuse_overload(self, new: NewRequest) -> None:
        num_waiting, num_tokens = self._scheduler.num_waiting, self._scheduler.num_waiting_tokens
        if num_waiting == 0:
            return  # one that fits the model is never too much for an empty queue
        limits = self._settings
        if num_waiting >= limits.max_waiting_requests:
            self._refuse(f"{num_waiting} requests wait, the limit is {limits.max_waiting_requests}")
        if num_tokens + len(new.prompt_token_ids) > limits.max_waiting_tokens:
            self._refuse(
                f"{num_tokens} tokens wait, the request has {len(new.prompt_token_ids)}, "
                f"the limit is {limits.max_waiting_tokens}"
            )

    def _refuse(self, message: str) -> NoReturn:
        raise OverloadedError(message, retry_after_seconds=self._seconds_to_prefill_waiting())

    def _seconds_to_prefill_waiting(self) -> float:
        seconds = self._scheduler.num_waiting_tokens * self._prefill_seconds_per_token()
        return min(max(1.0, seconds), _MAX_RETRY_AFTER_SECONDS)

    def _prefill_seconds_per_token(self) -> float:
        """In a step of the size that is usual now where prefills are waiting."""
        step_tokens = max(1, self._budget.typical_tokens)
        return self._step_time.predict(StepShape(num_tokens=step_tokens)) / step_tokens


def _kv_layout(runner: Runner, *, largest_chunk_tokens: int | None) -> KVLayout:
    """Without a largest chunk, prompts are computed whole."""
    groups, block_size, longest = runner.kv_groups, runner.block_size, runner.max_model_len
    if largest_chunk_tokens is None:
        return KVLayout(groups, block_size=block_size, largest_chunk_tokens=longest)
    return KVLayout.fitting(
        groups,
        block_size=block_size,
        largest_chunk_tokens=largest_chunk_tokens,
        num_blocks=runner.num_blocks,
        num_tokens=longest,
    )
