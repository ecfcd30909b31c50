"""The order in which prefills compute, against a slow sort over all requests, and each of its ranks alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import StepPlan
from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from tests.worker.engine.bench import Bench

MAX_WAIT = 1.0
PRIORITY_STEP = 4.0
TOKENS = 32


def prefills_of(plan: StepPlan) -> list[tuple[RequestId, int]]:
    """The prefill chunks of a step, in its order, with their tokens."""
    return [(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks if not (chunk.output_index or 0) > 0]


@dataclass(slots=True)
class Waiter:
    """What the slow order knows of a request that has not drawn a token yet."""

    request_id: RequestId
    number: int
    submitted_at: float
    num_tokens: int
    priority: int
    ttft_target: float
    num_left: int
    waits_since: float

    @property
    def line(self) -> tuple[int, int, int]:
        return self.priority, math.floor(math.log2(self.num_tokens)), math.floor(math.log2(self.ttft_target))

    def rank(self, now: float, best: int, seconds_per_token: float) -> tuple[float, ...]:
        """The order as its docstring tells it, in other words."""
        aged = max(best, self.priority - int((now - self.submitted_at) // PRIORITY_STEP))
        if now - self.waits_since > MAX_WAIT:
            has_begun = self.num_left < self.num_tokens
            return aged, 0, 0 if has_begun else 1, self.waits_since, self.number
        needed = self.num_left * seconds_per_token
        allowed = max(self.ttft_target, 4 * self.num_tokens * seconds_per_token)
        spare = self.submitted_at + allowed - now - needed
        if spare < needed + 0.5:
            return aged, 1, spare / needed, self.number
        return aged, 2, self.num_left, self.number


def slow_step(waiters: list[Waiter], now: float, seconds_per_token: float) -> dict[RequestId, int]:
    """Who computes how many tokens of a step, by sorting everybody again for every choice. No memory limit, nothing
    decodes."""
    best = min((waiter.priority for waiter in waiters), default=0)
    begun = [waiter for waiter in waiters if waiter.num_left < waiter.num_tokens]
    oldest = min(begun, key=lambda waiter: waiter.number, default=None)
    share = 0 if oldest is None or len(waiters) == 1 else min(TOKENS, oldest.num_left) // 4
    taken: dict[RequestId, int] = {}
    done: set[RequestId] = set()
    tokens = TOKENS - share
    while tokens > 0:
        free = [waiter for waiter in waiters if waiter.request_id not in done]
        halves = {other.line for other in begun if other.request_id not in done}
        free = [waiter for waiter in free if waiter in begun or waiter.line not in halves]
        firsts = [
            waiter
            for waiter in free
            if waiter in begun or waiter.number == min(other.number for other in free if other.line == waiter.line)
        ]
        firsts = [waiter for waiter in firsts if waiter.request_id not in taken]
        if not firsts:
            break
        first = min(firsts, key=lambda waiter: waiter.rank(now, best, seconds_per_token))
        if first is oldest:
            tokens, share = tokens + share, 0
        taken[first.request_id] = min(tokens, first.num_left)
        tokens -= taken[first.request_id]
        if taken[first.request_id] == first.num_left:
            done.add(first.request_id)
    if share and oldest is not None:
        taken[oldest.request_id] = min(share + tokens, oldest.num_left)
    return taken


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 300),
        st.integers(-1, 1),
        st.sampled_from([0.1, 1.0, 5.0]),
        st.sampled_from([0.0, 0.0, 0.3, 1.5, 5.0]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(ARRIVALS)
def test_the_queues_picks_are_those_of_a_slow_sort_over_all_requests(
    arrivals: list[tuple[int, int, int, float, float]],
) -> None:
    bench = Bench(
        token_budget=TOKENS, max_num_seqs=64, max_prefill_wait_seconds=MAX_WAIT, priority_step_seconds=PRIORITY_STEP
    )
    model, waiters = StepTimeModel(), list[Waiter]()
    for num_steps, prompt, priority, target, pause in arrivals:
        request_id = bench.submit(prompt, max_tokens=1, priority=priority, ttft_target_seconds=target)
        now = bench.clock.now
        waiters.append(Waiter(request_id, len(bench.new_by_id), now, prompt, priority, target, prompt, now))
        bench.clock.now += pause
        for _ in range(num_steps):
            _compare_step(bench, model, waiters)
    while waiters:
        _compare_step(bench, model, waiters)
    bench.assert_outputs_are_right()


def _compare_step(bench: Bench, model: StepTimeModel, waiters: list[Waiter]) -> None:
    now = bench.clock.now
    seconds_per_token = model.predict(StepShape(num_tokens=TOKENS)) / TOKENS
    expected = slow_step(waiters, now, seconds_per_token)
    num_plans = len(bench.runner.plans)
    report = bench.step()
    for plan in bench.runner.plans[num_plans:]:
        assert dict(prefills_of(plan)) == expected
        model.observe(plan.shape, report.step_seconds)
    for waiter in waiters:
        if waiter.request_id in expected:
            waiter.num_left -= expected[waiter.request_id]
            waiter.waits_since = bench.clock.now
    waiters[:] = [waiter for waiter in waiters if waiter.num_left > 0]


def first_prefill(bench: Bench) -> RequestId:
    bench.step()
    return prefills_of(bench.runner.plans[-1])[0][0]


def test_the_shortest_comes_first_while_nobody_is_late() -> None:
    bench = Bench(token_budget=16)
    bench.submit(100)
    short = bench.submit(10)
    assert first_prefill(bench) == short


def test_requests_of_like_size_come_in_order_of_arrival_and_one_is_half_computed_at_a_time() -> None:
    bench = Bench(token_budget=16, max_prefill_wait_seconds=0.02)
    requests = [bench.submit(length) for length in (120, 100, 110, 90)]
    begun = []
    while bench.engine.has_work:
        bench.step()
        begun += [request for request, _ in prefills_of(bench.runner.plans[-1])]
    assert sorted(set(begun), key=begun.index) == requests
    assert [request for request in begun if request in requests] == sorted(begun, key=requests.index)


def test_what_a_target_leaves_little_time_for_comes_before_what_is_shorter() -> None:
    bench = Bench(token_budget=16)
    urgent = bench.submit(100, ttft_target_seconds=0.1)
    bench.submit(10)
    assert first_prefill(bench) == urgent


def test_who_had_no_chunk_for_the_longest_wait_comes_first() -> None:
    bench = Bench(token_budget=16, max_prefill_wait_seconds=1.0)
    long = bench.submit(1000)
    bench.clock.now += 1.1
    bench.submit(10)
    assert first_prefill(bench) == long
    assert first_prefill(bench) != long, "one chunk is what the wait is about"


def test_a_better_priority_comes_first_and_waiting_lifts_a_worse_one_beside_it() -> None:
    bench = Bench(token_budget=16, priority_step_seconds=1.0, max_prefill_wait_seconds=100.0)
    worse = bench.submit(10, priority=1)
    better = bench.submit(16)
    assert first_prefill(bench) == better
    bench.clock.now += 1.1
    bench.submit(16)
    assert first_prefill(bench) == worse


def test_age_alone_decides_nothing_among_requests_of_one_priority() -> None:
    bench = Bench(token_budget=16, priority_step_seconds=1.0, max_prefill_wait_seconds=100.0)
    bench.submit(10_000)
    bench.step()
    bench.clock.now += 2.5
    short = bench.submit(10)
    assert first_prefill(bench) == short


def test_the_oldest_begun_prefill_has_a_quarter_of_every_step() -> None:
    bench = Bench(token_budget=64)
    long = bench.submit(6400)
    bench.step()
    for _ in range(40):
        bench.submit(30, max_tokens=1)
    bench.steps(20)
    assert bench.chunk_sizes_of(long)[1:] == [16] * 20
    bench.run()
    bench.assert_outputs_are_right()


def test_a_begun_prefill_takes_what_its_share_and_the_others_leave() -> None:
    bench = Bench(token_budget=64)
    long = bench.submit(640)
    bench.step()
    bench.submit(20, max_tokens=1)
    bench.step()
    assert bench.chunk_sizes_of(long) == [64, 44]


def test_a_waiting_request_of_better_priority_takes_the_place_of_one_that_runs() -> None:
    bench = Bench(max_num_seqs=2)
    low, mid = bench.submit(30, max_tokens=40, priority=2), bench.submit(5, max_tokens=40, priority=1)
    bench.steps(3)
    high = bench.submit(10, max_tokens=4)
    report = bench.step()
    assert report.num_preemptions == 1
    assert bench.output_of(high), "in the very step"
    assert len(bench.output_of(low)) == 3, "the worst priority goes"
    assert len(bench.output_of(mid)) == 4
    bench.run()
    bench.assert_outputs_are_right()
    assert (bench.num_restarts_of(low), bench.num_restarts_of(mid)) == (1, 0)


def test_nobody_is_preempted_for_a_request_that_cannot_run_even_so() -> None:
    bench = Bench(num_blocks=64, block_size=16)
    bench.submit(600, max_tokens=40)
    bench.submit(100, max_tokens=40, priority=1)
    bench.steps(12)
    bench.submit(800, max_tokens=4)
    bench.step()
    assert sum(report.num_preemptions for report in bench.reports) == 0


def test_no_more_are_preempted_for_a_better_priority_than_it_takes() -> None:
    bench = Bench(num_blocks=64, block_size=16, token_budget=512)
    small = bench.submit(60, max_tokens=60, priority=2)
    bench.submit(800, max_tokens=60, priority=1)
    bench.steps(4)
    bench.submit(500, max_tokens=4)
    bench.step()
    assert bench.runner.plans[-1].preempted_request_ids == (list(bench.new_by_id)[1],)
    assert len(bench.output_of(small)) == 4


def test_nobody_gives_way_to_a_request_whose_line_is_closed() -> None:
    bench = Bench(max_num_seqs=2, token_budget=16)
    low = bench.submit(5, max_tokens=60, priority=1)
    bench.step()
    first, second = bench.submit(100, max_tokens=30), bench.submit(100, max_tokens=30)
    while not bench.output_of(first):
        bench.step()
    assert sum(report.num_preemptions for report in bench.reports) == 0, "the second could not compute yet"
    bench.step()
    assert bench.runner.plans[-1].preempted_request_ids == (low,)
    assert bench.chunk_sizes_of(second)
    bench.run()
    bench.assert_outputs_are_right()


def test_an_aged_request_is_not_preempted_by_priority_and_two_never_take_turns() -> None:
    bench = Bench(max_num_seqs=1, priority_step_seconds=1.0)
    low = bench.submit(10, max_tokens=2000, priority=1)
    bench.step()
    bench.clock.now += 1.1
    bench.submit(10, max_tokens=4)
    bench.steps(5)
    assert len(bench.output_of(low)) == 6
    bench.run()
    assert sum(report.num_preemptions for report in bench.reports) == 0


def test_equal_priorities_displace_nobody() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit(10, max_tokens=20)
    bench.steps(2)
    bench.submit(10, max_tokens=4)
    bench.run()
    assert sum(report.num_preemptions for report in bench.reports) == 0


def test_who_is_evicted_for_memory_is_of_the_worst_priority_and_loses_least() -> None:
    bench = Bench(num_blocks=9, block_size=16, token_budget=256)
    oldest = bench.submit(15, max_tokens=60)
    longest = bench.submit(33, max_tokens=60)
    shortest = bench.submit(17, max_tokens=60)
    while not (evicted := [one for plan in bench.runner.plans for one in plan.preempted_request_ids]):
        bench.step()
    assert evicted[0] == shortest
    bench.run()
    bench.assert_outputs_are_right()
    assert bench.num_restarts_of(oldest) == 0, "it loses least of all, but the oldest is never evicted for another"
    assert bench.num_restarts_of(longest) <= 1


@pytest.mark.parametrize(("tbt_target", "passes"), [(10.0, True), (0.05, False)])
def test_a_preempted_stream_is_passed_only_until_its_token_is_late(tbt_target: float, *, passes: bool) -> None:
    bench = Bench(num_blocks=8, block_size=16, token_budget=64)
    bench.submit(40, max_tokens=60)
    stream = bench.submit(40, max_tokens=30, tbt_target_seconds=tbt_target)
    while not any(report.num_preemptions for report in bench.reports):
        bench.step()
    bench.steps(6)
    small = bench.submit(5)
    bench.step()
    assert bool(bench.output_of(small)) == passes
    bench.run()
    bench.assert_outputs_are_right()
    assert bench.num_restarts_of(stream) == 1
