"""Where one request's time went, by the reference's definitions (Sarathi-Serve's metrics), from the records of steps.

Kept beside each request by `connections.Connections`, in the HTTP front: the engine does nothing for it. The engine's
instants and the front's are of the same monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    received_at: float
    scheduling_delay_seconds: float | None = None
    """From its arrival to the start of the first step that it was in; None before that. What came after a preemption is
    `preemption_seconds`, not this."""
    execution_seconds: float = 0.0
    """The sum of the steps that it was in."""
    preemption_seconds: float = 0.0
    """From losing its blocks to the end of the step that had computed all of it again, summed over preemptions."""
    num_restarts: int = 0
    _num_computed: int = field(default=0, init=False)
    """The most tokens of it that ever were computed."""
    _lost_at: float | None = field(default=None, init=False)

    def note_chunk(self, *, started_at: float, ended_at: float, num_computed: int) -> None:
        """It was in a step, after which `num_computed` of its tokens are in the cache."""
        if self.scheduling_delay_seconds is None:
            self.scheduling_delay_seconds = max(0.0, started_at - self.received_at)
        self.execution_seconds += ended_at - started_at
        if num_computed >= self._num_computed:
            self._num_computed = num_computed
            self._end_loss(ended_at)

    def note_preemption(self, at: float) -> None:
        """It lost its blocks, perhaps while it still made up for a loss before."""
        self.num_restarts += 1
        if self._lost_at is None:
            self._lost_at = at

    def note_end(self, at: float) -> None:
        """It ended in any way, perhaps while it waited for its blocks."""
        self._end_loss(at)

    def _end_loss(self, at: float) -> None:
        if self._lost_at is not None:
            self.preemption_seconds += max(0.0, at - self._lost_at)
            self._lost_at = None
