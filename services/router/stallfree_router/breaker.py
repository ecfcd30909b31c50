"""When a worker that fails is left alone, and when it is tried again. PURE: a value and its transitions; time is
passed in. `workers` keeps one `Breaker` per worker and asks it before each dispatch.

    closed ── FAILURES_TO_OPEN failures in a row ──→ open ── its time is over, one trial ──→ half-open
      ↑                                               ↑                                        │
      └────────────── success ────────────────────────┼──────────── success ───────────────────┤
                                                      └──── failure: open for twice as long ───┘

Only what says something about the worker counts: failed connects, 5xx and time-outs are failures. A client's mistake
(4xx) or a client that leaves is none (C38). "I am full" (429) is no failure either: it only keeps requests away until
the time that the worker names. Of several deadlines the latest wins (C39). While it is open only the trial counts:
requests that were sent before it opened fail of the same outage, however many they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FAILURES_TO_OPEN = 3
FIRST_OPEN_SECONDS = 1.0
MAX_OPEN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    failures_in_a_row: int = 0
    open_until: float | None = None
    """None: closed."""
    open_seconds: float = FIRST_OPEN_SECONDS
    """How long it opens the next time."""
    has_trial: bool = False
    """The one request that a half-open breaker lets through is under way."""
    full_until: float = float("-inf")
    """The worker asked for no more requests until then."""

    def allows(self, now: float) -> bool:
        """Whether a request may be sent, fullness aside."""
        return self.open_until is None or (now >= self.open_until and not self.has_trial)

    def is_full(self, now: float) -> bool:
        return now < self.full_until

    def blocked_until(self, now: float) -> float:
        """Earliest instant at which this may change by time alone; `now` where nothing stands in the way."""
        opens_at = now if self.open_until is None else self.open_until
        return max(now, opens_at, self.full_until)

    def after_dispatch(self) -> Breaker:
        """A request is sent: in half-open state it is the trial."""
        return self if self.open_until is None else replace(self, has_trial=True)

    def after_success(self) -> Breaker:
        """The worker has answered as it should: output, or a well-founded refusal."""
        return Breaker(full_until=self.full_until)

    def after_failure(self, now: float) -> Breaker:
        if self.open_until is not None and not self.has_trial:
            return self
        failures = self.failures_in_a_row + 1
        if failures < FAILURES_TO_OPEN and self.open_until is None:
            return replace(self, failures_in_a_row=failures)
        return replace(
            self,
            failures_in_a_row=failures,
            open_until=now + self.open_seconds,
            open_seconds=min(MAX_OPEN_SECONDS, 2 * self.open_seconds),
            has_trial=False,
        )

    def after_abandon(self) -> Breaker:
        """The request ended without telling anything about the worker: its client left."""
        return replace(self, has_trial=False)

    def after_full(self, now: float, retry_after_seconds: float) -> Breaker:
        return replace(
            self, full_until=max(self.full_until, now + retry_after_seconds), has_trial=False, failures_in_a_row=0
        )
