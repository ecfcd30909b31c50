"""The engine: `step()` is schedule → execute → apply.

Turns requests of tokens into events of tokens. Owns the scheduler and the model of step times; knows nothing of
processes, sockets or tensors. The engine's process calls it, one call at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError, OverloadedError
from stallfree_shared.wire import RequestId
from stallfree_worker.engine.batching import RULES
from stallfree_worker.engine.batching.batch import BatchLimits
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.scheduler import Scheduler
from stallfree_worker.engine.step import EngineStatus, NewRequest, Runner, StepReport
from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from stallfree_worker.engine.token_budget import TokenBudget, make_token_budget
from stallfree_worker.settings import SchedulerSettings

_MAX_RETRY_AFTER_SECONDS = 60.0


class Engine:
    def __init__(
        self,
        settings: SchedulerSettings,
        runner: Runner,
        clock: Callable[[], float],
        *,
        budget: TokenBudget | None = None,
    ) -> None:
        """`clock` gives monotonic seconds. `budget` is by default that of the settings."""
        self._settings = settings
        self._runner = runner
        self._clock = clock
        self._step_time = StepTimeModel()
        self._budget = budget or make_token_budget(settings, self._step_time)
        self._scheduler = Scheduler(
            rule=RULES[settings.batching](),
            budget=self._budget,
            blocks=BlockManager(num_blocks=runner.num_blocks, block_size=runner.block_size),
            limits=BatchLimits(max_num_seqs=settings.max_num_seqs, max_model_len=self.max_model_len),
            eos_token_ids=runner.eos_token_ids,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together: by the model, and by what the whole KV cache holds."""
        return min(self._runner.max_model_len, self._runner.num_blocks * self._runner.block_size)

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
        """Computes one step, or nothing where there is no work. What the runner raises is not caught: an engine that
        cannot compute must not go on.

        Raises:
            IntegrityError: there is work, and no token of it can be computed.
        """
        started_at = self._clock()
        plan = self._scheduler.schedule(started_at)
        if plan is None:
            return StepReport(events=(), status=self.status())
        result = self._runner.execute(plan)
        ended_at = self._clock()
        events = self._scheduler.apply(result, ended_at)
        self._step_time.observe(plan.shape, ended_at - started_at)
        return StepReport(
            events=events,
            status=self.status(),
            step_seconds=ended_at - started_at,
            num_decode_tokens=plan.num_decode_tokens,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_preemptions=plan.num_preemptions,
            num_recomputed_tokens=plan.num_recomputed_tokens,
        )

    def status(self) -> EngineStatus:
        scheduler = self._scheduler
        return EngineStatus(
            requests_running=scheduler.num_running,
            requests_waiting=scheduler.num_waiting,
            num_blocks=self._runner.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            token_budget_tokens=self._budget.typical_tokens,
            prefill_tokens_left=scheduler.num_prefill_tokens_left,
            expected_output_tokens_left=scheduler.num_expected_output_tokens_left,
            step_time=self._step_time.summary,
            step_time_error_ratio=self._step_time.error_ratio,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError where something inside the engine contradicts itself."""
        self._scheduler.check_integrity()

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
        step_tokens = self._budget.typical_tokens
        num_steps = math.ceil(self._scheduler.num_waiting_tokens / step_tokens)
        seconds = num_steps * self._step_time.predict(StepShape(num_tokens=step_tokens))
        return min(max(1.0, seconds), _MAX_RETRY_AFTER_SECONDS)
