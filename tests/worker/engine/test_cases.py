"""Cases of what broke in other engines, each as a test (the ids are those of the project's list of cases)."""

from __future__ import annotations

import itertools
import random

import pytest

from stallfree_shared.errors import ContextLengthExceededError
from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.step import StepPlan
from tests.worker.engine.bench import Bench
from tests.worker.engine.checked_runner import do_nothing, step_seconds

BOUNDARY_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192, 193)
BOUNDARY_MAX_TOKENS = (1, 2, 16, 17)


def small_bench(num_blocks: int = 64) -> Bench:
    return Bench(num_blocks=num_blocks, block_size=16, token_budget=64)


def test_b01_a_prompt_larger_than_the_cache_is_refused_at_once_and_blocks_nobody() -> None:
    bench = Bench(num_blocks=64, block_size=16, max_model_len=2048)
    with pytest.raises(ContextLengthExceededError, match=r"1024 tokens.* 1500 prompt"):
        bench.submit(1500, max_tokens=16)
    for _ in range(10):
        bench.submit(20)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_b01_max_model_len_is_lowered_to_what_the_cache_holds() -> None:
    assert Bench(num_blocks=64, block_size=16, max_model_len=2048).engine.max_model_len == 1024


def test_b01_a_request_that_fills_the_whole_cache_runs() -> None:
    bench = small_bench()
    bench.submit(1000, max_tokens=24)
    bench.submit(5)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_b03_a_full_cache_makes_progress_and_evictions_are_bounded() -> None:
    bench = small_bench()
    requests = [bench.submit(200, max_tokens=200) for _ in range(8)]
    bench.run()
    bench.assert_outputs_are_right()
    assert bench.num_restarts_of(requests[0]) == 0
    assert max(bench.num_restarts_of(request) for request in requests) <= 10
    assert sum(report.num_preemptions for report in bench.reports) > 0
    alone = small_bench()
    alone.submit(200, max_tokens=200)
    alone.run()
    assert bench.clock.now - 100 < 5 * 8 * (alone.clock.now - 100)
    bench.assert_idle()


def test_b04_a_preempted_long_prefill_returns_only_when_all_of_it_fits() -> None:
    bench = small_bench(num_blocks=40)
    for _ in range(4):
        bench.submit(10, max_tokens=300)
    bench.step()
    long = bench.submit(500, max_tokens=30, priority=1)
    bench.run()
    bench.assert_outputs_are_right()
    assert bench.num_restarts_of(long) >= 1, "the case was not provoked"
    assert sum(bench.chunk_sizes_of(long)) - (500 + 29) <= 2 * 500
    bench.assert_idle()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("preempted_at", "older", "younger", "num_spare_blocks", "token_budget"),
    [(0, 33, 100, 1, 4), (1, 38, 32, 1, 4), (15, 34, 32, 1, 512), (16, 33, 32, 1, 512), (17, 33, 32, 2, 512)],
)
def test_b05_output_and_usage_do_not_change_when_preempted_after_any_number_of_tokens(
    *, temperature: float, preempted_at: int, older: int, younger: int, num_spare_blocks: int, token_budget: int
) -> None:
    num_blocks = -(-older // 16) + -(-younger // 16) + num_spare_blocks
    bench = Bench(num_blocks=num_blocks, block_size=16, token_budget=token_budget)
    bench.submit(older, max_tokens=40)
    sampling = SamplingParams(max_tokens=20, temperature=temperature, seed=11, ignore_eos=True)
    request = bench.submit(younger, sampling=sampling)
    bench.run()
    assert bench.runner.restarts_by_id[request] == [preempted_at]
    bench.assert_outputs_are_right()
    assert len(bench.output_of(request)) == 20
    assert {event.num_prompt_tokens for event in bench.events_by_id[request]} == {younger}
    bench.assert_idle()


def test_b05_output_does_not_change_when_one_request_is_preempted_twice() -> None:
    bench = Bench(num_blocks=8, block_size=16, token_budget=16)
    for max_tokens in (20, 60, 60, 60):
        bench.submit(20, max_tokens=max_tokens)
    bench.run()
    bench.assert_outputs_are_right()
    assert max(bench.num_restarts_of(request) for request in bench.new_by_id) == 2
    bench.assert_idle()


@pytest.mark.parametrize("max_tokens", BOUNDARY_MAX_TOKENS)
@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
def test_b07_chunks_and_blocks_that_end_together_change_nothing(length: int, max_tokens: int) -> None:
    bench = Bench(num_blocks=32, block_size=16, token_budget=64)
    bench.submit(length, max_tokens=max_tokens)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_b07_pairs_of_boundary_lengths_in_one_batch_change_nothing() -> None:
    for first, second in itertools.combinations_with_replacement(BOUNDARY_LENGTHS, 2):
        bench = Bench(num_blocks=32, block_size=16, token_budget=64)
        bench.submit(first, max_tokens=17)
        bench.submit(second, max_tokens=16)
        bench.run()
        bench.assert_outputs_are_right()
        bench.assert_idle()


@pytest.mark.parametrize("token_budget", [7, 16, 64, 1000])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 128, 200, 255])
def test_b11_every_token_of_a_prompt_reaches_the_model_once_and_in_order(length: int, token_budget: int) -> None:
    bench = Bench(num_blocks=16, block_size=16, token_budget=token_budget)
    request = bench.submit(length, max_tokens=1)
    bench.run()
    reached = [token for plan in bench.runner.plans for chunk in plan.chunks for token in chunk.token_ids]
    assert tuple(reached) == bench.new_by_id[request].prompt_token_ids
    assert sum(report.num_prefill_tokens for report in bench.reports) == length


@pytest.mark.parametrize("length", [64, 128, 200])
def test_b11_of_a_prompt_that_the_pool_cannot_hold_no_token_reaches_the_model(length: int) -> None:
    bench = Bench(num_blocks=4, block_size=16, token_budget=48)
    with pytest.raises(ContextLengthExceededError, match=f"{length} prompt"):
        bench.submit(length, max_tokens=1)
    bench.run()
    assert bench.runner.plans == []
    bench.submit(63, max_tokens=1)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


@pytest.mark.parametrize("num_chunks", [1, 5, 9])
def test_b14_abort_between_chunks_frees_everything(num_chunks: int) -> None:
    bench = small_bench()
    request = bench.submit(640)
    bench.steps(num_chunks)
    assert bench.engine.cancel(request)
    bench.assert_idle()
    assert bench.output_of(request) == []
    again = bench.submit(bench.new_by_id[request].prompt_token_ids)
    bench.run()
    bench.assert_outputs_are_right(again)


@pytest.mark.parametrize("num_chunks", [1, 5, 10])
def test_b14_abort_in_flight_drops_the_token_and_frees_blocks_only_after_the_step(num_chunks: int) -> None:
    bench = small_bench()
    request = bench.submit(640)
    bench.steps(num_chunks - 1)

    def cancel(plan: StepPlan) -> None:
        assert bench.engine.cancel(request)
        bench.engine.check_integrity()
        assert bench.engine.status().num_free_blocks == 64 - 40, "blocks that a step writes to were handed back"

    bench.runner.during_step = cancel
    bench.step()
    bench.assert_idle()
    assert bench.events_by_id[request] == []


def test_b14_a_cancelled_id_may_come_again_while_its_last_step_is_in_flight() -> None:
    bench = small_bench()
    request = bench.submit(100)

    def cancel_and_resubmit(plan: StepPlan) -> None:
        bench.runner.during_step = do_nothing
        bench.engine.cancel(request)
        bench.runner.forget(request)
        bench.submit(70, request_id=request)

    bench.runner.during_step = cancel_and_resubmit
    bench.run()
    bench.assert_outputs_are_right(request)
    bench.assert_idle()


def test_b14_a_thousand_aborts_at_random_instants_leak_nothing() -> None:
    rng = random.Random(14)
    bench = small_bench()
    for _ in range(1000):
        request = bench.submit(rng.randint(1, 640), max_tokens=rng.randint(1, 20))
        bench.steps(rng.randint(0, 12))
        is_running = not bench.events_by_id[request] or bench.finish_reason_of(request) is None
        assert bench.engine.cancel(request) == is_running
        bench.assert_idle()


def test_b17_a_long_prefill_stops_no_decode_and_is_not_stopped_by_them() -> None:
    bench = Bench(token_budget=64)
    streams = [bench.submit(8, max_tokens=400) for _ in range(4)]
    bench.steps(4)
    before = {stream: len(bench.events_by_id[stream]) for stream in streams}
    long = bench.submit(6400, max_tokens=1)
    num_steps = 0
    while not bench.events_by_id[long]:
        bench.step()
        num_steps += 1
    assert num_steps == -(-6400 // (64 - 4)), "the prefill gets all that the decodes leave"
    longest_step = max(step_seconds(plan) for plan in bench.runner.plans)
    for stream in streams:
        events = bench.events_by_id[stream]
        assert len(events) - before[stream] == num_steps, "a decode missed a step"
        gaps = [event.time_between_tokens_seconds for event in events[before[stream] :]]
        assert max(gap for gap in gaps if gap is not None) <= longest_step + 1e-9


@pytest.mark.parametrize("seconds_between", [0.05, 0.3])
def test_b20_one_that_does_not_fit_is_passed_by_small_ones_until_it_is_overdue_and_then_by_nobody(
    seconds_between: float,
) -> None:
    bench = Bench(num_blocks=64, block_size=16, token_budget=64, max_prefill_wait_seconds=1.0)
    running = bench.submit(700, max_tokens=300)
    bench.step()
    large = bench.submit(500)
    submitted_at, small_after = bench.clock.now, []
    while not bench.chunk_sizes_of(large):
        small = bench.submit(20)
        late = bench.clock.now - submitted_at > 1.0
        next_at = bench.clock.now + seconds_between
        while bench.clock.now < next_at and not bench.chunk_sizes_of(large):
            bench.step()
        small_after += [bool(bench.chunk_sizes_of(small))] if late and not bench.chunk_sizes_of(large) else []
        assert late or bench.chunk_sizes_of(small), "a small one that fits waited though the large one was not overdue"
    assert small_after, "the case was not provoked"
    assert not any(small_after), "a small one passed one that was overdue"
    assert bench.finish_reason_of(running) == "length", "it came in as soon as there was room"
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_b18_short_prompts_that_arrive_amid_a_long_prefill_begin_at_once() -> None:
    bench = Bench(token_budget=64)
    long = bench.submit(6400, max_tokens=1)
    bench.steps(5)
    for _ in range(10):
        bench.submit(10)
    bench.steps(3)
    for request_id in list(bench.new_by_id)[1:]:
        assert bench.output_of(request_id), "a short prompt waited behind the long one"
    assert len(bench.chunk_sizes_of(long)) == 8, "and the long one moved in every step"
    bench.run()
    bench.assert_outputs_are_right()
