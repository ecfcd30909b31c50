"""What the engine makes of structured outputs: draws that are postponed, texts that are whole, requests that end."""

from __future__ import annotations

import random

import pytest

from stallfree_shared.wire import SamplingParams, StructuredOutput
from stallfree_worker.engine.batching import RULES
from stallfree_worker.settings import BatchingName
from tests.worker.engine.bench import Bench, prompt_of

ANY = StructuredOutput(kind="regex", definition=".*")


def structured(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, structured_output=ANY)


@pytest.mark.parametrize("batching", sorted(RULES))
def test_a_postponed_draw_comes_later_and_changes_no_token(batching: BatchingName) -> None:
    bench = Bench(batching=batching, token_budget=16)
    first, _ = bench.submit(40, max_tokens=5), bench.submit(9, max_tokens=5)
    bench.runner.postponing.update({first: 3})
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()
    assert bench.chunk_sizes_of(first)[-7:] == [1] * 7  # three draws that were postponed, four decodes


def test_others_get_a_token_in_every_step_while_one_is_postponed() -> None:
    bench = Bench()
    stream = bench.submit(5, max_tokens=30)
    late = bench.submit(20, max_tokens=3)
    bench.runner.postponing.update({late: 10})
    bench.steps(10)
    assert (len(bench.output_of(stream)), len(bench.output_of(late))) == (10, 0)
    bench.run()
    bench.assert_outputs_are_right()


def test_who_begins_like_a_postponed_request_does_not_wait_for_its_draw() -> None:
    bench = Bench()
    late = bench.submit(prompt_of(64), max_tokens=3)
    bench.runner.postponing[late] = 50
    bench.step()
    twin = bench.submit(prompt_of(64), max_tokens=3)
    bench.steps(3)
    assert (len(bench.output_of(twin)), len(bench.output_of(late))) == (3, 0)
    assert bench.chunk_sizes_of(twin) == [1, 1, 1]
    bench.run()
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_a_structured_output_that_cannot_go_on_fails_alone_and_takes_nothing_from_the_cache() -> None:
    bench = Bench()
    bench.submit(prompt_of(64), max_tokens=2)
    bench.run()
    refused = bench.submit(prompt_of(64), max_tokens=2)
    bench.runner.refusing[refused] = "no such grammar"
    bench.run()
    again = bench.submit(prompt_of(64), max_tokens=2)
    bench.run()
    assert bench.events_by_id[refused][-1].error is not None
    assert bench.events_by_id[again][0].num_cached_tokens == 63
    bench.assert_idle()


@pytest.mark.parametrize("seed", range(10))
def test_random_postponements_and_preemptions_change_no_token(seed: int) -> None:
    source = random.Random(seed)
    bench = Bench(num_blocks=14, block_size=4, token_budget=source.choice((4, 16, 64)))
    for _ in range(12):
        request = bench.submit(source.randint(1, 20), max_tokens=source.randint(1, 20))
        bench.runner.postponing[request] = source.randint(0, 8)
        bench.steps(source.randint(0, 3))
    bench.run()
    assert sum(report.num_preemptions for report in bench.reports) > 0
    bench.assert_outputs_are_right()
    bench.assert_idle()


def test_a_whole_text_stops_whatever_the_token_is() -> None:
    bench = Bench()
    request, other = bench.submit(5, max_tokens=50), bench.submit(5, max_tokens=8)
    bench.steps(3)
    bench.runner.completed.add(request)
    bench.run()
    assert (len(bench.output_of(request)), bench.finish_reason_of(request)) == (4, "stop")
    assert (len(bench.output_of(other)), bench.finish_reason_of(other)) == (8, "length")
    bench.assert_idle()


def test_the_runner_is_told_once_of_structured_requests_that_ended_in_any_way() -> None:
    bench = Bench(max_num_seqs=4)
    stream = bench.submit(5, max_tokens=12)
    ends = bench.submit(5, sampling=structured(2))
    fails, cancelled = bench.submit(5, sampling=structured(9)), bench.submit(5, sampling=structured(9))
    waiting = bench.submit(5, sampling=structured(9))
    bench.step()
    bench.engine.cancel(cancelled)
    bench.engine.cancel(waiting)
    bench.runner.failing[fails] = "no"
    bench.run()
    told = [request_id for plan in bench.runner.plans for request_id in plan.ended_request_ids]
    assert sorted(told) == sorted([ends, fails, cancelled, waiting])
    assert bench.runner.plans[1].ended_request_ids == (cancelled, waiting)
    assert stream not in told
