"""Prefix caching and sliding windows through the whole engine. The checked runner reads every token back through the
tables of all groups, so that a shared block with another text, or another tenant's, is found at once."""

from __future__ import annotations

import random

import pytest

from stallfree_shared.errors import ContextLengthExceededError
from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import KVGroup, StepPlan
from stallfree_worker.settings import BatchingName
from tests.worker.engine.bench import Bench, prompt_of
from tests.worker.engine.checked_runner import do_nothing

RULES: tuple[BatchingName, ...] = ("sarathi", "orca", "vllm", "faster_transformer", "chunked_only")
GEMMA = (KVGroup(), KVGroup(window_tokens=32), KVGroup(window_tokens=32))
MISTRAL = (KVGroup(window_tokens=128),)


def small_bench(num_blocks: int = 64, *, has_prefix_cache: bool = True) -> Bench:
    return Bench(
        num_blocks=num_blocks, block_size=16, token_budget=64, max_num_seqs=8, has_prefix_cache=has_prefix_cache
    )


def num_computed_of(bench: Bench, request_id: RequestId) -> int:
    return sum(bench.chunk_sizes_of(request_id))


def num_cached_of(bench: Bench, request_id: RequestId) -> int:
    return bench.events_by_id[request_id][0].num_cached_tokens


def finish(bench: Bench) -> None:
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_b09_a_repeated_prompt_computes_at_most_one_block_and_the_first_hits_nothing() -> None:
    bench = Bench(block_size=4, token_budget=16)
    first = bench.submit(prompt_of(40), max_tokens=1)
    bench.run()
    second = bench.submit(prompt_of(40), max_tokens=1)
    finish(bench)
    assert (num_cached_of(bench, first), num_cached_of(bench, second)) == (0, 39)
    assert (num_computed_of(bench, first), num_computed_of(bench, second)) == (40, 1)
    reports = bench.reports
    assert sum(report.num_prefix_query_tokens for report in reports) == 80
    assert sum(report.num_prefix_hit_tokens for report in reports) == 39


@pytest.mark.parametrize("length", [1, 3, 4, 5, 39, 40, 41, 80])
@pytest.mark.parametrize("groups", [(KVGroup(),), GEMMA, MISTRAL])
def test_b09_whatever_its_length_a_repeated_prompt_computes_its_begun_block_or_one_token(
    length: int, groups: tuple[KVGroup, ...]
) -> None:
    bench = Bench(block_size=4, token_budget=16, kv_groups=groups)
    bench.submit(prompt_of(length), max_tokens=6)
    bench.run()
    second = bench.submit(prompt_of(length), max_tokens=6)
    finish(bench)
    assert num_computed_of(bench, second) == (length % 4 or 1) + 5


@pytest.mark.parametrize("rule", RULES)
def test_every_batching_rule_shares_what_is_cached(rule: BatchingName) -> None:
    bench = Bench(num_blocks=128, batching=rule, max_model_len=400)
    bench.submit(prompt_of(200), max_tokens=20)
    bench.run()
    half = (*prompt_of(100), *prompt_of(100, 5))
    repeated = [bench.submit(prompt, max_tokens=20) for prompt in (prompt_of(200), half, prompt_of(37))]
    finish(bench)
    assert [num_cached_of(bench, request) for request in repeated] == [192, 96, 32]


def test_without_prefix_caching_nothing_is_shared() -> None:
    bench = small_bench(has_prefix_cache=False)
    for _ in range(4):
        bench.submit(prompt_of(64), max_tokens=3)
    bench.step()
    bench.run()
    bench.submit(prompt_of(64), max_tokens=3)
    finish(bench)
    assert {event.num_cached_tokens for events in bench.events_by_id.values() for event in events} == {0}
    assert bench.runner.num_computed_tokens == 5 * (64 + 2)
    assert sum(report.num_prefix_query_tokens for report in bench.reports) == 0


def test_outputs_are_cached_too_so_that_the_next_turn_of_a_talk_computes_its_own_words_only() -> None:
    bench = Bench()
    first = bench.submit(prompt_of(40), max_tokens=30)
    bench.run()
    talk = (*prompt_of(40), *bench.output_of(first), *prompt_of(20, 9))
    second = bench.submit(talk, max_tokens=4)
    finish(bench)
    assert num_cached_of(bench, second) == 64


def test_a_request_for_prompt_logprobs_computes_all_of_its_prompt() -> None:
    bench = Bench()
    bench.submit(prompt_of(64), max_tokens=2)
    bench.run()
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    request = bench.submit(prompt_of(64), sampling=sampling)
    bench.run()
    assert num_computed_of(bench, request) == 65
    assert sum(report.num_prefix_query_tokens for report in bench.reports) == 64


def test_siblings_wait_for_the_first_and_compute_one_token_each() -> None:
    bench = Bench(token_budget=256)
    siblings = [bench.submit(prompt_of(2000), max_tokens=1) for _ in range(4)]
    bench.steps(8)
    most_used = 4096 - min(report.status.num_free_blocks for report in bench.reports)
    finish(bench)
    assert [num_computed_of(bench, sibling) for sibling in siblings] == [2000, 1, 1, 1]
    assert most_used == 125


def test_whoever_does_not_begin_alike_is_not_held_up_by_those_who_wait() -> None:
    bench = Bench(token_budget=64)
    bench.submit(prompt_of(600), max_tokens=2)
    bench.step()
    twins = [bench.submit(prompt_of(600 + extra), max_tokens=2) for extra in (0, 1, 2)]
    stranger = bench.submit(prompt_of(590, 7), max_tokens=2)
    bench.run()
    bench.assert_outputs_are_right()
    assert [num_computed_of(bench, twin) for twin in twins] == [600 - 592 + 1, 601 - 592 + 1, 602 - 592 + 1]
    assert bench.events_by_id[stranger][0].time_to_first_token_seconds is not None
    bench.assert_idle()


def test_nobody_waits_for_a_worse_priority_or_longer_than_the_bound() -> None:
    bench = Bench(token_budget=64, max_prefill_wait_seconds=0.1)
    bench.submit(prompt_of(6400), max_tokens=1, priority=1)
    bench.step()
    better = bench.submit(prompt_of(100), max_tokens=1, priority=0)
    bench.steps(4)
    assert bench.events_by_id[better]
    twin = bench.submit(prompt_of(3200), max_tokens=1, priority=1)
    bench.steps(2)
    assert not bench.chunk_sizes_of(twin)
    bench.clock.now += 0.2
    bench.steps(2)
    assert bench.chunk_sizes_of(twin)
    finish(bench)


@pytest.mark.parametrize("ends", ["cancelled", "cancelled in flight", "failed"])
def test_who_waits_for_a_request_that_ends_early_computes_the_rest_itself(ends: str) -> None:
    bench = Bench(token_budget=64)
    owner = bench.submit(prompt_of(256), max_tokens=2)
    twins = [bench.submit(prompt_of(256), max_tokens=2) for _ in range(2)]
    bench.steps(2)

    def cancel(plan: StepPlan) -> None:
        bench.runner.during_step = do_nothing
        assert bench.engine.cancel(owner)

    if ends == "cancelled":
        assert bench.engine.cancel(owner)
    elif ends == "failed":
        bench.runner.failing[owner] = "not finite"
    else:
        bench.runner.during_step = cancel
    bench.run()
    bench.assert_outputs_are_right(*twins)
    bench.assert_idle()
    computed = sum(num_computed_of(bench, twin) for twin in twins)
    assert computed == {"cancelled": 128 + 3, "cancelled in flight": 128 + 3, "failed": 256 + 3}[ends]


def test_b22_the_same_prompt_under_another_salt_hits_nothing() -> None:
    bench = Bench()
    salts = ["", "X", "Y", "X", "salt:X"]
    requests = []
    for salt in salts:
        requests.append(bench.submit(prompt_of(64), max_tokens=1, cache_salt=salt))
        bench.run()
    assert [num_cached_of(bench, request) for request in requests] == [0, 0, 0, 63, 0]


def test_b22_requests_of_other_salts_do_not_wait_for_each_other() -> None:
    bench = Bench(token_budget=512)
    for salt in ("a", "b", "c"):
        bench.submit(prompt_of(100), max_tokens=1, cache_salt=salt)
    report = bench.step()
    assert report.num_prefill_tokens == 300


@pytest.mark.parametrize("in_flight", [False, True])
def test_b23_blocks_of_an_aborted_prefill_are_reused_only_as_far_as_they_were_computed(*, in_flight: bool) -> None:
    bench = Bench(token_budget=64)
    aborted = bench.submit(prompt_of(640), max_tokens=2)
    bench.steps(2)

    def cancel(plan: StepPlan) -> None:
        bench.runner.during_step = do_nothing
        bench.engine.cancel(aborted)

    if in_flight:
        bench.runner.during_step = cancel
        bench.step()
    else:
        bench.step()
        bench.engine.cancel(aborted)
    again = bench.submit(prompt_of(640), max_tokens=2)
    bench.run()
    bench.assert_outputs_are_right(again)
    assert num_cached_of(bench, again) == (128 if in_flight else 192)


def test_b23_nothing_of_a_failed_request_is_reused() -> None:
    bench = Bench(token_budget=64)
    failed = bench.submit(prompt_of(200), max_tokens=2)
    bench.runner.failing[failed] = "not finite"
    bench.run()
    again = bench.submit(prompt_of(200), max_tokens=2)
    bench.run()
    bench.assert_outputs_are_right(again)
    assert num_cached_of(bench, again) == 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    bench = Bench(num_blocks=12, block_size=16, token_budget=256)
    bench.submit(80, max_tokens=18)
    bench.submit(80, max_tokens=60)
    finish(bench)
    restarted = [request for request in bench.new_by_id if bench.num_restarts_of(request) > 0]
    assert restarted
    for request in restarted:
        assert num_computed_of(bench, request) < 80 + bench.new_by_id[request].sampling.max_tokens + 32


def test_who_shares_its_blocks_with_others_loses_less_and_is_evicted_first() -> None:
    bench = Bench(num_blocks=24, block_size=16, token_budget=512)
    bench.submit(prompt_of(32, 1), max_tokens=100)
    bench.step()
    bench.submit(prompt_of(112, 3), max_tokens=60)
    bench.submit(prompt_of(64, 4), max_tokens=60)
    bench.step()
    bench.submit(prompt_of(115, 3), max_tokens=60)
    finish(bench)
    evicted = [request_id for plan in bench.runner.plans for request_id in plan.preempted_request_ids]
    assert evicted[0] in {"r1", "r3"}


def test_nobody_is_evicted_who_is_in_the_step_already_though_evictions_change_what_the_others_would_lose() -> None:
    """All need a block in the same step, and none is free. The sharer goes first; by that its twin comes to lose more
    than a decode that is in the step."""
    bench = Bench(num_blocks=15, block_size=16, token_budget=512)
    bench.submit(4, max_tokens=60)
    sharer = bench.submit(prompt_of(68, 3), max_tokens=60)
    bench.submit(36, max_tokens=60)
    bench.step()
    twin = bench.submit((*prompt_of(64, 3), *prompt_of(21, 9)), max_tokens=60)
    while not (evicted := bench.runner.plans[-1].preempted_request_ids):
        bench.step()
    assert evicted == (sharer, twin)
    finish(bench)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_b03_eight_requests_for_three_times_the_cache_all_finish(*, has_prefix_cache: bool) -> None:
    bench = small_bench(has_prefix_cache=has_prefix_cache)
    requests = [bench.submit(200, max_tokens=200) for _ in range(8)]
    finish(bench)
    assert bench.num_restarts_of(requests[0]) == 0
    assert max(bench.num_restarts_of(request) for request in requests) <= 10


def test_b36_eight_answers_to_each_of_a_hundred_prompts_all_finish_and_compute_each_prompt_once() -> None:
    bench = small_bench()
    for prompt in range(100):
        for _ in range(8):
            bench.submit(tuple((3 * position + prompt) % 89 + prompt for position in range(300)), max_tokens=4)
    finish(bench)
    assert max(report.status.requests_running for report in bench.reports) == 8
    assert bench.runner.num_computed_tokens == 100 * (300 + 7 * 12 + 8 * 3)


@pytest.mark.parametrize("length", [15, 16, 17, 31])
@pytest.mark.parametrize("groups", [(KVGroup(),), GEMMA])
def test_b37_siblings_that_are_stopped_and_preempted_answer_as_if_alone(
    length: int, groups: tuple[KVGroup, ...]
) -> None:
    bench = Bench(num_blocks=10 * len(groups), block_size=16, token_budget=64, kv_groups=groups)
    siblings = [
        bench.submit(prompt_of(length), sampling=SamplingParams(max_tokens=40, seed=seed, ignore_eos=True))
        for seed in range(4)
    ]
    bench.steps(6)
    assert bench.engine.cancel(siblings[1])
    bench.run()
    bench.assert_outputs_are_right(siblings[0], siblings[2], siblings[3])
    bench.assert_idle()
    assert len({tuple(bench.output_of(sibling)) for sibling in siblings}) == 4


@pytest.mark.parametrize("rule", ["sarathi", "chunked_only"])
def test_b13_a_prompt_beyond_the_pool_is_served_where_only_a_window_is_kept(rule: BatchingName) -> None:
    bench = Bench(num_blocks=32, kv_groups=MISTRAL, max_model_len=2048, token_budget=64, batching=rule)
    assert bench.engine.max_model_len == 2048
    bench.submit(1500, max_tokens=100)
    finish(bench)
    assert max(bench.chunk_sizes_of(RequestId("r0"))) == 64
    assert 32 - min(report.status.num_free_blocks for report in bench.reports) <= 13


def test_b13_whole_prompts_need_room_for_a_whole_prompt() -> None:
    bench = Bench(num_blocks=32, kv_groups=MISTRAL, max_model_len=2048, batching="vllm")
    assert bench.engine.max_model_len == 512
    with pytest.raises(ContextLengthExceededError, match="512"):
        bench.submit(1500, max_tokens=100)
    bench.submit(400, max_tokens=100)
    finish(bench)


def test_b01_the_largest_request_of_a_mixed_model_runs_and_a_larger_one_is_refused() -> None:
    bench = Bench(num_blocks=64, kv_groups=GEMMA, max_model_len=2048, token_budget=64)
    longest = bench.engine.max_model_len
    assert longest == 16 * (64 - 2 * 5)
    with pytest.raises(ContextLengthExceededError):
        bench.submit(longest - 3, max_tokens=4)
    bench.submit(longest - 4, max_tokens=4)
    finish(bench)


@pytest.mark.parametrize("groups", [GEMMA, MISTRAL])
@pytest.mark.parametrize("budget", [16, 64, 256])
def test_b12_windows_slide_through_chunks_of_any_size_with_and_without_hits(
    groups: tuple[KVGroup, ...], budget: int
) -> None:
    bench = Bench(num_blocks=160, kv_groups=groups, token_budget=budget, max_model_len=700)
    for _ in range(2):
        for length in (100, 127, 128, 129, 200, 300):
            bench.submit(prompt_of(length), max_tokens=100)
        bench.run()
    finish(bench)


@pytest.mark.parametrize("groups", [(KVGroup(),), GEMMA, MISTRAL])
def test_b14_a_thousand_aborts_among_requests_that_share_leak_nothing(groups: tuple[KVGroup, ...]) -> None:
    rng = random.Random(14)
    bench = Bench(num_blocks=64 * len(groups), kv_groups=groups, max_model_len=1024, token_budget=64)
    for _ in range(1000 // len(groups) // 3):
        requests = [bench.submit(prompt_of(rng.randint(1, 640), rng.randint(0, 1)), max_tokens=9) for _ in range(3)]
        bench.steps(rng.randint(0, 12))
        for request in requests:
            bench.engine.cancel(request)
        bench.assert_idle()
