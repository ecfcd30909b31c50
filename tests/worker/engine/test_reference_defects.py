"""Defects found by reading the reference implementation of Sarathi-Serve; ours must not have them.

Three more are cases of their own: 1 (temperature 0 is greedy, also beside random rows) is a42 and b25 in the tests of
the sampler, 6 (a prompt that is too long gets an answer) b01, and 12 (who waits behind one that does not fit) b20.
"""

from __future__ import annotations

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


def test_defect_10_a_decode_that_needs_no_new_block_evicts_nobody() -> None:
    bench = Bench(num_blocks=3, block_size=16, token_budget=64)
    bench.submit(18, max_tokens=10)
    bench.run()
    bench.submit(17, max_tokens=15)
    bench.submit(1, max_tokens=15)
    bench.run()
    assert sum(report.num_preemptions for report in bench.reports) == 0
    bench.assert_outputs_are_right()


def test_defect_11_an_intermediate_chunk_gives_no_event() -> None:
    bench = Bench(token_budget=16)
    bench.submit(64, max_tokens=1)
    assert [len(bench.step().events) for _ in range(4)] == [0, 0, 0, 1]
