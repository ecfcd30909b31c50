"""Clients that leave: nothing of them stays, on any part, whatever state they leave in."""

from __future__ import annotations

import asyncio
import random

import pytest

from stallfree_loadtest.measures import RequestTrace
from tests.support.clusters import router_samples, script, scripted_cluster, stream, wait_idle
from tests.support.samples import scrape

NUM_REQUESTS = 200
NUM_CANCELLED = 50


async def test_idle_invariant_after_a_load_of_200_requests_50_of_them_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool so small that requests wait, prefill in many chunks and are preempted: all states are left from."""
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.002")
    arguments = ("--token-budget=64", "--kv-cache-memory=1MiB", "--max-num-seqs=16")
    async with scripted_cluster(worker_args=arguments) as cluster:
        rng = random.Random(7)
        cancelled = set(rng.sample(range(NUM_REQUESTS), NUM_CANCELLED))

        async def serve_one(number: int) -> RequestTrace | None:
            text = f"{number:03} " + "waves and wind " * rng.choice((1, 4, 20))
            completion = stream(cluster, script(text), request_id=str(number))
            if number not in cancelled:
                trace = await completion.run()
                assert (trace.error, trace.text) == (None, text)
                return trace
            try:
                async with asyncio.timeout(rng.choice((0.001, 0.01, 0.05, 0.1, 0.2))):
                    return await completion.run()
            except TimeoutError:
                return None

        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(serve_one(number)) for number in range(NUM_REQUESTS)]
        traces = [task.result() for task in running]
        num_left = sum(trace is None for trace in traces)
        assert num_left >= NUM_CANCELLED // 2
        await wait_idle(cluster)

        samples = await router_samples(cluster)
        received = samples.total("stallfree_router_requests_total")
        assert NUM_REQUESTS - num_left <= received <= NUM_REQUESTS  # one that left before its body was read is none
        assert samples.total("stallfree_router_requests_total", outcome="stop") == NUM_REQUESTS - num_left
        assert samples.total("stallfree_router_requests_total", outcome="abort") == received - NUM_REQUESTS + num_left
        assert samples.total("stallfree_router_requests_total", outcome="error") == 0
        outcomes = [await scrape(worker.url) for worker in cluster.workers]
        assert sum(page.total("stallfree_worker_requests_total", outcome="stop") for page in outcomes) >= len(
            [trace for trace in traces if trace is not None]
        )
        trace = await stream(cluster, script("ABC")).run()
        assert trace.text == "ABC"
