"""What is tried again, and what must not be: real workers fail before the first token, after it, and fifty later."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from stallfree_loadtest.cluster import LocalCluster
from tests.support.clusters import SCRIPTED, router_samples, script, scripted_cluster, stream, wait_idle
from tests.support.samples import scrape
from tests.support.scripted import RAISE
from tests.support.waiting import wait_until

TEXT = "the lighthouse keeper counted the ships and wrote all of their names down "
_ATTEMPTS = "stallfree_router_attempts_total"


def _failing_after(num_tokens: int) -> tuple[int, ...]:
    """A script whose engine fails in place of token number `num_tokens`."""
    tokens = script(TEXT)
    return (*tokens[:num_tokens], RAISE, *tokens[num_tokens:])


async def _all_engines_are_up(cluster: LocalCluster) -> bool:
    pages = [await scrape(worker.url) for worker in cluster.workers]
    usable = (await router_samples(cluster)).total("stallfree_router_usable_workers")
    return all(page.total("stallfree_worker_engine_up") == 1 for page in pages) and usable == len(pages)


@pytest.mark.parametrize("num_tokens", [1, 50])
async def test_c02_after_output_nothing_is_tried_again_and_no_text_comes_twice(num_tokens: int) -> None:
    async with scripted_cluster() as cluster, httpx.AsyncClient(trust_env=False, timeout=30) as client:
        await wait_until(lambda: _all_engines_are_up(cluster))
        trace = await stream(cluster, _failing_after(num_tokens)).run()
        assert (trace.outcome, trace.text, trace.finish_reason) == ("error", TEXT[:num_tokens], None)
        assert "error event: worker_lost" in str(trace.error)
        await wait_until(lambda: _all_engines_are_up(cluster), what="the engine is back")
        fields = {"model": SCRIPTED, "prompt": _failing_after(num_tokens), "max_tokens": 100}
        response = await client.post(f"{cluster.router_urls[0]}/v1/completions", json=fields)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")
        assert (await router_samples(cluster)).total(_ATTEMPTS) == 2  # one each
        await wait_idle(cluster)


async def test_c02_a_request_that_brings_two_engines_down_before_output_is_sent_to_no_third() -> None:
    async with scripted_cluster(num_workers=3) as cluster:
        await wait_until(lambda: _all_engines_are_up(cluster))
        async with asyncio.timeout(20):
            trace = await stream(cluster, _failing_after(0)).run()
        assert (trace.outcome, trace.text) == ("error", "")
        assert (await router_samples(cluster)).total(_ATTEMPTS) == 2
        restarts = [(await scrape(w.url)).total("stallfree_worker_engine_restarts_total") for w in cluster.workers]
        assert sorted(restarts) == [0, 1, 1]
        await wait_idle(cluster)
        assert (await stream(cluster, script(TEXT)).run()).text == TEXT


async def test_c01_c04_of_three_workers_one_is_killed_and_one_frozen_under_sixty_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What had output there ends with an error in time; all else, and whatever comes later, is served."""
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.03")
    async with scripted_cluster(num_workers=3, router_args=("--silence-timeout-seconds=1",)) as cluster:
        await wait_until(lambda: _all_engines_are_up(cluster))
        calls = [stream(cluster, script(TEXT * 2), request_id=str(number)) for number in range(60)]
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call.run()) for call in calls]
            await wait_until(lambda: all(call.num_tokens > 2 for call in calls))
            cluster.kill(cluster.workers[0])
            cluster.kill(cluster.workers[1], signal.SIGSTOP)
            try:
                later = await asyncio.gather(*(stream(cluster, script("hello")).run() for _ in range(20)))
                await asyncio.wait(running)
            finally:
                cluster.kill(cluster.workers[1], signal.SIGCONT)
        assert {(trace.outcome, trace.text) for trace in later} == {("finished", "hello")}
        traces = [task.result() for task in running]
        codes = {str(trace.error).split(":")[1].strip() for trace in traces if trace.outcome == "error"}
        assert codes == {"worker_lost", "worker_timeout"}
        for trace in traces:
            assert (trace.outcome, trace.text == TEXT * 2) in (("finished", True), ("error", False))
            assert (TEXT * 2).startswith(trace.text)
            assert (trace.finish_reason is None) == (trace.outcome == "error")
        await wait_idle(cluster)
