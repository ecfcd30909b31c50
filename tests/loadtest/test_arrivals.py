"""Arrival processes: the mean rate is the one asked for, gaps are independent, a seed repeats them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallfree_loadtest import arrivals

MANY = 40_000


def gaps_of(instants: Iterator[float]) -> list[float]:
    first = list(itertools.islice(instants, MANY))
    return [first[0], *(later - earlier for earlier, later in itertools.pairwise(first))]


def correlation_with_next(values: list[float]) -> float:
    return statistics.correlation(values[:-1], values[1:])


@pytest.mark.parametrize("seed", range(3))
def test_defect_8_poisson_offers_the_rate_that_is_asked_for(seed: int) -> None:
    """A harness that clips gaps at three means offers 5.2 % more."""
    gaps = gaps_of(arrivals.poisson(4.0, seed=seed))
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert max(gaps) > 3 * 0.25 * 2


def test_poisson_gaps_are_independent() -> None:
    assert abs(correlation_with_next(gaps_of(arrivals.poisson(4.0, seed=1)))) < 0.02


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_gamma_has_the_asked_rate_and_variation(variation: float) -> None:
    gaps = gaps_of(arrivals.gamma(10.0, coefficient_of_variation=variation, seed=5))
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.04)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)
    assert abs(correlation_with_next(gaps)) < 0.03


def test_fixed_arrivals_are_even() -> None:
    assert list(itertools.islice(arrivals.fixed(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_a_seed_repeats_the_arrivals() -> None:
    one, two, other = (list(itertools.islice(arrivals.poisson(1.0, seed=seed), 50)) for seed in (3, 3, 4))
    assert one == two
    assert one != other


def test_a_trace_gives_its_instants(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("0\n0.5\n\n0.5\n2e0\n")
    assert list(arrivals.trace(path)) == [0.0, 0.5, 0.5, 2.0]


@pytest.mark.parametrize(("text", "line"), [("0\nx\n", "line 2"), ("1\n0.5\n", "line 2"), ("inf\n", "line 1")])
def test_a_wrong_trace_names_the_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=line):
        list(arrivals.trace(path))


def test_arrivals_are_cut_by_number_and_by_time() -> None:
    assert list(arrivals.limited(arrivals.fixed(1.0), max_requests=2)) == [0.0, 1.0]
    assert list(arrivals.limited(arrivals.fixed(1.0), max_seconds=2.5)) == [0.0, 1.0, 2.0]
    assert list(arrivals.limited(arrivals.fixed(1.0), max_seconds=2.5, max_requests=1)) == [0.0]
