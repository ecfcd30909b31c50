"""What the policy's choices come to: workers of unequal speed, mixed prompts, stale statuses, bursts, two routers.

The workers here are a model of their own: steps of `base + per_token * tokens`, decodes first, then prefill chunks in
the order of arrival. Plain "fewest requests" and random are measured on the very same arrivals.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from stallfree_router.policy import Demand, WorkerView, pick
from stallfree_shared.load import Work, with_work
from stallfree_shared.worker_status import StepTimeCoefficients, WorkerStatus

STALE_SECONDS = 0.2
EXPECTED_OUTPUT_TOKENS = 70.0
NUM_ROUTERS = 2
TOKEN_BUDGET, MAX_NUM_SEQS = 512, 64


@dataclass(eq=False, slots=True, kw_only=True)
class _Request:
    arrived_at: float
    prompt_tokens: int
    prefill_left: int
    output_left: int
    ended_at: float = 0.0


@dataclass(eq=False, slots=True)
class _Worker:
    slowness: float
    now: float = 0.0
    waiting: list[_Request] = field(default_factory=list)
    running: list[_Request] = field(default_factory=list)

    def run_until(self, instant: float) -> None:
        while (self.waiting or self.running) and self.now < instant:
            self._step()
        self.now = max(self.now, instant) if instant != float("inf") else self.now

    def _step(self) -> None:
        budget = TOKEN_BUDGET - sum(request.prefill_left == 0 for request in self.running)
        decoding = [request for request in self.running if request.prefill_left == 0]
        while self.waiting and len(self.running) < MAX_NUM_SEQS:
            self.running.append(self.waiting.pop(0))
        num_tokens = len(decoding)
        for request in self.running:
            chunk = min(request.prefill_left, budget)
            if chunk > 0:
                budget, num_tokens = budget - chunk, num_tokens + chunk
                request.prefill_left -= chunk
                if request.prefill_left == 0:
                    decoding.append(request)
        self.now += self.slowness * (0.01 + 0.0001 * num_tokens)
        for request in decoding:
            request.output_left -= 1
            if request.output_left <= 0:
                request.ended_at = self.now
                self.running.remove(request)

    def status(self) -> WorkerStatus:
        requests = self.running + self.waiting
        return WorkerStatus(
            sequence=0,
            is_ready=True,
            is_draining=False,
            max_num_seqs=MAX_NUM_SEQS,
            token_budget_tokens=TOKEN_BUDGET,
            kv_total_tokens=10**6,
            kv_free_tokens=10**6,
            requests_running=len(self.running),
            requests_waiting=len(self.waiting),
            prefill_tokens_left=sum(request.prefill_left for request in requests),
            expected_output_tokens_left=int(EXPECTED_OUTPUT_TOKENS / 2) * len(requests),
            step_time=StepTimeCoefficients(base_seconds=0.01 * self.slowness, seconds_per_token=0.0001 * self.slowness),
        )


Choose = Callable[[Sequence[WorkerStatus], Demand, random.Random], int]


def _by_policy(statuses: Sequence[WorkerStatus], demand: Demand, rng: random.Random) -> int:
    views = [
        WorkerView(
            url=str(number),
            model=demand.model,
            max_model_len=10**6,
            status=status,
            is_allowed=True,
            is_full=False,
            age_seconds=100.0,
        )
        for number, status in enumerate(statuses)
    ]
    choice = pick(views, demand, tried=frozenset(), rng=rng)
    assert choice is not None
    return int(choice.url)


def _by_fewest_requests(statuses: Sequence[WorkerStatus], demand: Demand, rng: random.Random) -> int:
    loads = [(status.requests_running + status.requests_waiting, rng.random(), n) for n, status in enumerate(statuses)]
    return min(loads)[2]


def _at_random(statuses: Sequence[WorkerStatus], demand: Demand, rng: random.Random) -> int:
    return rng.randrange(len(statuses))


def _mean_seconds(choose: Choose, slownesses: Sequence[float], *, rate: float, burst: int) -> tuple[float, list[float]]:
    """Mean seconds of a request from arrival to end, and each worker's share of the prompt tokens."""
    rng, now, snapshot_at = random.Random(1), 0.0, 0.0
    workers = [_Worker(slowness) for slowness in slownesses]
    statuses = [worker.status() for worker in workers]
    sent: list[list[list[Work]]] = [[[] for _ in workers] for _ in range(NUM_ROUTERS)]
    requests, tokens = [], [0] * len(workers)
    for number in range(1500):
        now += rng.expovariate(rate / burst) if number % burst == 0 else 0.0
        if now >= snapshot_at + STALE_SECONDS:
            snapshot_at = now
            for worker in workers:
                worker.run_until(now)
            statuses = [worker.status() for worker in workers]
            sent = [[[] for _ in workers] for _ in range(NUM_ROUTERS)]
        prompt_tokens = rng.choice((50, 50, 50, 200, 200, 1500, 4000))
        request = _Request(
            arrived_at=now,
            prompt_tokens=prompt_tokens,
            prefill_left=prompt_tokens,
            output_left=max(1, int(rng.lognormvariate(4.0, 0.8))),
        )
        router = rng.randrange(NUM_ROUTERS)
        seen = [with_work(status, works) for status, works in zip(statuses, sent[router], strict=True)]
        demand = Demand(
            model="m", prompt_tokens=prompt_tokens, max_tokens=1000, expected_output_tokens=EXPECTED_OUTPUT_TOKENS
        )
        chosen = choose(seen, demand, rng)
        workers[chosen].run_until(now)
        workers[chosen].waiting.append(request)
        sent[router][chosen].append(demand.work)
        requests.append(request)
        tokens[chosen] += prompt_tokens
    for worker in workers:
        worker.run_until(float("inf"))
    seconds = statistics.fmean(request.ended_at - request.arrived_at for request in requests)
    return seconds, [each / sum(tokens) for each in tokens]


@pytest.mark.parametrize(
    ("slownesses", "rate", "burst", "limit_ratio"),
    [
        pytest.param((1, 1), 14, 1, 1.1, id="two alike"),
        pytest.param((1, 1, 1, 1), 28, 1, 1.1, id="four alike"),
        pytest.param((1, 2), 10, 1, 0.95, id="one twice as slow"),
        pytest.param((1, 4), 3, 1, 0.8, id="one far slower, light load"),
        pytest.param((1, 1, 3, 3), 18, 1, 0.9, id="two fast, two slow"),
        pytest.param((1, 1, 1, 1, 2, 2, 4, 4), 30, 40, 0.8, id="eight unlike, bursts of 40"),
    ],
)
def test_requests_end_as_soon_as_by_fewest_requests_sooner_where_speeds_differ_and_far_sooner_than_at_random(
    slownesses: tuple[float, ...], rate: float, burst: int, limit_ratio: float
) -> None:
    seconds, shares = _mean_seconds(_by_policy, slownesses, rate=rate, burst=burst)
    fewest, _ = _mean_seconds(_by_fewest_requests, slownesses, rate=rate, burst=burst)
    at_random, _ = _mean_seconds(_at_random, slownesses, rate=rate, burst=burst)
    assert seconds < limit_ratio * fewest
    assert seconds < 0.8 * at_random
    by_speed = {
        slowness: statistics.fmean(share for each, share in zip(slownesses, shares, strict=True) if each == slowness)
        for slowness in slownesses
    }
    assert list(by_speed.values()) == sorted(by_speed.values(), reverse=True), "a slower worker gets no more"
