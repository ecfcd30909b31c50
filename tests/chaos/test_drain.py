"""A pod is told to go (SIGTERM): no running stream ends early, and no call is left without an answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

import httpx
import pytest

from stallfree_loadtest.cluster import LocalCluster, Part
from tests.support.clusters import SCRIPTED, script, scripted_cluster, stream, wait_idle
from tests.support.samples import scrape
from tests.support.waiting import wait_until

T = TypeVar("T")

TEXT = "the lighthouse keeper counted the ships and wrote all of their names down "
NUM_STREAMS = 8
DELAY = "--drain-delay-seconds=0.3"


async def _readiness(url: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}/readyz")).status_code


async def _call_again_and_again(url: str) -> list[httpx.Response]:
    """Calls on one kept connection, until nobody listens any more. Then a new connection finds nobody, or is reset
    while it waits to be accepted; one that had been answered before never is, for the last answer closed it."""
    responses = []
    fields = {"model": SCRIPTED, "prompt": "hi", "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, trust_env=False, limits=httpx.Limits(max_connections=1)) as client:
        while True:
            try:
                responses.append(await client.post("/v1/completions", json=fields))
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                return responses


async def _leave_amid_streams(cluster: LocalCluster, part: Part, meanwhile: Coroutine[None, None, T]) -> T:
    """Ends a part by SIGTERM amid streams, which must not notice. Gives what `meanwhile` gave, done since then."""
    calls = [stream(cluster, script(TEXT), request_id=str(number)) for number in range(NUM_STREAMS)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(call.run()) for call in calls]
        await wait_until(lambda: all(call.num_tokens > 2 for call in calls))
        cluster.kill(part, signal.SIGTERM)
        other = tasks.create_task(meanwhile)
        await wait_until(lambda: _is_unready(part.url), what="readiness is off")
        assert not any(task.done() for task in running)
        assert await part.wait_ended() == 0
    traces = [task.result() for task in running]
    assert [(trace.error, trace.text) for trace in traces] == [(None, TEXT)] * NUM_STREAMS
    return other.result()


async def _is_unready(url: str) -> bool:
    return await _readiness(url) == 503


async def _has_empty_cache(worker: Part) -> bool:
    return (await scrape(worker.url)).total("stallfree_worker_kv_cache_usage_ratio") == 0


async def test_c18_c20_a_router_that_leaves_ends_its_streams_whole_and_answers_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.02")
    async with scripted_cluster(num_workers=1, router_args=(DELAY,)) as cluster:
        (router,), (worker,) = cluster.routers, cluster.workers
        responses = await _leave_amid_streams(cluster, router, _call_again_and_again(router.url))
        await wait_until(lambda: _has_empty_cache(worker), what="the worker is idle")
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 503}
    assert statuses == sorted(statuses)  # taken for a while yet, then refused
    assert responses[-1].headers["connection"] == "close"
    for response in responses:
        if response.status_code == 503:
            assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
            assert response.json()["error"]["code"] == "draining"


async def test_c18_a_worker_that_leaves_ends_its_streams_whole_and_the_other_takes_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.02")
    async with scripted_cluster(worker_args=(DELAY,)) as cluster:
        trace = await _leave_amid_streams(cluster, cluster.workers[0], stream(cluster, script("meanwhile")).run())
        assert (trace.error, trace.text) == (None, "meanwhile")
        await wait_idle(cluster)
        assert await _readiness(cluster.router_urls[0]) == 200


async def test_c18_a_stream_that_outlasts_the_routers_drain_ends_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.2")
    async with scripted_cluster(num_workers=1, router_args=("--drain-timeout-seconds=0.5",)) as cluster:
        (router,), (worker,) = cluster.routers, cluster.workers
        call = stream(cluster, script(TEXT))
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(call.run())
            await wait_until(lambda: call.num_tokens > 1)
            cluster.kill(router, signal.SIGTERM)
            assert await router.wait_ended() == 0
        assert "error event: worker_lost" in str(running.result().error)
        assert TEXT.startswith(running.result().text)
        await wait_until(lambda: _has_empty_cache(worker), what="the worker is idle")
