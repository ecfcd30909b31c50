"""Makes the statuses that routers read, and numbers them. Owned by `connections.Connections`.

The rule of the numbers (`wire.SubmitAccepted`): a status whose sequence is higher than the one that answered a submit
includes that request. Submits are counted when they are sent to the engine, and the engine's reports say how many
of them it has taken. So a sequence is

    submits taken * 2**20 + statuses made since that number changed, 2**20 - 1 at most

and submit number n (from 1) is answered with n * 2**20 - 1. A status made before the engine took it, however late it
arrives and however many steps lie between, stays at or below that.
"""

from __future__ import annotations

from stallfree_shared.worker_status import StepTimeCoefficients, WorkerStatus
from stallfree_worker.engine.step import EngineStatus
from stallfree_worker.engine.step_time import StepTimeLine
from stallfree_worker.settings import SchedulerSettings

_STRIDE = 2**20
_NOTHING = EngineStatus(
    requests_running=0,
    requests_waiting=0,
    num_blocks=0,
    num_free_blocks=0,
    token_budget_tokens=0,
    prefill_tokens_left=0,
    expected_output_tokens_left=0,
    step_time=StepTimeLine(base_seconds=0.0, seconds_per_token=1e-3),
    step_time_error_ratio=0.0,
)


class StatusBook:
    """Knows the engine's last status and how many submits it includes."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._engine = _NOTHING
        self._kv_cache_tokens = 0
        self._submits_sent = 0
        self._submits_taken = 0
        self._sent_to_former_engines = 0
        self._num_made = 0

    @property
    def submits_untaken(self) -> int:
        """Submits that are on their way to the engine."""
        return self._submits_sent - self._submits_taken

    def count_submit(self) -> int:
        """Counts one submit to the engine. Returns the `status_sequence` that it is answered with."""
        self._submits_sent += 1
        return self._submits_sent * _STRIDE - 1

    def engine_started(self, *, kv_cache_tokens: int) -> None:
        self._kv_cache_tokens = kv_cache_tokens
        self._sent_to_former_engines = self._submits_sent

    def engine_lost(self) -> None:
        """All that was submitted has ended with the engine, so the empty status includes all of it."""
        self._engine = _NOTHING
        self._kv_cache_tokens = 0
        self._include(self._submits_sent)

    def engine_reported(self, status: EngineStatus, *, submits_taken: int) -> bool:
        """Returns whether it includes new requests. `submits_taken` counts from the engine's start."""
        self._engine = status
        return self._include(self._sent_to_former_engines + submits_taken)

    def make(self, *, is_ready: bool, is_draining: bool) -> WorkerStatus:
        """A status with a sequence that is never below an earlier one's."""
        self._num_made = min(self._num_made + 1, _STRIDE - 1)
        engine = self._engine
        return WorkerStatus(
            sequence=self._submits_taken * _STRIDE + self._num_made,
            is_ready=is_ready,
            is_draining=is_draining,
            max_num_seqs=self._settings.max_num_seqs,
            token_budget_tokens=engine.token_budget_tokens,
            kv_total_tokens=self._kv_cache_tokens,
            kv_free_tokens=self._kv_cache_tokens * engine.num_free_blocks // max(1, engine.num_blocks),
            requests_running=engine.requests_running,
            requests_waiting=engine.requests_waiting,
            prefill_tokens_left=engine.prefill_tokens_left,
            expected_output_tokens_left=engine.expected_output_tokens_left,
            step_time=StepTimeCoefficients(**engine.step_time._asdict()),
        )

    def _include(self, submits_taken: int) -> bool:
        is_more = submits_taken > self._submits_taken
        if is_more:
            self._submits_taken = submits_taken
            self._num_made = 0
        return is_more
