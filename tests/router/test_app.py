"""The router as it is started: wired to its real dispatching side, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import httpx
import pytest

from stallfree_router.app import create_app
from stallfree_router.settings import RouterSettings
from stallfree_shared.drain import Drain
from tests.support.waiting import wait_until


@contextlib.asynccontextmanager
async def router_process(*arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A `stallfree-router` on a free port, and its URL."""
    program = "from stallfree_router.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "--host", "127.0.0.1", "--port", "0", *arguments, stdout=PIPE, stderr=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            word, url = (await process.stdout.readline()).decode().split()
        assert word == "listening"
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_c45_the_router_starts_without_any_worker_and_says_so() -> None:
    app = create_app(RouterSettings(no_worker_timeout_seconds=0), drain=Drain(), give_up=pytest.fail)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://r") as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
        response = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_the_router_gives_up_when_what_runs_beside_its_routes_fails() -> None:
    broken = RouterSettings().model_copy(update={"worker_urls": ("dns+http://a-port-is-missing",)})
    given_up = asyncio.Event()
    app = create_app(broken, drain=Drain(), give_up=given_up.set)
    async with app.router.lifespan_context(app), asyncio.timeout(5):
        await given_up.wait()


async def test_the_event_loops_lag_is_measured_while_the_router_runs() -> None:
    async with router_process() as (_, url), httpx.AsyncClient(base_url=url) as client:

        async def has_sample() -> bool:
            lines = (await client.get("/metrics")).text.splitlines()
            return any(
                line.startswith("stallfree_router_event_loop_lag_seconds_count ") and not line.endswith(" 0.0")
                for line in lines
            )

        await wait_until(has_sample)


async def test_sigterm_ends_the_router_with_status_0() -> None:
    async with router_process() as (process, url):
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/livez")).status_code == 200
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
