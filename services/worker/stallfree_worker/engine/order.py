"""In which order requests get what is scarce: prefill tokens, room to run, and, when memory is short, their own blocks.

Two orders behind one protocol, chosen by the batching rule. Pure: the instant is passed in. Called by the queues, the
batch and the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from stallfree_worker.engine.request import Line, Request
from stallfree_worker.settings import SchedulerSettings

RankKey = tuple[float, ...]

OLDEST_SHARE = 4
"""One part in so many of each step's prefill tokens is the oldest begun prefill's, so that it always moves."""
_SHORTEST_TARGET_EXPONENT = -3
_LONGEST_TARGET_EXPONENT = 7


class Ranking(Protocol):
    """An order at one instant."""

    def key(self, request: Request) -> RankKey:
        """Of a request with a prefill to compute: least comes first."""
        ...

    def is_overdue(self, request: Request) -> bool:
        """Whether nobody may be admitted past the waiting request any more."""
        ...

    def may_displace(self, request: Request, running: Request) -> bool:
        """Whether `running` gives way if the waiting request can be admitted by that."""
        ...


class Order(Protocol):
    def line_of(self, request: Request) -> Line:
        """Where a request that begins to wait belongs."""
        ...

    def at(self, now: float, *, best_priority: int) -> Ranking:
        """`best_priority` is the least of all requests that are here."""
        ...

    def keeping(self, running: Iterable[Request]) -> list[Request]:
        """Running requests; when memory is short, the last is evicted first and the first never for another."""
        ...


class ArrivalOrder:
    """First come, first served, and the latest arrival is evicted: what the baseline systems do."""

    def line_of(self, request: Request) -> Line:
        del request
        return 0, 0, 0

    def at(self, now: float, *, best_priority: int) -> Ranking:
        del now, best_priority
        return self

    def key(self, request: Request) -> RankKey:
        return (request.arrival_number,)

    def is_overdue(self, request: Request) -> bool:
        del request
        return True

    def may_displace(self, request: Request, running: Request) -> bool:
        del request, running
        return False

    def keeping(self, running: Iterable[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.arrival_number)


class UrgencyOrder:
    """Short prompts first while longer ones can still meet their targets, and a bound on every wait.

    Requests of one priority, of like size (within a power of two of tokens to compute) and of like TTFT target stand in
    one line, in order of arrival, and the one that has begun is always its line's first. Only the first of each line
    compete, so a choice costs the number of lines, whatever waits behind; and of many prompts of one size that come at
    once only one is half computed at a time. Among the first of the lines, in this order:

    1. The better effective priority. Every `priority_step_seconds` since its submission lift a request by one, up to
       the best that is here and never beyond, so that age alone decides nothing among equals.
    2. Overdue: no chunk for `max_prefill_wait_seconds`, since its submission or its last chunk; or a stream that was
       preempted, once its next token is late by its TBT target. First those that have begun, then by length of the
       wait: under overload this is first come, first served.
    3. Urgent: less time is left to its deadline than it needs, by the least slack in relation to what it needs. A
       prompt that is too long for its target has as much time as its share of the steps alone would take, or it would
       be urgent for ever.
    4. The least left to compute.

    The slack in relation to the length is that of Medha's LARS (arXiv 2409.17264); the third rank without the fourth
    would keep a short prompt behind a long one until its own time is nearly over.
    """

    def __init__(self, settings: SchedulerSettings, seconds_per_token: Callable[[], float]) -> None:
        """`seconds_per_token` tells how long a prefill takes now, for each token."""
        self._settings = settings
        self._seconds_per_token = seconds_per_token

    def line_of(self, request: Request) -> Line:
        exponent = math.frexp(request.new.ttft_target_seconds)[1]
        target = min(max(exponent, _SHORTEST_TARGET_EXPONENT), _LONGEST_TARGET_EXPONENT)
        return request.new.priority, request.num_uncached_tokens.bit_length(), target

    def at(self, now: float, *, best_priority: int) -> Ranking:
        settings = self._settings
        return _UrgencyRanking(
            now=now,
            best_priority=best_priority,
            seconds_per_token=self._seconds_per_token(),
            max_wait_seconds=settings.max_prefill_wait_seconds,
            priority_step_seconds=settings.priority_step_seconds,
            step_seconds=settings.max_step_seconds,
        )

    def keeping(self, running: Iterable[Request]) -> list[Request]:
        """Worst priority is evicted first, then who loses least. The oldest of the best priority never is, so that it
        ends, and then the next: everybody does."""
        kept = sorted(running, key=_worth)
        oldest = min(kept, key=_seniority, default=None)
        if oldest is not None:
            kept.remove(oldest)
            kept.insert(0, oldest)
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _UrgencyRanking:
    now: float
    best_priority: int
    seconds_per_token: float
    max_wait_seconds: float
    priority_step_seconds: float
    step_seconds: float

    def key(self, request: Request) -> RankKey:
        priority = self._effective_priority(request)
        if self.is_overdue(request):
            return priority, 0, request.num_computed_tokens == 0, request.waits_since
        num_tokens = request.num_tokens_left if request.num_computed_tokens else request.num_uncached_tokens
        seconds = max(num_tokens * self.seconds_per_token, 1e-9)
        slack = self._deadline(request) - self.now - seconds
        if slack < seconds + self.step_seconds:
            return priority, 1, slack / seconds, request.arrival_number
        return priority, 2, num_tokens, request.arrival_number

    def is_overdue(self, request: Request) -> bool:
        due_at = request.next_token_due_at
        is_stalled_stream = due_at is not None and self.now > due_at
        return is_stalled_stream or self.now - request.waits_since > self.max_wait_seconds

    def may_displace(self, request: Request, running: Request) -> bool:
        """By raw priority, so that ageing alone displaces nobody; and not one that has aged past the other, or the two
        would take turns in displacing each other."""
        is_worse = running.new.priority > request.new.priority
        return is_worse and self._effective_priority(running) > self._effective_priority(request)

    def _effective_priority(self, request: Request) -> int:
        num_steps = math.floor((self.now - request.submitted_at) / self.priority_step_seconds)
        return max(request.new.priority - num_steps, self.best_priority)

    def _deadline(self, request: Request) -> float:
        """Of the first token."""
        own_seconds = request.num_tokens * self.seconds_per_token
        return request.submitted_at + max(request.new.ttft_target_seconds, OLDEST_SHARE * own_seconds)


def work_lost(request: Request) -> int:
    """Tokens that must be computed again if the request gives its blocks back."""
    return max(0, request.num_computed_tokens - request.num_spared_tokens)


def _worth(request: Request) -> tuple[int, int, int]:
    return request.new.priority, -work_lost(request), request.arrival_number


def _seniority(request: Request) -> tuple[int, int]:
    return request.new.priority, request.arrival_number
