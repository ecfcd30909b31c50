"""Before the first request the engine has served itself: step times are known, and nothing of it is left."""

from __future__ import annotations

import itertools

import pytest

from stallfree_worker.engine.calibration import calibrate
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import StepPlan, StepResult
from stallfree_worker.settings import SchedulerSettings
from tests.support.scripted import FAIL_ROW, ScriptedRunner

BASE_SECONDS, SECONDS_PER_TOKEN = 0.5, 0.01


class _TimedRunner(ScriptedRunner):
    """Moves its own clock by what a step takes."""

    now = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += BASE_SECONDS + SECONDS_PER_TOKEN * plan.num_tokens
        return super().execute(plan)


class _BrokenRunner(ScriptedRunner):
    def _next(self, *_: object) -> int:
        return FAIL_ROW


@pytest.mark.parametrize(("num_blocks", "chunk_tokens"), list(itertools.product((1, 2, 100), (1, 16, 512))))
def test_calibration_fits_any_cache_and_leaves_nothing(num_blocks: int, chunk_tokens: int) -> None:
    runner = ScriptedRunner(num_blocks=num_blocks)
    engine = Engine(SchedulerSettings(), runner, lambda: 0.0)
    calibrate(engine, max_chunk_tokens=chunk_tokens)
    assert not engine.has_work
    assert engine.status().num_free_blocks == num_blocks
    engine.check_integrity()


def test_step_times_are_known_after_calibration() -> None:
    runner = _TimedRunner(num_blocks=100)
    engine = Engine(SchedulerSettings(), runner, lambda: runner.now)
    calibrate(engine, max_chunk_tokens=256)
    step_time = engine.status().step_time
    assert step_time.base_seconds == pytest.approx(BASE_SECONDS, rel=0.05)
    assert step_time.seconds_per_token == pytest.approx(SECONDS_PER_TOKEN, rel=0.05)


def test_a_model_that_cannot_compute_is_found_before_it_serves() -> None:
    engine = Engine(SchedulerSettings(), _BrokenRunner(num_blocks=10), lambda: 0.0)
    with pytest.raises(RuntimeError, match="cannot compute one token"):
        calibrate(engine, max_chunk_tokens=16)
