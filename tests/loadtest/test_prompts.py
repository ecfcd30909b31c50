"""Random prompts and lengths with a long tail."""

from __future__ import annotations

import random
import statistics

import pytest

from stallfree_loadtest.prompts import LongTail, Vocabulary


@pytest.mark.parametrize(("median", "p90"), [(432, 1424), (104, 208)])
def test_lengths_have_the_median_and_the_p90_that_are_asked_for(median: int, p90: int) -> None:
    draw = random.Random(3)
    tail = LongTail(median=median, p90=p90, most=100 * p90)
    lengths = [tail.draw(draw) for _ in range(20_000)]
    assert statistics.median(lengths) == pytest.approx(median, rel=0.03)
    assert statistics.quantiles(lengths, n=10)[-1] == pytest.approx(p90, rel=0.03)
    assert statistics.fmean(lengths) > 1.1 * median  # the tail


def test_lengths_stay_between_one_and_the_most() -> None:
    draw = random.Random(4)
    lengths = {LongTail(median=2, p90=9, most=10).draw(draw) for _ in range(2000)}
    assert (min(lengths), max(lengths)) == (1, 10)


def test_prompts_are_drawn_from_the_vocabulary_anew_each_time() -> None:
    draw = random.Random(5)
    vocabulary = Vocabulary(low=7, high=9)
    one, other = vocabulary.draw(draw, 200), vocabulary.draw(draw, 200)
    assert set(one) == {7, 8}
    assert one != other
