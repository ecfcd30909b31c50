"""What the engine promises at its own border: refusals, ends, times, causes, cancellation, status."""

from __future__ import annotations

import dataclasses

import pytest

from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError, OverloadedError
from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import StepPlan
from tests.worker.engine.bench import Bench, prompt_of
from tests.worker.engine.checked_runner import EOS_TOKEN_ID, reference_output


def prompt_whose_output_ends_at(index: int) -> tuple[int, ...]:
    """A prompt whose greedy output has its first end-of-sequence token at `index`."""
    greedy = SamplingParams(max_tokens=index + 1)
    for salt in range(100_000):
        prompt = (*prompt_of(5), salt)
        output = reference_output(prompt, greedy)
        if len(output) == index + 1 and output[-1] == EOS_TOKEN_ID:
            return prompt
    raise AssertionError


def test_a_prompt_is_admitted_in_the_step_after_its_submission() -> None:
    bench = Bench(token_budget=64)
    bench.submit(10)
    report = bench.step()
    assert report.num_prefill_tokens == 10
    assert [event.output_index for event in report.events] == [0]


def test_decode_is_scheduled_before_begun_prefill_and_that_before_new_requests() -> None:
    bench = Bench(token_budget=16)
    decoding = bench.submit(4, max_tokens=9)
    bench.step()
    begun = bench.submit(20)
    bench.step()
    new = bench.submit(20)
    bench.step()
    order = [(chunk.request_id, len(chunk.token_ids)) for chunk in bench.runner.plans[-1].chunks]
    assert order == [(decoding, 1), (begun, 5), (new, 10)]


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(5):
        bench.submit(4)
    bench.step()
    status = bench.engine.status()
    assert (status.requests_running, status.requests_waiting) == (2, 3)
    bench.run()
    bench.assert_outputs_are_right()


def test_admission_leaves_a_block_for_every_running_request() -> None:
    bench = Bench(num_blocks=4, block_size=16, token_budget=64)
    bench.submit(20, max_tokens=20)
    bench.step()
    second = bench.submit(20, max_tokens=4)
    bench.step()
    assert not bench.chunk_sizes_of(second), "two free blocks, one of them kept for the running request"
    bench.run()
    assert sum(report.num_preemptions for report in bench.reports) == 0


def test_eos_ends_a_request_with_stop() -> None:
    bench = Bench()
    request = bench.submit(prompt_whose_output_ends_at(3), sampling=SamplingParams(max_tokens=10))
    bench.run()
    assert len(bench.output_of(request)) == 4
    assert bench.finish_reason_of(request) == "stop"
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_eos_exactly_at_the_limit_is_a_stop() -> None:
    bench = Bench()
    request = bench.submit(prompt_whose_output_ends_at(3), sampling=SamplingParams(max_tokens=4))
    bench.run()
    assert bench.finish_reason_of(request) == "stop"


def test_ignore_eos_goes_on_past_eos_and_stop_tokens() -> None:
    prompt = prompt_whose_output_ends_at(3)
    stops = frozenset(reference_output(prompt, SamplingParams(max_tokens=2)))
    bench = Bench()
    request = bench.submit(prompt, sampling=SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=stops))
    bench.run()
    assert len(bench.output_of(request)) == 10
    assert bench.finish_reason_of(request) == "length"


def test_a_stop_token_id_ends_a_request_with_stop() -> None:
    prompt = prompt_whose_output_ends_at(5)
    second = reference_output(prompt, SamplingParams(max_tokens=2))[1]
    bench = Bench()
    sampling = SamplingParams(max_tokens=10, stop_token_ids=frozenset({second}))
    request = bench.submit(prompt, sampling=sampling)
    bench.run()
    assert bench.output_of(request)[-1] == second
    assert bench.finish_reason_of(request) == "stop"
    bench.assert_outputs_are_right()


def test_a_request_whose_logits_failed_ends_alone() -> None:
    bench = Bench()
    good, bad = bench.submit(5), bench.submit(5)
    bench.step()
    bench.runner.failing[bad] = "logits are not finite"
    report = bench.step()
    (event,) = [event for event in report.events if event.request_id == bad]
    assert event.token_id is None
    assert event.output_index == 1
    assert event.error is not None
    assert event.error.code == "step_failed"
    bench.run()
    bench.assert_outputs_are_right(good)
    bench.assert_idle()


def test_an_exception_of_the_runner_is_not_caught() -> None:
    bench = Bench()
    bench.submit(5)

    def break_down(plan: StepPlan) -> None:
        raise ZeroDivisionError

    bench.runner.during_step = break_down
    with pytest.raises(ZeroDivisionError):
        bench.step()


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [(100, 1, "prompt_token_ids"), (90, 11, "max_tokens")])
def test_a_request_beyond_max_model_len_is_refused_with_both_numbers(prompt: int, max_tokens: int, param: str) -> None:
    bench = Bench(max_model_len=100)
    with pytest.raises(ContextLengthExceededError, match=rf"100 tokens.* {prompt} prompt.* {max_tokens} out") as error:
        bench.submit(prompt, max_tokens=max_tokens)
    assert error.value.param == param
    bench.submit(90, max_tokens=10)
    bench.run()
    bench.assert_outputs_are_right()


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError, match="no tokens"):
        bench.submit(())
    request = bench.submit(5)
    with pytest.raises(InvalidRequestError, match=request):
        bench.submit(5, request_id=request)
    bench.run()
    bench.submit(5, request_id=request)


def test_too_many_waiting_requests_are_refused_with_a_time_to_come_back() -> None:
    bench = Bench(max_waiting_requests=3)
    for _ in range(3):
        bench.submit(5)
    with pytest.raises(OverloadedError, match="limit is 3") as error:
        bench.submit(5)
    assert error.value.retry_after_seconds is not None
    assert error.value.retry_after_seconds >= 1
    bench.step()
    bench.submit(5)


def test_too_many_waiting_tokens_are_refused_but_never_the_first_that_waits() -> None:
    bench = Bench(max_waiting_tokens=100)
    bench.submit(500)
    with pytest.raises(OverloadedError, match="500 tokens wait"):
        bench.submit(1)
    bench.run()
    bench.submit(60)
    bench.submit(40)
    with pytest.raises(OverloadedError):
        bench.submit(1)


def test_cancel_of_an_unknown_or_ended_request_is_false() -> None:
    bench = Bench()
    request = bench.submit(5)
    bench.run()
    assert not bench.engine.cancel(request)
    assert not bench.engine.cancel(RequestId("never"))


@pytest.mark.parametrize("state", ["queued", "mid-prefill", "mid-decode", "preempted"])
def test_a_cancelled_request_is_freed_within_two_steps_in_every_state(state: str) -> None:
    bench = Bench(num_blocks=8, block_size=16, token_budget=16, max_num_seqs=2)
    other = bench.submit(40, max_tokens=60)
    request = bench.submit(40, max_tokens=30)
    bench.steps({"queued": 0, "mid-prefill": 4, "mid-decode": 8, "preempted": 1}[state])
    while state == "preempted" and bench.reports[-1].num_preemptions == 0:
        bench.step()
    assert bench.engine.cancel(request)
    bench.steps(2)
    status = bench.engine.status()
    held = status.num_blocks - status.num_free_blocks
    assert held == -(-(40 + len(bench.output_of(other)) - 1) // 16)
    assert status.requests_running + status.requests_waiting == 1
    bench.run()
    bench.assert_outputs_are_right(other)
    bench.assert_idle()


def test_a_gap_beyond_the_target_is_a_stall_with_its_cause() -> None:
    bench = Bench(token_budget=64)
    request = bench.submit(5, max_tokens=4, tbt_target_seconds=0.0102)
    bench.steps(2)
    bench.submit(600, max_tokens=1)
    bench.step()
    first, second, third = bench.events_by_id[request]
    assert (first.stall_seconds, first.stall_cause) == (0.0, None)
    assert (second.stall_seconds, second.stall_cause) == (0.0, None)
    assert third.stall_seconds == pytest.approx(0.01 + 0.0064 - 0.0102)
    assert third.stall_cause == "prefill"


def test_a_slow_step_of_decodes_alone_is_a_stall_by_decode() -> None:
    bench = Bench()
    request = bench.submit(5, max_tokens=4, tbt_target_seconds=0.001)
    bench.steps(2)
    assert bench.events_by_id[request][1].stall_cause == "decode"


def test_a_gap_with_a_preemption_in_it_is_a_stall_by_preemption() -> None:
    bench = Bench(num_blocks=8, block_size=16, token_budget=64)
    bench.submit(40, max_tokens=60)
    younger = bench.submit(40, max_tokens=30, tbt_target_seconds=0.1)
    bench.run()
    stalls = [event for event in bench.events_by_id[younger] if event.stall_seconds > 0]
    assert [event.stall_cause for event in stalls] == ["preemption"] * bench.num_restarts_of(younger)
    gap = stalls[0].time_between_tokens_seconds
    assert gap is not None
    assert stalls[0].stall_seconds == pytest.approx(gap - 0.1)


def test_reports_count_recomputed_tokens() -> None:
    bench = Bench(num_blocks=8, block_size=16, token_budget=64)
    bench.submit(40, max_tokens=60)
    younger = bench.submit(40, max_tokens=30)
    bench.run()
    total = sum(bench.chunk_sizes_of(younger))
    assert total > 40 + 29
    assert sum(report.num_recomputed_tokens for report in bench.reports) == total - (40 + 29)


def test_status_counts_the_work_that_is_left() -> None:
    bench = Bench(token_budget=16, max_num_seqs=1)
    bench.submit(40, max_tokens=10)
    bench.submit(60, max_tokens=7)
    bench.step()
    status = bench.engine.status()
    assert (status.requests_running, status.requests_waiting) == (1, 1)
    assert status.prefill_tokens_left == 24 + 60
    assert status.expected_output_tokens_left == 17
    bench.steps(3)
    status = bench.engine.status()
    assert status.prefill_tokens_left == 60
    assert status.expected_output_tokens_left == 15


def test_no_output_is_expected_to_be_longer_than_it_may_be() -> None:
    bench = Bench()
    new = bench.new_by_id[bench.submit(5, max_tokens=4)]
    bench.engine.submit(dataclasses.replace(new, request_id=RequestId("x"), expected_output_tokens=float("inf")))
    assert bench.engine.status().expected_output_tokens_left == 4 + 4


def test_a_step_without_work_computes_nothing() -> None:
    bench = Bench()
    report = bench.step()
    assert (report.events, report.step_seconds) == ((), 0.0)
    assert not bench.runner.plans


def test_the_engine_learns_how_long_its_steps_take() -> None:
    bench = Bench(token_budget=64)
    for _ in range(5):
        bench.submit(300, max_tokens=20)
    bench.run()
    learned = bench.engine.status().step_time
    assert learned.base_seconds == pytest.approx(0.01, rel=0.05)
    assert learned.seconds_per_token == pytest.approx(0.0001, rel=0.05)


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_tell_whether_logits_are_needed(overlaps: bool) -> None:
    """`CheckedRunner` holds every plan against what its requests ask for."""
    bench = Bench(token_budget=20, overlaps=overlaps)
    greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    kinds: list[dict[str, object]] = [{}, {}, {"min_tokens": 4}, {"logprobs": 0}, {"frequency_penalty": 1.0}]
    kinds += [{"prompt_logprobs": 0}, {"temperature": 0.5}]
    for number, kind in enumerate(kinds):
        bench.submit(9 + 30 * number, sampling=greedy.model_copy(update={"max_tokens": 5 + 7 * number, **kind}))
    bench.run()
    assert {plan.shape.needs_logits for plan in bench.runner.plans} == {False, True}
