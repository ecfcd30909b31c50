"""Defects found by reading the reference implementation of Sarathi-Serve; ours must not have them.

Those of its sampler and timers (1, 13) are in `tests/worker/model`, of its flags (2) in `tests/worker`, of its load
generator (8, 9) in `tests/loadtest`, each in a file of this name. All names begin with the number.
"""

from __future__ import annotations

import itertools
import random

import pytest

from stallfree_shared.errors import ContextLengthExceededError
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from stallfree_worker.engine.token_budget import PositionTable, PositionTokenBudget, make_token_budget
from stallfree_worker.settings import SchedulerSettings
from tests.worker.engine.bench import Bench, MovingBudget
from tests.worker.engine.checked_runner import step_seconds


def test_defect_3_decodes_that_outnumber_the_budget_all_go_and_no_prefill_joins_them() -> None:
    budget = MovingBudget(64)
    bench = Bench(budget=budget)
    for _ in range(6):
        bench.submit(5, max_tokens=20)
    bench.step()
    budget.max_tokens = 7
    begun = bench.submit(30)
    bench.step()
    budget.max_tokens = 4
    late = bench.submit(30)
    report = bench.step()
    assert (report.num_decode_tokens, report.num_prefill_tokens) == (6, 0)
    bench.run()
    assert sum(bench.chunk_sizes_of(begun)) == sum(bench.chunk_sizes_of(late)) == 30 + 3
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_defect_3_decodes_that_use_up_the_budget_exactly_let_no_prefill_in() -> None:
    bench = Bench(token_budget=4)
    for _ in range(4):
        bench.submit(1, max_tokens=20)
    bench.step()
    late = bench.submit(30)
    bench.steps(18)
    assert not bench.chunk_sizes_of(late)
    assert bench.engine.status().requests_running == 4, "one that gets no tokens must not hold blocks"
    bench.run()
    bench.assert_outputs_are_right()


def test_defect_3_chunks_by_position_are_never_negative_when_an_earlier_request_takes_more_than_a_later_ones_size() -> (
    None
):
    """The runner checks that no chunk is empty, and that every token is computed once."""
    for seed in range(10):
        rng = random.Random(seed)
        table = PositionTable(
            largest_tokens=rng.randint(20, 64), smallest_tokens=rng.randint(1, 8), num_stages=4, tokens_per_stage=20
        )
        bench = Bench(budget=PositionTokenBudget(table), max_num_seqs=8)
        requests = []
        for _ in range(8):
            requests.append(bench.submit(rng.randint(1, 120), max_tokens=rng.randint(1, 12)))
            bench.steps(rng.randint(0, 3))
        bench.run()
        assert all(size > 0 for request in requests for size in bench.chunk_sizes_of(request))
        bench.assert_outputs_are_right()
        bench.assert_idle()


def test_defect_4_max_tokens_usage_and_ttft_survive_preemption() -> None:
    bench = Bench(num_blocks=8, block_size=16, token_budget=64)
    bench.submit(40, max_tokens=60)
    younger = bench.submit(40, max_tokens=30)
    bench.run()
    assert bench.num_restarts_of(younger) > 0, "the case was not provoked"
    events = bench.events_by_id[younger]
    assert len(events) == 30
    assert events[-1].finish_reason == "length"
    assert {event.num_prompt_tokens for event in events} == {40}
    first_step_end = sum(step_seconds(plan) for plan in bench.runner.plans[:2])
    times_to_first = [event.time_to_first_token_seconds for event in events]
    assert times_to_first[0] is not None
    assert abs(times_to_first[0] - first_step_end) < 1e-9
    assert times_to_first[1:] == [None] * 29
    bench.assert_outputs_are_right()


def test_defect_5_a_first_token_has_no_time_between_tokens() -> None:
    bench = Bench()
    request = bench.submit(3, max_tokens=3)
    bench.run()
    gaps = [event.time_between_tokens_seconds for event in bench.events_by_id[request]]
    assert gaps[0] is None
    assert all(gap is not None and gap > 0 for gap in gaps[1:])


@pytest.mark.parametrize("length", [256, 257, 5000])
def test_defect_6_prompt_that_is_too_long_is_answered_at_the_door_and_harms_nobody(length: int) -> None:
    """In the reference it was dropped in the step, without an answer."""
    bench = Bench(num_blocks=16, block_size=16)
    with pytest.raises(ContextLengthExceededError, match=rf"256 tokens.* {length} prompt"):
        bench.submit(length)
    assert bench.step().record is None, "nothing of it is inside"
    bench.submit(20)
    with pytest.raises(ContextLengthExceededError):
        bench.submit(length)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


@pytest.mark.parametrize("length", [159, 160, 161, 400, 1500])
def test_defect_7_prompt_longer_than_the_position_table_is_served(length: int) -> None:
    table = PositionTable(largest_tokens=32, smallest_tokens=8, num_stages=4, tokens_per_stage=40)
    bench = Bench(budget=PositionTokenBudget(table))
    request = bench.submit(length, max_tokens=3)
    bench.run()
    bench.assert_outputs_are_right()
    sizes = bench.chunk_sizes_of(request)
    assert max(sizes) == sizes[0] == 32
    ends = list(itertools.accumulate(sizes))
    beyond = [size for end, size in zip(ends, sizes, strict=True) if end - size >= 160 and end < length]
    assert set(beyond) <= {8}, "the smallest size goes on for ever"


@pytest.mark.parametrize("budget", ["auto", "by-position", 48])
def test_defect_7_no_step_is_larger_than_what_memory_is_sized_for(budget: str | int) -> None:
    """The reference measured memory with the fixed chunk size, and then ran larger chunks."""
    bench = Bench()
    settings = SchedulerSettings.model_validate({"token_budget": budget, "max_num_batched_tokens": 96})
    bench.engine = Engine(settings, bench.runner, bench.clock)
    for length in (1000, 300, 7, 500):
        bench.submit(length, max_tokens=30)
    bench.run()
    assert max(plan.num_tokens for plan in bench.runner.plans) == settings.max_step_tokens


@pytest.mark.parametrize("max_tokens", [16, 96, 2048])
def test_defect_7_position_table_stays_within_memory_at_every_position(max_tokens: int) -> None:
    settings = SchedulerSettings.model_validate({"token_budget": "by-position", "max_num_batched_tokens": max_tokens})
    budget = make_token_budget(settings, StepTimeModel()).for_step(token_deadlines=[], now=0.0)
    sizes = [
        budget.tokens_left(StepShape(), context_tokens=position, most=100_000) for position in range(0, 200_000, 1000)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1] > 0) == (settings.max_step_tokens, True)


def test_defect_10_decodes_that_need_no_new_block_evict_nobody_though_none_is_free() -> None:
    bench = Bench(num_blocks=4, block_size=16, token_budget=64)
    bench.submit(30, max_tokens=18)
    bench.submit(1, max_tokens=15)
    num_free = [bench.step().status.num_free_blocks for _ in range(14)]
    assert num_free.count(0) > 8, "the case was not provoked"
    assert bench.engine.status().requests_running == 2
    bench.run()
    assert sum(report.num_preemptions for report in bench.reports) == 0
    bench.assert_outputs_are_right()


def test_defect_11_an_intermediate_chunk_gives_no_event() -> None:
    bench = Bench(token_budget=16)
    bench.submit(64, max_tokens=1)
    assert [len(bench.step().events) for _ in range(4)] == [0, 0, 0, 1]


def test_defect_12_one_that_does_not_fit_keeps_no_small_one_waiting_and_is_served_in_the_end() -> None:
    bench = Bench(num_blocks=64, block_size=16, token_budget=64)
    running = bench.submit(600, max_tokens=200)
    bench.steps(12)
    assert bench.events_by_id[running]
    large = bench.submit(500, max_tokens=2)
    small = [bench.submit(20, max_tokens=2) for _ in range(10)]
    bench.steps(40)
    assert [len(bench.output_of(request)) for request in small] == [2] * 10
    assert bench.finish_reason_of(running) is None, "the case was not provoked"
    assert bench.chunk_sizes_of(large) == [], "the case was not provoked"
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()
