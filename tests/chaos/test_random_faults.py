"""Workers are killed, frozen and woken in random order under a steady stream of short requests to two routers.

Whatever happens, a request ends within the bounds that the routers' settings give, as a whole answer or with an error
that says so; afterwards nothing is left of any request, in memory, in Redis or on /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.cluster import LocalCluster, Part
from stallfree_loadtest.measures import RequestTrace
from tests.support.clusters import SCRIPTED, script, scripted_cluster, wait_idle
from tests.support.samples import scrape
from tests.support.waiting import wait_until

TEXT = "the lighthouse keeper counted the ships "
NUM_WORKERS = 3
NUM_ATTEMPTS = 3
NO_WORKER_SECONDS, SUBMIT_SECONDS, SILENCE_SECONDS = 2.0, 2.0, 1.0
ROUTER_ARGS = (
    f"--no-worker-timeout-seconds={NO_WORKER_SECONDS}",
    f"--submit-timeout-seconds={SUBMIT_SECONDS}",
    f"--silence-timeout-seconds={SILENCE_SECONDS}",
    f"--max-attempts={NUM_ATTEMPTS}",
    "--record-ttl-seconds=600",
)
ANSWER_SECONDS = 1.0
SLACK_SECONDS = 3.0
"""For a machine that is busy with starting the killed workers."""
LONGEST_REQUEST_SECONDS = (
    NUM_ATTEMPTS * (NO_WORKER_SECONDS + max(SUBMIT_SECONDS, SILENCE_SECONDS * 7 / 6)) + ANSWER_SECONDS + SLACK_SECONDS
)
CLEAN_ERRORS = (
    "error event: worker_lost", "error event: worker_timeout", "HTTP 429", "HTTP 502", "HTTP 503", "HTTP 504",
)  # fmt: skip


class Faults:
    """One fault after another, each undone before its worker's next one."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self.done: list[str] = []

    async def bring(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in self._cluster.workers:
                tasks.create_task(self._torment(worker, time.monotonic() + seconds))

    async def _torment(self, worker: Part, until: float) -> None:
        while True:
            pause_seconds = self._rng.uniform(0.5, 4.0)
            if time.monotonic() + pause_seconds >= until:
                return
            await asyncio.sleep(pause_seconds)
            fault = self._rng.choice(("kill", "freeze", "freeze", "kill_engine"))
            self.done.append(f"{worker.name} {fault}")
            await self._bring(worker, fault)

    async def _bring(self, worker: Part, fault: str) -> None:
        if fault == "kill":
            engine_pid = worker.engine_pid
            self._cluster.kill(worker)
            if engine_pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine_pid, signal.SIGKILL)
            await worker.wait_ended()
            await self._cluster.start(worker)
        elif fault == "freeze":
            self._cluster.kill(worker, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._rng.uniform(0.2, 4.0))
            finally:
                self._cluster.kill(worker, signal.SIGCONT)
        elif (engine_pid := worker.engine_pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine_pid, signal.SIGKILL)


async def _requests(
    cluster: LocalCluster, seconds: float, *, interval_seconds: float, rng: random.Random
) -> list[RequestTrace]:
    """A request every interval, to each router in turn; the traces of all once all have ended."""
    until, running = time.monotonic() + seconds, []
    async with asyncio.TaskGroup() as tasks:
        for number, url in enumerate(itertools.cycle(cluster.router_urls)):
            if time.monotonic() >= until:
                break
            text = TEXT * rng.choice((1, 1, 1, 4))
            stream = CompletionStream(
                Server(url=url, model=SCRIPTED, silence_timeout_seconds=LONGEST_REQUEST_SECONDS),
                CompletionRequest(
                    request_id=str(number), prompt=script(text), max_tokens=rng.randint(1, 20), ignores_eos=False
                ),
            )
            running.append(tasks.create_task(stream.run()))
            await asyncio.sleep(interval_seconds)
    return [task.result() for task in running]


def _check(traces: Sequence[RequestTrace]) -> None:
    for trace in traces:
        assert trace.ended_at - trace.sent_at <= LONGEST_REQUEST_SECONDS, trace
        assert (TEXT * 4).startswith(trace.text), trace
        if trace.outcome == "finished":
            assert trace.finish_reason is not None, trace
            assert trace.num_tokens == trace.completion_tokens, trace
        else:
            assert trace.error is not None, trace
            assert trace.error.startswith(CLEAN_ERRORS), trace.error


async def _check_records(url: str, *, num_requests: int) -> None:
    async with Redis.from_url(url, decode_responses=True) as redis:

        async def have_all_ended() -> bool:
            keys = [key for key in map(str, await redis.keys("*")) if not key.endswith(":tokens")]
            states = [await redis.hget(key, "state") for key in keys]
            return len(keys) == num_requests and set(states) <= {"finished", "failed", "cancelled"}

        await wait_until(have_all_ended, what="every record has an end")
        assert all([await redis.ttl(key) > 0 for key in await redis.keys("*")])


async def _is_whole(cluster: LocalCluster) -> bool:
    counts = [(await scrape(url)).total("stallfree_router_usable_workers") for url in cluster.router_urls]
    return counts == [NUM_WORKERS] * len(counts)


async def _run(seconds: float, *, seed: int, interval_seconds: float) -> tuple[list[RequestTrace], list[str]]:
    async with scripted_cluster(
        num_workers=NUM_WORKERS, num_routers=2, router_args=ROUTER_ARGS, worker_args=("--max-engine-restarts=1000",)
    ) as cluster:
        await wait_until(lambda: _is_whole(cluster), what="all workers are usable")
        faults = Faults(cluster, random.Random(seed))
        async with asyncio.TaskGroup() as tasks:
            requests = tasks.create_task(
                _requests(cluster, seconds, interval_seconds=interval_seconds, rng=random.Random(seed))
            )
            tasks.create_task(faults.bring(seconds))
        traces = requests.result()
        _check(traces)
        await wait_until(lambda: _is_whole(cluster), 40, what="all workers are usable again")
        await wait_idle(cluster)
        pages = [await scrape(url) for url in cluster.router_urls]
        assert sum(page.total("stallfree_router_requests_total") for page in pages) == len(traces)
        await _check_records(cluster.store_url, num_requests=len(traces))
        return traces, faults.done


@pytest.mark.parametrize(("seconds", "seed"), [(6.0, 1), pytest.param(120.0, 7, marks=pytest.mark.slow)])
async def test_random_faults_hang_lose_and_leak_no_request(
    seconds: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.02")
    traces, faults = await _run(seconds, seed=seed, interval_seconds=0.08)
    longest_seconds = max(trace.ended_at - trace.sent_at for trace in traces)
    outcomes = Counter((trace.error or trace.outcome)[:50] for trace in traces)
    print(f"{len(faults)} faults, {len(traces)} requests, {longest_seconds:.2f} s the longest: {outcomes}")  # noqa: T201
    assert faults
    assert any(trace.outcome == "finished" for trace in traces)
