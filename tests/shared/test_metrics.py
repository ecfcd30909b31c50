"""Buckets: fine where stalls happen, wide enough for what time-outs allow."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stallfree_shared import metrics

ALL = {name: value for name, value in vars(metrics).items() if name.endswith("_BUCKETS_SECONDS")}


@pytest.mark.parametrize("buckets", ALL.values(), ids=ALL.keys())
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    assert all(low < high for low, high in pairwise(buckets))


def test_time_between_tokens_is_told_within_an_eighth_where_targets_lie() -> None:
    fine = [value for value in metrics.TIME_BETWEEN_TOKENS_BUCKETS_SECONDS if 0.005 <= value <= 0.25]
    assert fine[0] == 0.005
    assert fine[-1] == 0.25
    assert max(high / low for low, high in pairwise(fine)) < 1.15


@pytest.mark.parametrize(
    ("buckets", "samples"),
    [
        (metrics.TIME_TO_FIRST_TOKEN_BUCKETS_SECONDS, (0.005, 0.2, 45.0, 400.0)),
        (metrics.TIME_BETWEEN_TOKENS_BUCKETS_SECONDS, (0.002, 0.08, 5.0)),
        (metrics.REQUEST_BUCKETS_SECONDS, (0.05, 900.0)),
    ],
)
def test_d05_every_expected_time_falls_between_two_near_bounds(
    buckets: tuple[float, ...], samples: tuple[float, ...]
) -> None:
    for sample in samples:
        above = min(bound for bound in buckets if bound >= sample)
        assert above <= sample * 1.3


@pytest.mark.parametrize(("gap", "target", "stall"), [(0.1, 0.2, 0.0), (0.2, 0.2, 0.0), (0.5, 0.2, 0.3)])
def test_a_stall_is_the_part_of_a_gap_beyond_the_target(gap: float, target: float, stall: float) -> None:
    assert metrics.stall_seconds(gap, target) == pytest.approx(stall)
