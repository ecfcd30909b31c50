"""The changing load with a stand-in for the worker, and what its figures mean, from made-up steps and stamps."""

from __future__ import annotations

import json
import math

import pytest

from stallfree_loadtest.fleet import configuration
from stallfree_loadtest.follow import FollowLoad, FollowResult, Phase, run_follow
from stallfree_loadtest.follow_report import (
    follow_report,
    phase_figures,
    result_rows,
    step_errors,
    steps_until_within,
)
from stallfree_loadtest.measures import RequestTrace, TokenStamp
from stallfree_loadtest.pages import PageError, WorkerStep
from stallfree_loadtest.prompts import Vocabulary
from tests.loadtest.test_fleet import fleet

LOAD = FollowLoad(
    few_streams=2,
    many_streams=5,
    short_context_tokens=10,
    long_context_streams=3,
    long_context_tokens=3000,
    trickle_tokens=50,
    phase_seconds=0.3,
    vocabulary=Vocabulary(),
    seed=0,
)
CONFIGURATION = configuration("sarathi:auto")


async def test_the_load_goes_through_its_phases() -> None:
    told: list[str] = []
    async with fleet() as made, made.serving(CONFIGURATION) as serving:
        result = await run_follow(serving, LOAD, report=told.append)
    assert [phase.name for phase in result.phases] == told
    assert [phase.num_streams for phase in result.phases] == [2, 5, 5, 5, 5]
    ids = [phase.last_step_id_before for phase in result.phases]
    assert ids == sorted(ids)
    assert [len(trace.stamps) > 0 for trace in result.streams] == [True] * 8
    assert [trace.outcome for trace in result.streams] == ["dropped"] * 8
    assert result.num_prefills > 5
    for figures in phase_figures(result, tbt_target_seconds=10.0, window_steps=5):
        assert figures.steps_until_back == 0
        assert figures.num_steps > 5
        assert figures.errors.median == pytest.approx(0.1)
        assert figures.decode_step_seconds == pytest.approx(0.01)


async def test_a_worker_that_tells_no_steps_ends_the_run_with_a_reason() -> None:
    async with fleet("knows-no-steps") as made, made.serving(CONFIGURATION) as serving:
        with pytest.raises(PageError, match="/debug/steps"):
            await run_follow(serving, LOAD, report=lambda _: None)


def test_steps_count_until_the_p99_of_the_next_window_is_within_the_target() -> None:
    within, beyond = [0.1, 0.1], [0.1, 0.3]
    assert steps_until_within([within] * 5, target=0.2, window_steps=3) == 0
    assert steps_until_within([beyond, within, beyond, *[within] * 3], target=0.2, window_steps=3) == 3
    assert steps_until_within([*[within] * 2, beyond], target=0.2, window_steps=3) is None
    assert steps_until_within([within], target=0.2, window_steps=3) is None
    assert steps_until_within([[], [], []], target=0.2, window_steps=3) is None


def test_one_late_gap_in_two_hundred_is_beyond_the_p99_and_does_not_count() -> None:
    many = [0.1] * 100
    assert steps_until_within([many, [*many[1:], 9.0]], target=0.2, window_steps=2) == 0


def step(step_id: int, *, seconds: float = 0.1, predicted: float = 0.1, prefill: int = 0) -> WorkerStep:
    return WorkerStep(
        step_id=step_id, seconds=seconds, predicted_seconds=predicted, decode_tokens=2, prefill_tokens=prefill
    )


def test_errors_are_relative_to_the_real_time() -> None:
    errors = step_errors([step(1, seconds=0.2, predicted=0.1), step(2, seconds=0.1, predicted=0.2), step(3)])
    assert (errors.num_steps, errors.median) == (3, 0.5)
    assert errors.p95 == pytest.approx(0.95)
    assert math.isnan(step_errors([]).median)


def stream(name: str, *stamps: float) -> RequestTrace:
    return RequestTrace(
        request_id=name,
        due_at=0.0,
        sent_at=0.0,
        ended_at=stamps[-1],
        stamps=tuple(TokenStamp(at=at, num_tokens=1) for at in stamps),
    )


RESULT = FollowResult(
    phases=(
        Phase(name="calm", began_at=0.05, last_step_id_before=-1, num_streams=1),
        Phase(name="busy", began_at=0.35, last_step_id_before=2, num_streams=2),
    ),
    # one step a tenth of a second; then a step of half a second, and again the old pace
    streams=(
        stream("a", 0.1, 0.2, 0.3, 0.8, 0.9, 1.0, 1.1),
        stream("b", 0.802, 0.897, 1.001, 1.099),
    ),
    steps=(
        step(0), step(1), step(2, prefill=10),
        step(3, seconds=0.5, predicted=0.1, prefill=40), step(4, prefill=10), step(5), step(6, prefill=10),
    ),
    num_missed_steps=0,
    num_prefills=4,
)  # fmt: skip


def test_figures_are_those_of_each_phase() -> None:
    calm, busy = phase_figures(RESULT, tbt_target_seconds=0.2, window_steps=2)
    assert (calm.num_steps, calm.steps_until_back) == (3, 0)
    assert (busy.num_steps, busy.steps_until_back) == (4, 1)
    assert busy.worst_seconds == pytest.approx(0.5)
    assert busy.p99_then_seconds < 0.11
    assert busy.prefill_tokens_per_second == pytest.approx(60 / 0.8)
    assert (calm.errors.num_steps, busy.errors.num_steps) == (3, 4)
    assert busy.errors.p95 == pytest.approx(0.68)
    assert calm.decode_step_seconds == busy.decode_step_seconds == 0.1


def test_a_phase_that_never_gets_back_says_so() -> None:
    report = follow_report(RESULT, LOAD, tbt_target_seconds=0.05, window_steps=2)
    assert report.count("never") == 2
    assert "median error 0.0%, P95 56.0%" in report


def test_the_result_is_written_as_json() -> None:
    rows = [json.loads(json.dumps(row)) for row in result_rows(RESULT, tbt_target_seconds=0.05, window_steps=2)]
    assert [row["kind"] for row in rows] == [*["phase"] * 2, "errors", *["step"] * 7, *["request"] * 2]
    assert rows[0]["p99_then_seconds"] is None
    assert rows[2]["num_steps"] == 7
