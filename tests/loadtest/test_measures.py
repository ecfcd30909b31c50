"""Measures against tables worked out by hand, and against an obvious slow way."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_loadtest.measures import (
    Gap,
    Outcome,
    RequestTrace,
    Spread,
    Targets,
    TokenStamp,
    gaps,
    is_good,
    quantile,
    quantiles,
    split_around,
    spread,
    summarize,
    summarize_gaps,
    time_per_output_token,
    time_to_first_token,
)


def build_trace(
    *stamps: tuple[float, int], sent_at: float = 0.0, ended_at: float | None = None, outcome: Outcome = "finished"
) -> RequestTrace:
    last = stamps[-1][0] if stamps else sent_at
    return RequestTrace(
        request_id="r",
        due_at=sent_at,
        sent_at=sent_at,
        ended_at=last if ended_at is None else ended_at,
        stamps=tuple(TokenStamp(at=at, num_tokens=num_tokens) for at, num_tokens in stamps),
        outcome=outcome,
    )


def seconds(found: list[Gap]) -> list[float]:
    return [gap.seconds for gap in found]


def test_ttft_runs_from_sending_to_the_first_token() -> None:
    assert time_to_first_token(build_trace((3.5, 1), (9.0, 1), sent_at=1.25)) == 2.25
    assert time_to_first_token(build_trace()) is None


def test_every_token_but_the_first_gives_one_gap() -> None:
    assert seconds(gaps(build_trace((1.0, 1), (1.5, 1), (3.5, 1)))) == [0.5, 2.0]
    assert gaps(build_trace((1.0, 1))) == []
    assert gaps(build_trace()) == []


def test_an_event_of_k_tokens_is_one_gap_and_k_minus_1_zeros() -> None:
    assert seconds(gaps(build_trace((1.0, 2), (1.5, 3), (2.0, 1)))) == [0.0, 0.5, 0.0, 0.0, 0.5]


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert time_per_output_token(build_trace((1.0, 1), (2.0, 1), (3.0, 2), ended_at=4.0)) == 1.0
    assert time_per_output_token(build_trace((1.0, 1))) is None


def test_stall_is_what_lies_beyond_the_target() -> None:
    found = gaps(build_trace((0.0, 1), (0.25, 1), (1.0, 1), (1.5, 1), (3.5, 1)))  # gaps .25 .75 .5 2.0
    summary = summarize_gaps(found, tbt_target_seconds=0.5)
    assert summary.stall_seconds == 0.25 + 1.5
    assert summary.num_stalls == 2
    assert summary.stalled_ratio == 1.75 / 3.5
    assert summary.tbt_seconds.count == 4
    assert summary.tbt_seconds.max == 2.0


def test_no_gap_is_no_stall() -> None:
    summary = summarize_gaps([], tbt_target_seconds=0.5)
    assert (summary.stall_seconds, summary.num_stalls, summary.stalled_ratio) == (0.0, 0, 0.0)
    assert math.isnan(summary.tbt_seconds.p50)


def test_quantiles_by_hand() -> None:
    found = quantiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.count, found.p50, found.max) == (5, 3.0, 5.0)
    assert found.p90 == pytest.approx(4.6)
    assert found.p99 == pytest.approx(4.96)


def test_quantile_of_one_value_is_that_value() -> None:
    assert quantile([7.0], 0.99) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_quantiles_equal_those_of_the_standard_library(values: list[float]) -> None:
    found = quantiles(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for ours, theirs in ((found.p50, cuts[49]), (found.p90, cuts[89]), (found.p99, cuts[98])):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


events = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4)), max_size=30)


@given(events, st.floats(0.001, 5))
def test_gaps_equal_those_of_a_list_of_single_tokens(steps: list[tuple[float, int]], target: float) -> None:
    at, stamps, every_token = 0.0, [], []
    for step, num_tokens in steps:
        at += step
        stamps.append((at, num_tokens))
        every_token += [at] * num_tokens
    slow = [later - earlier for earlier, later in itertools.pairwise(every_token)]
    found = gaps(build_trace(*stamps))
    assert seconds(found) == slow
    summary = summarize_gaps(found, tbt_target_seconds=target)
    assert summary.stall_seconds == pytest.approx(sum(max(0.0, gap - target) for gap in slow))
    assert summary.num_stalls == sum(gap > target for gap in slow)


def test_a_gap_that_touches_the_event_is_during() -> None:
    found = gaps(build_trace((0.0, 1), (1.0, 1), (2.5, 1), (3.0, 1), (5.0, 1), (6.0, 1)))
    windows = split_around(found, began_at=2.0, ended_at=4.0)
    assert [gap.ended_at for gap in windows.before] == [1.0]
    assert [gap.ended_at for gap in windows.during] == [2.5, 3.0, 5.0]
    assert [gap.ended_at for gap in windows.after] == [6.0]


def test_a_gap_on_the_events_edge_is_outside() -> None:
    found = gaps(build_trace((0.0, 1), (2.0, 1), (4.0, 1), (5.0, 1)))
    windows = split_around(found, began_at=2.0, ended_at=4.0)
    assert tuple(len(part) for part in (windows.before, windows.during, windows.after)) == (1, 1, 1)


@given(events, st.floats(0, 50), st.floats(0, 50))
def test_windows_lose_no_gap_and_count_none_twice(
    steps: list[tuple[float, int]], began_at: float, length: float
) -> None:
    at, stamps = 0.0, []
    for step, num_tokens in steps:
        at += step
        stamps.append((at, num_tokens))
    found = gaps(build_trace(*stamps))
    windows = split_around(found, began_at=began_at, ended_at=began_at + length)
    assert sorted([*windows.before, *windows.during, *windows.after], key=found.index) == found


@pytest.mark.parametrize(
    ("trace", "good"),
    [
        (build_trace((1.0, 1), (1.2, 1)), True),
        (build_trace((1.0, 1)), True),
        (build_trace((2.5, 1), (2.6, 1)), False),  # the first token is too late
        (build_trace((1.0, 1), (1.9, 1)), False),  # a gap is too long
        (build_trace((1.0, 1), (1.2, 1), outcome="error"), False),
        (build_trace(), False),
    ],
)
def test_goodput_counts_requests_that_kept_their_targets(trace: RequestTrace, good: bool) -> None:
    assert is_good(trace, Targets(tbt_seconds=0.5, ttft_seconds=2.0)) is good


def test_a_load_by_hand() -> None:
    traces = [
        build_trace((2.0, 1), (3.0, 1), sent_at=1.0),
        build_trace((4.0, 2), (4.25, 2), sent_at=2.0, ended_at=5.0),
        build_trace((6.0, 1), sent_at=3.0, ended_at=11.0, outcome="error"),
    ]
    summary = summarize(traces, Targets(tbt_seconds=0.5))
    assert (summary.num_requests, summary.num_finished, summary.num_failed) == (3, 2, 1)
    assert summary.seconds == 10.0
    assert summary.ttft_seconds.p50 == 2.0
    assert summary.gaps.tbt_seconds.count == 4
    assert summary.gaps.stall_seconds == 0.5
    assert summary.output_tokens_per_second == 0.7
    assert summary.requests_per_second == 0.2
    assert summary.goodput_per_second == 0.1


def test_no_request_is_no_figure_and_no_error() -> None:
    summary = summarize([], Targets(tbt_seconds=0.5))
    assert summary.num_requests == 0
    assert math.isnan(summary.requests_per_second)


def test_a_spread_is_the_median_between_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 10.0, 2.0]) == Spread(median=2.5, low=1.0, high=10.0)
    assert math.isnan(spread([]).median)
