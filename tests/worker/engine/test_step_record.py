"""The record of a step says what the runner was given and how long it took, for every batching rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import StepRecord
from stallfree_worker.engine.token_budget import BUDGET_QUANTILE
from stallfree_worker.settings import BatchingName, SchedulerSettings
from tests.worker.engine.bench import Bench
from tests.worker.engine.checked_runner import CheckedRunner, VirtualClock, step_seconds

RULES: tuple[BatchingName, ...] = get_args(BatchingName)


def records_of(bench: Bench) -> list[StepRecord]:
    return [report.record for report in bench.reports if report.record is not None]


def busy_bench(batching: BatchingName = "sarathi", num_blocks: int = 24) -> Bench:
    """Too little memory for all: requests wait, and some are preempted."""
    bench = Bench(num_blocks=num_blocks, block_size=16, token_budget=64, batching=batching, max_model_len=256)
    for length in (40, 90, 7, 60, 33):
        bench.submit(length, max_tokens=60)
    bench.run()
    return bench


@pytest.mark.parametrize("batching", RULES)
def test_record_tells_the_chunks_that_the_runner_was_given(batching: BatchingName) -> None:
    bench = busy_bench(batching)
    records = records_of(bench)
    assert len(records) == len(bench.runner.plans)
    num_drawn: Counter[RequestId] = Counter()
    for record, plan in zip(records, bench.runner.plans, strict=True):
        assert record.step_id == plan.step_id
        given = [(chunk.request_id, len(chunk.token_ids), chunk.num_computed_tokens) for chunk in plan.chunks]
        assert given == list(zip(record.request_ids, record.chunk_tokens, record.context_tokens, strict=True))
        assert record.num_decode_tokens + record.num_prefill_tokens == sum(size for _, size, _ in given)
        lengths = {request_id: len(new.prompt_token_ids) for request_id, new in bench.new_by_id.items()}
        is_decode = [num_drawn[who] > 0 and context == lengths[who] + num_drawn[who] - 1 for who, _, context in given]
        assert is_decode == [place < record.num_decodes for place in range(len(given))], "decodes stand first"
        num_drawn.update(chunk.request_id for chunk in plan.chunks if chunk.output_index is not None)


def test_record_tells_the_seconds_of_the_step_by_the_clock_around_it() -> None:
    bench = busy_bench()
    for record, plan in zip(records_of(bench), bench.runner.plans, strict=True):
        assert record.execute_seconds == pytest.approx(step_seconds(plan))
        assert record.seconds == pytest.approx(step_seconds(plan))
        assert record.schedule_seconds == record.apply_seconds == 0.0


class _TickingClock:
    """Every look at it is one second later, so that each part of a step is told from the others."""

    def __init__(self) -> None:
        self.seconds: Iterator[float] = iter(float(second) for second in range(10_000))

    def __call__(self) -> float:
        return next(self.seconds)


def test_schedule_execute_and_apply_are_measured_apart_and_add_up() -> None:
    bench = Bench()
    engine = Engine(SchedulerSettings(token_budget=64), bench.runner, _TickingClock())
    bench.engine = engine
    bench.submit(10, max_tokens=2)
    record = bench.step().record
    assert record is not None
    parts = (record.schedule_seconds, record.execute_seconds, record.apply_seconds)
    assert parts == (1.0, 1.0, 1.0)
    assert record.seconds == 3.0
    assert record.ended_at == record.started_at + 3.0


def test_time_between_steps_counts_only_where_work_was_left() -> None:
    bench = Bench()
    bench.submit(10, max_tokens=3)
    first = bench.step().record
    bench.clock.now += 0.25
    second = bench.step().record
    bench.run()
    bench.clock.now += 60.0
    bench.submit(10, max_tokens=1)
    after_idling = bench.step().record
    assert first is not None
    assert second is not None
    assert after_idling is not None
    assert first.idle_seconds is None
    assert second.idle_seconds == pytest.approx(0.25)
    assert after_idling.idle_seconds is None


def test_time_between_steps_does_not_count_after_all_work_was_cancelled() -> None:
    bench = Bench()
    request = bench.submit(10, max_tokens=3)
    bench.step()
    bench.engine.cancel(request)
    assert bench.step().record is None
    bench.clock.now += 60.0
    bench.submit(10)
    record = bench.step().record
    assert record is not None
    assert record.idle_seconds is None


def test_record_names_those_that_lost_their_blocks() -> None:
    bench = busy_bench()
    preempted = [request_id for record in records_of(bench) for request_id in record.preempted_request_ids]
    restarts = {request_id: bench.num_restarts_of(request_id) for request_id in bench.new_by_id}
    assert sum(restarts.values()) > 0, "the case was not provoked"
    assert {request_id: preempted.count(request_id) for request_id in restarts} == restarts


def test_record_tells_the_queues_as_the_step_left_them() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(5):
        bench.submit(4, max_tokens=1)
    record = bench.step().record
    assert record is not None
    status = bench.engine.status()
    assert (record.requests_running, record.requests_waiting) == (status.requests_running, status.requests_waiting)
    assert (record.requests_running, record.requests_waiting) == (0, 3)


def test_record_tells_a_budget_in_tokens_or_in_seconds() -> None:
    fixed = busy_bench()
    assert {(record.budget_tokens, record.budget_seconds) for record in records_of(fixed)} == {(64, None)}

    clock = VirtualClock()
    runner = CheckedRunner(num_blocks=64, block_size=16, clock=clock, max_model_len=1024)
    auto = Bench()
    auto.clock, auto.runner = clock, runner
    auto.engine = Engine(SchedulerSettings(max_step_seconds=0.5), runner, clock)
    auto.submit(20, max_tokens=3, tbt_target_seconds=0.2)
    auto.run()
    seconds = [record.budget_seconds for record in records_of(auto)]
    assert seconds[0] == pytest.approx(0.5, abs=0.01), "nothing decodes: the longest step"
    assert all(given is not None and 0.15 < given < 0.2 for given in seconds[1:]), "the target of the one that decodes"
    assert {record.budget_tokens for record in records_of(auto)} == {None}


def test_prediction_is_the_one_before_the_step_and_its_error_that_of_this_step() -> None:
    bench = Bench()
    bench.submit(200, max_tokens=200)
    bench.run()
    records = records_of(bench)
    first, last = records[0], records[-1]
    assert first.prediction_error_ratio is not None
    assert first.prediction_error_ratio > 0.2, "nothing was known before the first step"
    assert last.prediction_error_ratio == pytest.approx(0.0, abs=0.02)
    assert last.predicted_seconds == pytest.approx(last.seconds, rel=0.02)
    assert BUDGET_QUANTILE > 0.5
    assert all(record.predicted_quantile_seconds >= record.predicted_seconds for record in records)


def test_record_of_nothing_is_none() -> None:
    assert Bench().step().record is None
