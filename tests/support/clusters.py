"""Whole clusters of real processes for tests, with a scripted model in the workers, and what must hold of them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.cluster import ClusterSettings, LocalCluster
from tests.support.samples import Samples, scrape
from tests.support.scripted import scripted_tokenizer
from tests.support.waiting import wait_until

SCRIPTED = "scripted"
SCRIPTED_WORKER = (sys.executable, "-m", "tests.support.scripted_worker")


@asynccontextmanager
async def scripted_cluster(
    *,
    num_workers: int = 2,
    num_routers: int = 1,
    worker_args: Sequence[str] = (),
    router_args: Sequence[str] = (),
    redis_url: str | None = None,
) -> AsyncIterator[LocalCluster]:
    """A store, routers and scripted workers, all ready."""
    settings = ClusterSettings(
        model=SCRIPTED,
        num_workers=num_workers,
        num_routers=num_routers,
        worker_args=tuple(worker_args),
        router_args=tuple(router_args),
        redis_url=redis_url,
        worker_command=SCRIPTED_WORKER,
        start_timeout_seconds=60.0,
    )
    async with LocalCluster(settings) as cluster:
        await wait_usable(cluster)
        yield cluster


def server(cluster: LocalCluster) -> Server:
    """The first router, as the load client wants it."""
    return Server(url=cluster.router_urls[0], model=SCRIPTED, silence_timeout_seconds=30.0)


def script(text: str) -> tuple[int, ...]:
    """The prompt that makes the scripted model answer `text`."""
    return tuple(scripted_tokenizer().encode(text).ids)


def stream(
    cluster: LocalCluster,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = None,
    request_id: str = "request",
    on_token: Callable[[], None] = lambda: None,
) -> CompletionStream:
    """A streamed completion of a script, EOS respected; `run` it."""
    request = CompletionRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        max_tokens=len(prompt) + 1 if max_tokens is None else max_tokens,
        ignores_eos=False,
    )
    return CompletionStream(server(cluster), request, on_token=on_token)


async def wait_usable(cluster: LocalCluster) -> None:
    """Every router uses every worker: it is ready with the first one."""
    for url in cluster.router_urls:
        await wait_until(partial(_uses_workers, url, len(cluster.workers)), what=f"{url} uses every worker")


async def _uses_workers(url: str, count: int) -> bool:
    return (await scrape(url)).total("stallfree_router_usable_workers") == count


async def wait_idle(cluster: LocalCluster) -> None:
    """The idle invariant: nothing runs or waits, all blocks are free, on every part that runs."""
    for worker in cluster.workers:
        if worker.is_running:
            await wait_until(partial(_is_worker_idle, worker.url), what=f"{worker.name} is idle")
    for url in cluster.router_urls:
        await wait_until(partial(_is_router_idle, url), what=f"the router at {url} is idle")


async def router_samples(cluster: LocalCluster) -> Samples:
    return await scrape(cluster.router_urls[0])


async def _is_worker_idle(url: str) -> bool:
    samples = await scrape(url)
    gauges = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "predicted_load_seconds")
    return samples.total("stallfree_worker_engine_up") == 1 and all(
        samples.total(f"stallfree_worker_{name}") == 0 for name in gauges
    )


async def _is_router_idle(url: str) -> bool:
    return (await scrape(url)).total("stallfree_router_in_flight_requests") == 0


__all__ = ["SCRIPTED", "router_samples", "script", "scripted_cluster", "server", "stream", "wait_idle", "wait_usable"]
