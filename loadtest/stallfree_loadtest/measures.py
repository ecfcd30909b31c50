"""What the stamps mean. Pure: no clock, no I/O. Used by reports, the demo, and later the capacity search.

Rules, so that figures can be compared:
- TTFT: from the instant at which the client began to connect to the first event that holds a token.
- TBT: the gap between two consecutive tokens. An event of k tokens is one gap and k - 1 zeros; every output token but
  the first gives exactly one gap.
- TPOT: (end of the stream - first token) / (output tokens - 1).
- stall: the part of a gap beyond the TBT target; the stalled share is stall seconds over the sum of the gaps.
- A quantile is exact, over all samples, by linear interpolation between the two closest ranks (the "inclusive" rule,
  the default of numpy and of the common load testers).
- goodput: requests a second that ended well, had their first token within the TTFT target (where there is one), and
  99 % of their gaps within the TBT target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stallfree_shared.metrics import stall_seconds

Outcome = Literal["finished", "error", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStamp:
    """One event: when its bytes were read, and how many output tokens it holds."""

    at: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """All that the client saw of one request. Instants are of one monotonic clock."""

    request_id: str
    role: str = "request"
    due_at: float
    """When the arrival process wanted it."""
    sent_at: float
    """When the client began to connect for it."""
    ended_at: float
    stamps: tuple[TokenStamp, ...] = ()
    outcome: Outcome = "finished"
    """"dropped": the client itself ended it early."""
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """As the server's usage says."""
    completion_tokens: int | None = None
    """As the server's usage says."""
    text: str = ""

    @property
    def num_tokens(self) -> int:
        """Output tokens that the client counted."""
        return sum(stamp.num_tokens for stamp in self.stamps)

    @property
    def is_count_confirmed(self) -> bool:
        """False when the server says another number of output tokens than the client counted."""
        return self.completion_tokens in (None, self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time between two consecutive tokens of one request."""

    began_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """A sample's size and exact quantiles; seconds, or NaN where there is no sample."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSummary:
    """TBT and stalls over a set of gaps."""

    tbt_seconds: Quantiles
    stall_seconds: float
    num_stalls: int
    stalled_ratio: float
    """Stall seconds over the sum of all gaps; 0 without gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over several runs."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a good request keeps, in seconds."""

    tbt_seconds: float
    ttft_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """One load in figures."""

    num_requests: int
    num_finished: int
    num_failed: int
    num_miscounted: int
    """Requests whose usage disagrees with the tokens that were counted."""
    seconds: float
    """From the first request's start to the last one's end."""
    ttft_seconds: Quantiles
    tpot_seconds: Quantiles
    gaps: GapSummary
    send_delay_seconds: Quantiles
    """How late the client sent: large figures mean that the client, not the server, was too slow."""
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    requests_per_second: float
    """Of those that finished."""
    goodput_per_second: float


def time_to_first_token(trace: RequestTrace) -> float | None:
    return trace.stamps[0].at - trace.sent_at if trace.stamps else None


def time_per_output_token(trace: RequestTrace) -> float | None:
    """None with fewer than two tokens."""
    if trace.num_tokens < 2:
        return None
    return (trace.ended_at - trace.stamps[0].at) / (trace.num_tokens - 1)


def gaps(trace: RequestTrace) -> list[Gap]:
    """One gap for every output token but the first."""
    found: list[Gap] = []
    last_at: float | None = None
    for stamp in trace.stamps:
        if last_at is not None:
            found.append(Gap(began_at=last_at, ended_at=stamp.at))
        found.extend(Gap(began_at=stamp.at, ended_at=stamp.at) for _ in range(stamp.num_tokens - 1))
        last_at = stamp.at
    return found


def quantile(values: Sequence[float], ratio: float) -> float:
    """Of values in ascending order; NaN of none."""
    if not values:
        return math.nan
    place = (len(values) - 1) * ratio
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def quantiles(values: Iterable[float]) -> Quantiles:
    ordered = sorted(values)
    p50, p90, p99 = (quantile(ordered, ratio) for ratio in (0.5, 0.9, 0.99))
    return Quantiles(count=len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1] if ordered else math.nan)


def spread(values: Iterable[float]) -> Spread:
    """Median, least and most; NaN of none."""
    ordered = sorted(values)
    low, high = (ordered[0], ordered[-1]) if ordered else (math.nan, math.nan)
    return Spread(median=statistics.median(ordered) if ordered else math.nan, low=low, high=high)


def summarize_gaps(found: Iterable[Gap], *, tbt_target_seconds: float) -> GapSummary:
    seconds = [gap.seconds for gap in found]
    stalls = [stall for gap in seconds if (stall := stall_seconds(gap, tbt_target_seconds)) > 0]
    total = math.fsum(seconds)
    stalled = math.fsum(stalls)
    return GapSummary(
        tbt_seconds=quantiles(seconds),
        stall_seconds=stalled,
        num_stalls=len(stalls),
        stalled_ratio=stalled / total if total else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Gaps around an event that lasts from one instant to another. A gap that touches the event is `during`."""

    before: tuple[Gap, ...]
    during: tuple[Gap, ...]
    after: tuple[Gap, ...]


def split_around(found: Iterable[Gap], *, began_at: float, ended_at: float) -> Windows:
    """Before: ended by the event's begin. After: began at its end or later. During: all others."""
    before: list[Gap] = []
    during: list[Gap] = []
    after: list[Gap] = []
    for gap in found:
        if gap.ended_at <= began_at:
            before.append(gap)
        elif gap.began_at >= ended_at:
            after.append(gap)
        else:
            during.append(gap)
    return Windows(before=tuple(before), during=tuple(during), after=tuple(after))


def is_good(trace: RequestTrace, targets: Targets) -> bool:
    """The rule of goodput; see the module."""
    ttft = time_to_first_token(trace)
    if trace.outcome != "finished" or ttft is None:
        return False
    if targets.ttft_seconds is not None and ttft > targets.ttft_seconds:
        return False
    seconds = sorted(gap.seconds for gap in gaps(trace))
    return not seconds or quantile(seconds, 0.99) <= targets.tbt_seconds


def summarize(traces: Sequence[RequestTrace], targets: Targets) -> LoadSummary:
    """The figures of one load; rates are over its whole length."""
    finished = [trace for trace in traces if trace.outcome == "finished"]
    began_at = min((trace.sent_at for trace in traces), default=0.0)
    seconds = max((trace.ended_at for trace in traces), default=0.0) - began_at

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else math.nan

    return LoadSummary(
        num_requests=len(traces),
        num_finished=len(finished),
        num_failed=sum(trace.outcome == "error" for trace in traces),
        num_miscounted=sum(not trace.is_count_confirmed for trace in finished),
        seconds=seconds,
        ttft_seconds=quantiles(ttft for trace in traces if (ttft := time_to_first_token(trace)) is not None),
        tpot_seconds=quantiles(tpot for trace in finished if (tpot := time_per_output_token(trace)) is not None),
        gaps=summarize_gaps((gap for trace in traces for gap in gaps(trace)), tbt_target_seconds=targets.tbt_seconds),
        send_delay_seconds=quantiles(trace.sent_at - trace.due_at for trace in traces),
        prompt_tokens_per_second=per_second(sum(trace.prompt_tokens or 0 for trace in finished)),
        output_tokens_per_second=per_second(sum(trace.num_tokens for trace in traces)),
        requests_per_second=per_second(len(finished)),
        goodput_per_second=per_second(sum(is_good(trace, targets) for trace in traces)),
    )
