"""Notices work that is there and does not move, whatever the reason: a lost wake-up, blocks that were never given back.

An engine that is silent is `engine_process`'s business. This watches one that speaks and computes nothing. Owned by
`connections.Connections`, which tells it of steps and asks it on every tick; it decides nothing else.
"""

from __future__ import annotations


class ProgressWatch:
    def __init__(self, *, warning_seconds: float) -> None:
        self._warning_seconds = warning_seconds
        self._waiting_since: float | None = None
        self._has_warned = False
        self.stuck_seconds = 0.0
        """How long there has been work and no step, as of the last `check`."""

    def note_step(self, now: float) -> None:
        """Something was computed."""
        self._has_warned = False
        if self._waiting_since is not None:
            self._waiting_since = now

    def check(self, now: float, *, has_work: bool) -> bool:
        """Takes a look. True once for each time that the work is stuck beyond the warning."""
        if not has_work:
            self._waiting_since = None
            self._has_warned = False
        elif self._waiting_since is None:
            self._waiting_since = now
        self.stuck_seconds = 0.0 if self._waiting_since is None else now - self._waiting_since
        is_news = self.stuck_seconds >= self._warning_seconds and not self._has_warned
        self._has_warned = self._has_warned or is_news
        return is_news
