"""What the queue promises under load: bounds on every wait, and that long and short prompts let each other live.

The loads run in the real engine on a virtual clock; what is promised is judged from the plans and the events alone.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import StepPlan, StepReport
from stallfree_worker.settings import SchedulerSettings
from tests.worker.engine.bench import Bench
from tests.worker.engine.test_tbt_target import Load, settings_for

MAX_WAIT = 0.5
PRIORITY_STEP = 2.0
NUM_STEPS = 12_000


@dataclass(slots=True)
class Promises:
    """Follows a load from outside, and checks every step against what is promised."""

    bench: Bench
    submitted_at: dict[RequestId, float] = field(default_factory=dict)
    last_chunk_at: dict[RequestId, float] = field(default_factory=dict)
    """Of requests that have begun and not drawn a token yet."""
    preempted: set[RequestId] = field(default_factory=set)
    decoding: set[RequestId] = field(default_factory=set)
    longest_step: float = 0.0
    longest_wait: float = 0.0
    num_overdue: int = 0

    def step(self) -> None:
        now, num_plans = self.bench.clock.now, len(self.bench.runner.plans)
        report = self.bench.step()
        for plan in self.bench.runner.plans[num_plans:]:
            self.longest_step = max(self.longest_step, report.step_seconds)
            self._check_decodes(plan)
            self._check_passing(plan, now)
            self._take(plan, report)
        self._check_waits()

    def _check_decodes(self, plan: StepPlan) -> None:
        missing = self.decoding - {chunk.request_id for chunk in plan.chunks}
        assert missing <= set(plan.preempted_request_ids), "a decode went without a token though it kept its blocks"

    def _check_passing(self, plan: StepPlan, now: float) -> None:
        """Nobody is admitted past the longest waiting request of its priority or a better one, once that is overdue."""
        admitted = {chunk.request_id for chunk in plan.chunks} & self.submitted_at.keys()
        left = [request_id for request_id in self._firsts() if request_id not in admitted]
        overdue = [request_id for request_id in left if now - self.submitted_at[request_id] > MAX_WAIT]
        self.num_overdue += len(overdue)
        for request_id in overdue:
            later = [other for other in admitted if self.submitted_at[other] > self.submitted_at[request_id]]
            assert all(self._priority(other) < self._priority(request_id) for other in later), "it was passed"

    def _check_waits(self) -> None:
        for request_id, since in self.last_chunk_at.items():
            wait = self.bench.clock.now - since
            self.longest_wait = max(self.longest_wait, wait)
            ageing = PRIORITY_STEP * (self._priority(request_id) + 1)
            assert wait <= max(MAX_WAIT, ageing) + (len(self.last_chunk_at) + 1) * self.longest_step

    def _firsts(self) -> Iterator[RequestId]:
        """Of those that wait for their first chunk, the first of each line of which nobody has begun."""
        lines = {self._line(request_id) for request_id in self.last_chunk_at.keys() | self.preempted}
        for request_id in self.submitted_at:  # in order of arrival
            if (line := self._line(request_id)) not in lines:
                lines.add(line)
                yield request_id

    def _take(self, plan: StepPlan, report: StepReport) -> None:
        for chunk in plan.chunks:
            self.submitted_at.pop(chunk.request_id, None)
            self.last_chunk_at[chunk.request_id] = self.bench.clock.now
            self.preempted.discard(chunk.request_id)
        for event in report.events:
            self.last_chunk_at.pop(event.request_id)
        self.decoding = {event.request_id for event in report.events if event.finish_reason is None}
        for request_id in plan.preempted_request_ids:
            self.last_chunk_at.pop(request_id, None)
            self.preempted.add(request_id)

    def _line(self, request_id: RequestId) -> tuple[int, int]:
        num_prompt_tokens = len(self.bench.new_by_id[request_id].prompt_token_ids)
        return self._priority(request_id), (num_prompt_tokens + len(self.bench.events_by_id[request_id])).bit_length()

    def _priority(self, request_id: RequestId) -> int:
        return self.bench.new_by_id[request_id].priority

    def submit(self, prompt: int, *, max_tokens: int, priority: int) -> None:
        request_id = self.bench.submit(prompt, max_tokens=max_tokens, priority=priority)
        self.submitted_at[request_id] = self.bench.clock.now


@pytest.mark.parametrize("num_priorities", [1, 2])
def test_the_two_sided_bound_holds_over_random_loads(num_priorities: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Every decode gets a token in every step, unless it is preempted for memory. A prefill that has begun never goes
    longer without a chunk than the setting, and a step for each other one, beyond what better priorities may take. A
    request that is overdue and the first of its line is passed by nobody later of its priority."""
    num_steps, num_overdue, longest_wait, seed = 0, 0, 0.0, 0
    while num_steps < NUM_STEPS // 2:
        seed += 1
        rng = random.Random(seed)
        bench = Bench(
            num_blocks=rng.choice([150, 600]),
            token_budget=rng.choice([40, 64, 200]),
            max_num_seqs=rng.choice([8, 32]),
            max_prefill_wait_seconds=MAX_WAIT,
            priority_step_seconds=PRIORITY_STEP,
            has_prefix_cache=False,
        )
        load = Promises(bench)
        rate = rng.choice([0.05, 0.2, 0.4])  # the last is more than the machine can serve
        for _ in range(400):
            if rng.random() < rate:
                prompt = rng.choice([5, 20, 60, 150, 400, 1500])
                load.submit(prompt, max_tokens=rng.randint(1, 30), priority=rng.randrange(num_priorities))
            load.step()
        while bench.engine.has_work:
            load.step()
        bench.assert_outputs_are_right()
        num_steps += len(bench.runner.plans)
        num_overdue += load.num_overdue
        longest_wait = max(longest_wait, load.longest_wait)
    assert num_overdue > 100, "the loads were too light to show anything"
    with capsys.disabled():
        sys.stdout.write(
            f"\n{num_priorities} priorities: {seed} loads, {num_steps} steps, a begun prefill waited at most "
            f"{longest_wait:.2f} s, {num_overdue} times an overdue request had to wait on\n"
        )


@dataclass
class Mix(Load):
    """A long prompt among short ones."""

    ttft_by_id: dict[RequestId, float] = field(default_factory=dict)
    short_tokens_amid_long: int = 0
    decodes_amid_long: list[int] = field(default_factory=list)

    def run(self, *, num_shorts: int, every_seconds: float, num_long_tokens: int, num_streams: int = 0) -> None:
        rng = random.Random(30)
        for _ in range(num_streams):
            self.submit(512, max_tokens=50_000)
        while self.engine.status().prefill_tokens_left:
            self.engine.step()
        if num_long_tokens:
            self.submit(num_long_tokens, request_id=RequestId("long"), max_tokens=1)
        arrivals = [self.runner.now]
        for _ in range(num_shorts):
            arrivals.append(arrivals[-1] + rng.expovariate(1 / every_seconds))
        sizes = [rng.randint(50, 400) for _ in range(num_shorts)]
        for number, (at, size) in enumerate(zip(arrivals[1:], sizes, strict=True)):
            self._serve_until(at)
            self.submit(size, request_id=RequestId(f"short {number}"), max_tokens=20)
        while len(self.ttft_by_id) < num_shorts + bool(num_long_tokens):
            self._serve()

    def _serve_until(self, instant: float) -> None:
        while self.runner.now < instant:
            if self.engine.has_work:
                self._serve()
            else:
                self.runner.now = instant

    def _serve(self) -> None:
        report = self.engine.step()
        if RequestId("long") not in self.ttft_by_id and report.record is not None:
            chunks = zip(report.record.request_ids, report.record.chunk_tokens, strict=True)
            tokens = [num_tokens for request_id, num_tokens in chunks if request_id != "long"]
            self.short_tokens_amid_long += sum(tokens) - report.num_decode_tokens
            self.decodes_amid_long.append(report.num_decode_tokens)
        for event in report.events:
            if event.time_to_first_token_seconds is not None:
                self.ttft_by_id[event.request_id] = event.time_to_first_token_seconds

    @property
    def long_seconds(self) -> float:
        return self.ttft_by_id[RequestId("long")]

    @property
    def short_seconds(self) -> list[float]:
        return sorted(seconds for request_id, seconds in self.ttft_by_id.items() if request_id != "long")


@pytest.mark.parametrize("every_seconds", [0.5, 1.0])
def test_a_very_long_prompt_among_short_ones_delays_none_beyond_its_target_and_ends_in_time(
    every_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The long one alone at the same share: alone beside as many decodes as the short ones had on average, and with the
    part of the prefill tokens that was left to it."""
    mixed, shorts, alone = Mix(settings_for(0.2)), Mix(settings_for(0.2)), Mix(settings_for(0.2))
    mixed.run(num_shorts=100, every_seconds=every_seconds, num_long_tokens=30_000)
    shorts.run(num_shorts=100, every_seconds=every_seconds, num_long_tokens=0)
    num_streams = round(statistics.fmean(mixed.decodes_amid_long))
    alone.run(num_shorts=0, every_seconds=1.0, num_long_tokens=30_000, num_streams=num_streams)
    share = 30_000 / (30_000 + mixed.short_tokens_amid_long)
    same_share_seconds = alone.long_seconds / share
    with capsys.disabled():
        sys.stdout.write(
            f"\na short prompt every {every_seconds} s: TTFT of the short ones at most {mixed.short_seconds[-1]:.2f} s "
            f"(without the long one {shorts.short_seconds[-1]:.2f} s); the long one took {mixed.long_seconds:.1f} s, "
            f"alone at the same share ({share:.0%}, {num_streams} streams) {same_share_seconds:.1f} s\n"
        )
    assert mixed.short_seconds[-1] <= mixed.settings.ttft_target_seconds
    assert mixed.long_seconds <= 1.3 * same_share_seconds


def test_b19_a_long_prompt_is_admitted_in_time_while_short_ones_overload_the_machine() -> None:
    """120 % of what the machine can serve, in short prompts, for five minutes."""
    settings = SchedulerSettings(max_waiting_requests=10_000)
    load = Load(settings, noise=0.02)
    started_at = load.runner.now
    for _ in range(100):
        load.submit(200, max_tokens=1)
    while load.engine.has_work:
        load.engine.step()
    seconds_between = (load.runner.now - started_at) / 100 / 1.2
    rng, next_at, started_at = random.Random(19), load.runner.now, load.runner.now
    long_at: list[float] = []
    submitted_at = 0.0
    while load.runner.now < started_at + 300:
        if not load.engine.has_work:
            load.runner.now = max(load.runner.now, next_at)
        while next_at <= load.runner.now:
            load.submit(200, max_tokens=1)
            next_at += rng.expovariate(1 / seconds_between)
        if submitted_at == 0 and load.runner.now > started_at + 20:
            submitted_at = load.runner.now
            load.submit(30_000, request_id=RequestId("long"), max_tokens=1)
        begins_at = load.runner.now
        record = load.engine.step().record
        if record is not None and RequestId("long") in record.request_ids:
            long_at.append(begins_at)
    assert load.engine.status().requests_waiting > 100, "the machine was not overloaded"
    assert load.engine.status().longest_prefill_wait_seconds > 20
    longest_step = settings.max_step_seconds * 1.2
    assert long_at[0] - submitted_at <= settings.max_prefill_wait_seconds + longest_step
    gaps = [after - before for before, after in itertools.pairwise(long_at)]
    assert max(gaps) <= settings.max_prefill_wait_seconds + longest_step
    assert statistics.median(gaps) <= longest_step, "the oldest has its share of every step"


def test_the_longest_waits_are_told_of_those_that_are_here() -> None:
    bench = Bench(token_budget=16, max_num_seqs=1)
    bench.submit(100, max_tokens=3)
    bench.step()
    bench.clock.now += 2
    first_wait = bench.engine.status()
    assert first_wait.longest_decode_wait_seconds == 0
    assert first_wait.longest_prefill_wait_seconds == pytest.approx(2)
    bench.submit(100)
    bench.clock.now += 1
    assert bench.engine.status().longest_prefill_wait_seconds == pytest.approx(3)
    bench.steps(7)
    status = bench.engine.status()
    assert (status.longest_decode_wait_seconds, status.requests_running) == (0, 1)
    assert status.longest_prefill_wait_seconds > 1, "the second has waited since its submission"
    bench.clock.now += 4
    assert bench.engine.status().longest_decode_wait_seconds == pytest.approx(4)
    bench.run()
    idle = bench.engine.status()
    assert (idle.longest_decode_wait_seconds, idle.longest_prefill_wait_seconds) == (0, 0)
