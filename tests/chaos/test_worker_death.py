"""A worker is killed with -9, or its engine is. Real processes, a real router between them and the client."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from stallfree_loadtest.cluster import LocalCluster, Part
from tests.support.clusters import router_samples, script, scripted_cluster, stream, wait_idle
from tests.support.samples import scrape
from tests.support.waiting import wait_until

TEXT = "the lighthouse keeper counted the ships "


async def _status(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}/readyz")).status_code


async def _running(worker: Part) -> float:
    return (await scrape(worker.url)).total("stallfree_worker_requests_running")


async def _busiest(cluster: LocalCluster) -> Part:
    loads = [(await _running(worker), number) for number, worker in enumerate(cluster.workers)]
    return cluster.workers[max(loads)[1]]


async def test_a_worker_killed_before_the_first_token_is_replaced_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.2")
    async with scripted_cluster(worker_args=("--token-budget=16",)) as cluster:
        prompt = script(TEXT * 4)
        completion = stream(cluster, prompt, max_tokens=8)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(completion.run())
            await wait_until(lambda: _is_any_running(cluster), what="the prompt is being computed")
            assert completion.num_tokens == 0
            victim = await _busiest(cluster)
            cluster.kill(victim)
        trace = running.result()
        assert (trace.outcome, trace.error) == ("finished", None)
        assert trace.text == (TEXT * 4)[: len(trace.text)]
        assert trace.num_tokens == 8
        samples = await router_samples(cluster)
        assert samples.total("stallfree_router_attempts_total") == 2
        assert samples.total("stallfree_router_requests_total", outcome="length") == 1
        await wait_idle(cluster)


async def _is_any_running(cluster: LocalCluster) -> bool:
    return await _running(await _busiest(cluster)) > 0


async def test_c01_a_worker_killed_mid_stream_ends_its_streams_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.05")
    async with scripted_cluster() as cluster:
        completions = [stream(cluster, script(TEXT * 4), request_id=str(number)) for number in range(12)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(completion.run()) for completion in completions]
            await wait_until(lambda: all(completion.num_tokens > 2 for completion in completions))
            victim = await _busiest(cluster)
            num_on_victim = await _running(victim)
            cluster.kill(victim)
        traces = [task.result() for task in running]
        failed = [trace for trace in traces if trace.outcome == "error"]
        assert len(failed) == num_on_victim > 0
        for trace in failed:
            assert trace.error is not None
            assert trace.error.startswith("error event: worker_lost")
            assert trace.finish_reason is None
        for trace in traces:
            whole = TEXT * 4
            assert whole.startswith(trace.text)
            assert (trace.text == whole) == (trace.outcome == "finished")
        samples = await router_samples(cluster)
        assert samples.total("stallfree_router_requests_total", outcome="error") == len(failed)
        assert samples.total("stallfree_router_requests_total") == len(traces)
        await wait_idle(cluster)


async def test_c01_a_worker_that_freezes_mid_stream_ends_its_streams_within_the_silence_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.05")
    async with scripted_cluster(num_workers=1, router_args=("--silence-timeout-seconds=1",)) as cluster:
        completion = stream(cluster, script(TEXT * 4))
        (worker,) = cluster.workers
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(completion.run())
            await wait_until(lambda: completion.num_tokens > 2)
            cluster.kill(worker, signal.SIGSTOP)
        try:
            assert running.result().error is not None
            assert "error event: worker_timeout" in str(running.result().error)
        finally:
            cluster.kill(worker, signal.SIGCONT)


async def test_b33_a_killed_engine_process_turns_readiness_off_and_is_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.05")
    monkeypatch.setenv("SCRIPTED_LOAD_SECONDS", "1")
    async with scripted_cluster(num_workers=1) as cluster:
        (worker,) = cluster.workers
        engine_pid = worker.engine_pid
        assert engine_pid is not None
        completion = stream(cluster, script(TEXT * 4))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(completion.run())
            await wait_until(lambda: completion.num_tokens > 2)
            os.kill(engine_pid, signal.SIGKILL)
        assert "error event: worker_lost" in str(running.result().error)
        assert worker.is_running
        assert await _status(worker.url) == 503
        assert await _status(cluster.router_urls[0]) == 503
        await wait_until(lambda: _is_ready(cluster), timeout_seconds=30, what="worker and router are ready again")
        assert worker.engine_pid != engine_pid
        trace = await stream(cluster, script("ABCDEF")).run()
        assert (trace.text, trace.finish_reason) == ("ABCDEF", "stop")
        assert (await scrape(worker.url)).total("stallfree_worker_engine_restarts_total") == 1
        await wait_idle(cluster)


async def _is_ready(cluster: LocalCluster) -> bool:
    return await _status(cluster.workers[0].url) == 200 and await _status(cluster.router_urls[0]) == 200
