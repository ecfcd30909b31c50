from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stallfree_router.metrics import RouterMetrics
from stallfree_router.predictor import MAX_KEYS, LengthHistogram, Predictor


def learned(*lengths: int, max_tokens: int = 1000, ended_by_itself: bool = True) -> Predictor:
    predictor = Predictor(RouterMetrics())
    for length in lengths:
        predictor.learn("m", max_tokens, num_tokens=length, predicted=100.0, ended_by_itself=ended_by_itself)
    return predictor


def test_without_samples_it_is_a_share_of_max_tokens_and_bounded() -> None:
    predictor = Predictor(RouterMetrics())
    assert predictor.expected_output_tokens("m", 400) == 100
    assert predictor.expected_output_tokens("m", 100_000) == 512
    assert predictor.expected_output_tokens("m", 1) == 1


def test_it_learns_the_length_of_answers() -> None:
    assert learned(*[100] * 200).expected_output_tokens("m", 1000) == pytest.approx(100, rel=0.1)


def test_few_samples_move_it_a_little() -> None:
    assert 100 < learned(100).expected_output_tokens("m", 1000) < 250


def test_the_cap_holds_and_what_is_generated_counts() -> None:
    predictor = learned(*[500] * 300)
    assert predictor.expected_output_tokens("m", 1000, generated=200) == pytest.approx(300, rel=0.15)
    assert predictor.expected_output_tokens("m", 600, generated=600) == 0
    assert predictor.expected_output_tokens("m", 600, generated=599) == 1


def test_a_bucket_of_max_tokens_backs_off_to_its_model() -> None:
    predictor = learned(*[100] * 300)
    assert predictor.expected_output_tokens("m", 8000) == pytest.approx(100, rel=0.2)
    assert predictor.expected_output_tokens("other", 8000) == 512


def test_a_cut_answer_is_a_lower_bound_and_no_sample() -> None:
    """All true lengths are drawn from one distribution; half of the answers are cut early."""
    rng = random.Random(3)
    histogram, truth = LengthHistogram(), []
    for _ in range(3000):
        length, cut = round(rng.lognormvariate(5, 0.6)), rng.choice([60, 10_000])
        truth.append(length)
        histogram.add(min(length, cut), is_censored=length > cut)
    assert histogram.expected_tokens_left(10_000) == pytest.approx(statistics.mean(truth[-1000:]), rel=0.15)


def test_if_every_answer_is_cut_the_cap_is_expected() -> None:
    histogram = LengthHistogram()
    for _ in range(50):
        histogram.add(64, is_censored=True)
    assert histogram.expected_tokens_left(64) == pytest.approx(64)


def test_old_samples_fade() -> None:
    histogram = LengthHistogram()
    for length in [1000] * 500 + [10] * 2000:
        histogram.add(length, is_censored=False)
    assert histogram.expected_tokens_left(5000) < 40


def test_the_error_is_measured_only_where_the_length_is_known() -> None:
    metrics = RouterMetrics()
    predictor = Predictor(metrics)
    predictor.learn("m", 100, num_tokens=100, predicted=25.0, ended_by_itself=False)
    predictor.learn("m", 100, num_tokens=50, predicted=25.0, ended_by_itself=True)
    name = "stallfree_router_predicted_output_tokens_error_ratio"
    assert metrics.registry.get_sample_value(f"{name}_count", {"model": "m"}) == 1
    assert metrics.registry.get_sample_value(f"{name}_sum", {"model": "m"}) == 0.5


def test_c34_the_number_of_keys_is_bounded() -> None:
    predictor = Predictor(RouterMetrics())
    for number in range(MAX_KEYS):
        predictor.learn(f"m{number}", 100, num_tokens=7, predicted=7.0, ended_by_itself=False)
    assert len(predictor._histogram_by_key) == MAX_KEYS


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.booleans()), max_size=40),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
@example([], 363, 364)
@example([(10, False)], 5, 5)
def test_the_expectation_stays_between_nothing_and_the_cap(
    samples: list[tuple[int, bool]], max_tokens: int, generated: int
) -> None:
    histogram, predictor = LengthHistogram(), Predictor(RouterMetrics())
    for length, is_censored in samples:
        histogram.add(length, is_censored=is_censored)
        predictor.learn("m", max_tokens, num_tokens=length, predicted=1.0, ended_by_itself=not is_censored)
    left = max(0, max_tokens - generated)
    assert 0 <= histogram.expected_tokens_left(max_tokens, generated=generated) <= left * (1 + 1e-9)
    expected = predictor.expected_output_tokens("m", max_tokens, generated=generated)
    assert (1 <= expected <= left) if left else expected == 0
