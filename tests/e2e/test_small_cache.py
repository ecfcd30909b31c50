"""Cases of a cache that is too small for the load, through router and worker: 64 blocks of 16 tokens, budget 64."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from stallfree_loadtest.cluster import LocalCluster
from stallfree_loadtest.measures import RequestTrace
from tests.support.clusters import SCRIPTED, router_samples, script, scripted_cluster, stream, wait_idle
from tests.support.raw_http import RawConnection, request_bytes
from tests.support.samples import Samples, scrape
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/completions"
POOL_TOKENS = 1024
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192, 193)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def small() -> AsyncIterator[LocalCluster]:
    arguments = ("--max-model-len=2048", "--kv-cache-memory=1MiB", "--token-budget=64", "--max-num-seqs=8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SCRIPTED_STEP_SECONDS", "0.003")
        async with scripted_cluster(num_workers=1, worker_args=arguments) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(small: LocalCluster) -> AsyncIterator[LocalCluster]:
    yield small
    await wait_idle(small)


def text_of(length: int, *, seed: int = 0) -> str:
    """One token a character, and no two places alike."""
    return "".join(random.Random(seed * 1000 + length).choices("abcdefghijklmnopqrstuvwxyz", k=length))


async def run_all(cluster: LocalCluster, texts: list[str], *, max_tokens: int | None = None) -> list[RequestTrace]:
    calls = [
        stream(cluster, script(text), max_tokens=max_tokens, request_id=str(number))
        for number, text in enumerate(texts)
    ]
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(call.run() for call in calls)))


async def worker_samples(cluster: LocalCluster) -> Samples:
    return await scrape(cluster.workers[0].url)


async def test_b01_a_prompt_larger_than_the_cache_is_refused_at_once_and_ten_behind_it_are_served(
    cluster: LocalCluster,
) -> None:
    async with httpx.AsyncClient(base_url=cluster.router_urls[0], trust_env=False, timeout=5) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == POOL_TOKENS
        big = asyncio.create_task(client.post(PATH, json={"model": SCRIPTED, "prompt": "x" * 1500}))
        texts = [text_of(20, seed=number) for number in range(10)]
        traces = await run_all(cluster, texts)
        response = await big
    assert response.status_code == 400
    assert "1024" in response.json()["error"]["message"]
    assert "1500" in response.json()["error"]["message"]
    assert [(trace.error, trace.text) for trace in traces] == [(None, text) for text in texts]


async def test_b03_b05_three_times_more_than_the_cache_holds_is_served_whole_with_few_preemptions(
    cluster: LocalCluster,
) -> None:
    before = (await worker_samples(cluster)).total("stallfree_worker_preemptions_total")
    texts = [text_of(200, seed=number) for number in range(8)]
    traces = await run_all(cluster, texts)
    assert [(trace.error, trace.finish_reason, trace.text) for trace in traces] == [
        (None, "stop", text) for text in texts
    ]
    assert [trace.completion_tokens for trace in traces] == [201] * 8
    preemptions = (await worker_samples(cluster)).total("stallfree_worker_preemptions_total") - before
    assert 0 < preemptions <= 10 * len(texts)


async def test_d20_preempted_prompts_and_tokens_are_counted_once(cluster: LocalCluster) -> None:
    names = ("prompt_tokens_total", "generated_tokens_total")
    before = await router_samples(cluster), await worker_samples(cluster)
    await run_all(cluster, [text_of(200, seed=number) for number in range(8)])
    await wait_idle(cluster)
    after = await router_samples(cluster), await worker_samples(cluster)
    for service, old, new in zip(("router", "worker"), before, after, strict=True):
        counted = [
            new.total(f"stallfree_{service}_{name}") - old.total(f"stallfree_{service}_{name}") for name in names
        ]
        assert counted == [8 * 200, 8 * 201]


@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17])
async def test_b07_lengths_around_block_and_chunk_borders_side_by_side(cluster: LocalCluster, max_tokens: int) -> None:
    texts = [text_of(length) for length in LENGTHS]
    traces = await run_all(cluster, texts, max_tokens=max_tokens)
    assert [(trace.error, trace.text) for trace in traces] == [(None, text[:max_tokens]) for text in texts]


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02, 0.03])
async def test_b14_leaving_amid_a_chunked_prefill_frees_all_and_the_same_prompt_is_right_later(
    cluster: LocalCluster, seconds: float
) -> None:
    text = text_of(640)
    port = httpx.URL(cluster.router_urls[0]).port
    assert port is not None
    before = await worker_samples(cluster)
    for _ in range(10):
        async with RawConnection.open(port) as connection:
            fields = {"model": SCRIPTED, "prompt": text, "max_tokens": 300, "stream": True}
            await connection.send(request_bytes(PATH, fields))
            await connection.read_until(b"\r\n\r\n")
            await asyncio.sleep(seconds)  # the instant itself is the case
            await connection.close(with_reset=True)
    await wait_idle(cluster)
    ended = (await worker_samples(cluster)).total("stallfree_worker_requests_total", outcome="abort")
    assert ended - before.total("stallfree_worker_requests_total", outcome="abort") <= 10
    (trace,) = await run_all(cluster, [text], max_tokens=300)
    assert (trace.error, trace.text) == (None, text[:300])


async def test_d01_calls_that_leave_while_they_wait_or_run_are_counted_as_aborted(cluster: LocalCluster) -> None:
    """Two of 600 tokens do not fit together: the others wait in the engine's queue when they leave."""
    before = await router_samples(cluster)
    scripts = [script(text_of(600, seed=number)) for number in range(7)]
    calls = [stream(cluster, prompt, max_tokens=400, request_id=str(n)) for n, prompt in enumerate(scripts)]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(call.run()) for call in calls]
        await wait_until(lambda: _num_waiting(cluster, 6), what="all but one wait")
        await wait_until(lambda: any(call.num_tokens for call in calls))
        for task in running:
            task.cancel()
    await wait_idle(cluster)
    after = await router_samples(cluster)
    assert [
        after.total("stallfree_router_requests_total", outcome=outcome)
        - before.total("stallfree_router_requests_total", outcome=outcome)
        for outcome in ("abort", "stop", "length", "error", "rejected")
    ] == [7, 0, 0, 0, 0]


async def _num_waiting(cluster: LocalCluster, number: int) -> bool:
    return (await worker_samples(cluster)).total("stallfree_worker_requests_waiting") == number
