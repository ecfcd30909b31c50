from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_worker.engine.step_time import StepTimeModel


def learned(steps: list[tuple[int, float]]) -> StepTimeModel:
    model = StepTimeModel()
    for num_tokens, seconds in steps:
        model.observe(num_tokens, seconds)
    return model


def noisy_steps(count: int, *, base: float, slope: float, seed: int = 5) -> list[tuple[int, float]]:
    rng = random.Random(seed)
    sizes = [rng.choice([4, 8, 64, 256, 512]) for _ in range(count)]
    return [(size, (base + slope * size) * rng.uniform(0.95, 1.05)) for size in sizes]


def test_there_is_a_positive_prediction_before_any_step() -> None:
    model = StepTimeModel()
    assert 0 < model.predict(1) < model.predict(512) < 1
    assert model.error_ratio == 0


def test_the_first_step_sets_the_level() -> None:
    assert learned([(64, 2.0)]).predict(64) == pytest.approx(2.0)


@pytest.mark.parametrize(("base", "slope"), [(0.02, 0.0001), (0.05, 0.004), (0.0005, 0.01)])
def test_coefficients_of_noisy_steps_are_found(base: float, slope: float) -> None:
    model = learned(noisy_steps(200, base=base, slope=slope))
    for size in (8, 64, 512):
        assert model.predict(size) == pytest.approx(base + slope * size, rel=0.15)
    assert model.error_ratio < 0.15


def test_an_outlier_hardly_moves_the_prediction() -> None:
    steps = noisy_steps(200, base=0.02, slope=0.0002)
    model = learned([*steps, (64, 30.0)])
    assert model.predict(64) == pytest.approx(learned(steps).predict(64), rel=0.1)


def test_a_lasting_change_of_speed_is_believed() -> None:
    fast = noisy_steps(200, base=0.02, slope=0.0002)
    slow = noisy_steps(200, base=0.08, slope=0.0008)
    model = learned(fast + slow)
    assert model.predict(256) == pytest.approx(0.08 + 0.0008 * 256, rel=0.2)


def test_steps_that_are_all_alike_leave_the_slope_alone() -> None:
    rng = random.Random(9)
    varied = noisy_steps(100, base=0.02, slope=0.0002)
    alike = [(rng.choice([7, 8, 9]), 0.0216 * rng.uniform(0.7, 1.3)) for _ in range(20_000)]
    assert learned(varied + alike).predict(512) == pytest.approx(0.02 + 0.0002 * 512, rel=0.3)


def test_a_step_without_a_duration_is_ignored() -> None:
    model = learned([(64, 1.0), (64, 0.0), (0, 5.0)])
    assert model.predict(64) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(1e-5, 100)), max_size=60))
def test_coefficients_are_never_negative(steps: list[tuple[int, float]]) -> None:
    coefficients = learned(steps).coefficients
    assert coefficients.base_seconds >= 0
    assert coefficients.seconds_per_token > 0
