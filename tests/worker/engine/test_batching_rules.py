"""Every batching rule gives the same tokens and ends every request; each has the step shapes of the system it stands
for."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree_worker.engine.step import StepPlan
from stallfree_worker.settings import BatchingName
from tests.worker.engine.bench import Bench

RULES: tuple[BatchingName, ...] = get_args(BatchingName)


def plans(bench: Bench) -> list[StepPlan]:
    return list(bench.runner.plans)


def is_mixed(plan: StepPlan) -> bool:
    return plan.num_decode_tokens > 0 and plan.num_prefill_tokens > 0


def arrive_in_turn(bench: Bench, prompts: list[int], *, max_tokens: int = 12, every: int = 3) -> None:
    """Prompts that come while others run; returns when all are done."""
    for prompt in prompts:
        bench.submit(prompt, max_tokens=max_tokens)
        bench.steps(every)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    num_blocks=st.integers(7, 40),
    token_budget=st.integers(1, 64),
    max_num_seqs=st.integers(1, 6),
)
def test_every_request_ends_with_the_tokens_it_gets_alone(
    rule: BatchingName, loads: list[tuple[int, int, int]], num_blocks: int, token_budget: int, max_num_seqs: int
) -> None:
    bench = Bench(
        num_blocks=num_blocks, token_budget=token_budget, max_num_seqs=max_num_seqs, batching=rule, max_model_len=100
    )
    for num_steps, prompt, max_tokens in loads:
        bench.steps(num_steps)
        bench.submit(prompt, max_tokens=max_tokens)
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_sarathi_mixes_and_keeps_the_budget() -> None:
    bench = Bench(token_budget=32, batching="sarathi")
    arrive_in_turn(bench, [10, 100, 10])
    assert any(map(is_mixed, plans(bench)))
    assert max(plan.num_tokens for plan in plans(bench)) <= 32


def test_orca_mixes_whole_prompts_with_decodes_and_reserves_the_longest_request() -> None:
    bench = Bench(token_budget=32, batching="orca", max_model_len=256, num_blocks=48)
    arrive_in_turn(bench, [10, 200, 10, 10])
    assert any(is_mixed(plan) and plan.num_prefill_tokens == 200 for plan in plans(bench))
    assert bench.chunk_sizes_of(next(iter(bench.new_by_id)))[0] == 10
    # 48 blocks hold three requests of 16 blocks less one to spare for each that runs: two at a time
    assert max(len(plan.chunks) for plan in plans(bench)) == 2


def test_vllm_puts_prefills_first_and_never_mixes() -> None:
    bench = Bench(token_budget=32, batching="vllm", max_model_len=256)
    arrive_in_turn(bench, [10, 200, 10])
    assert not any(map(is_mixed, plans(bench)))
    for new in bench.new_by_id.values():
        assert bench.chunk_sizes_of(new.request_id)[0] == len(new.prompt_token_ids)


def test_vllm_computes_no_more_prompt_tokens_in_a_step_than_the_models_context() -> None:
    bench = Bench(batching="vllm", max_model_len=256)
    for _ in range(5):
        bench.submit(100)
    bench.step()
    assert plans(bench)[0].num_prefill_tokens == 200


def test_faster_transformer_admits_nobody_while_a_batch_runs() -> None:
    bench = Bench(batching="faster_transformer", max_model_len=64)
    first = bench.submit(10, max_tokens=20)
    bench.steps(2)
    second = bench.submit(10, max_tokens=5)
    bench.steps(18)
    assert bench.finish_reason_of(first) == "length"
    assert bench.output_of(second) == []
    bench.run()
    bench.assert_outputs_are_right()


def test_chunked_only_takes_turns_and_never_mixes() -> None:
    bench = Bench(token_budget=16, batching="chunked_only")
    bench.submit(10, max_tokens=40)
    bench.steps(2)
    bench.submit(160, max_tokens=4)
    bench.run()
    bench.assert_outputs_are_right()
    assert not any(map(is_mixed, plans(bench)))
    turns = [plan.num_prefill_tokens > 0 for plan in plans(bench)[2:22]]
    assert turns == [True, False] * 10


def test_only_the_rules_that_put_prefills_first_make_a_decode_wait() -> None:
    """The longest time that a running decode waits, in steps without it, while a long prompt comes in."""
    longest: dict[BatchingName, int] = {}
    for rule in RULES:
        bench = Bench(token_budget=16, batching=rule, max_model_len=400)
        stream = bench.submit(10, max_tokens=60)
        bench.steps(3)
        for _ in range(3):
            bench.submit(160, max_tokens=4)
        waits, waited = [0], 0
        while bench.finish_reason_of(stream) is None:
            waited = 0 if any(event.request_id == stream for event in bench.step().events) else waited + 1
            waits.append(waited)
        longest[rule] = max(waits)
    assert (longest["sarathi"], longest["orca"], longest["faster_transformer"]) == (0, 0, 0)
    assert longest["vllm"] > 0
    assert longest["chunked_only"] == 1
