"""Requests that run beside a scenario, against a scripted server."""

from __future__ import annotations

import asyncio

import pytest

from stallfree_loadtest.client import CompletionRequest, Server
from stallfree_loadtest.live import LiveRequests, RequestFailedError
from tests.loadtest.scripted_server import END, HEAD, Connection, serving, token_event


def request(name: str) -> CompletionRequest:
    return CompletionRequest(request_id=name, prompt=(1, 2), max_tokens=5)


async def one_token_and_silence(connection: Connection) -> None:
    await connection.send(HEAD)
    await connection.send_events(token_event("x", 7))
    await asyncio.Event().wait()


async def one_token_and_the_end(connection: Connection) -> None:
    await connection.send(HEAD)
    await connection.send_events(token_event("x", 7), "[DONE]")
    await connection.send(END)


async def one_token_and_an_error(connection: Connection) -> None:
    await connection.send(HEAD)
    await connection.send_events(token_event("x", 7), {"error": {"code": "worker_lost", "message": "it is gone"}})


async def test_what_still_runs_at_the_end_of_the_block_is_dropped() -> None:
    async with serving(one_token_and_silence) as url, asyncio.timeout(10):
        async with LiveRequests(Server(url=url, model="m")) as live:
            streams = [live.start(request(name), must_last=True) for name in "ab"]
            await live.until(lambda: all(stream.num_tokens == 1 for stream in streams))
            assert not live.has_ended(streams[0])
        assert [stream.trace().outcome for stream in streams] == ["dropped", "dropped"]


async def test_a_dropped_request_is_no_failure_even_if_it_had_to_last() -> None:
    async with (
        serving(one_token_and_silence) as url,
        asyncio.timeout(10),
        LiveRequests(Server(url=url, model="m")) as live,
    ):
        stream = live.start(request("a"), must_last=True)
        await live.until(lambda: stream.num_tokens == 1)
        await live.drop(stream)
        live.check()
        assert live.has_ended(stream)


async def test_an_end_is_a_failure_only_for_a_request_that_must_last() -> None:
    async with (
        serving(one_token_and_the_end) as url,
        asyncio.timeout(10),
        LiveRequests(Server(url=url, model="m")) as live,
    ):
        short = live.start(request("short"))
        await live.until(lambda: live.has_ended(short))
        live.start(request("lasting"), must_last=True)
        with pytest.raises(RequestFailedError, match="lasting ended after 1 tokens, too early"):
            await live.until(lambda: False)


async def test_a_failed_request_ends_every_wait_with_its_reason() -> None:
    async with (
        serving(one_token_and_an_error) as url,
        asyncio.timeout(10),
        LiveRequests(Server(url=url, model="m")) as live,
    ):
        live.start(request("a"))
        waits = [live.until(lambda: False) for _ in range(2)]
        found = await asyncio.gather(*waits, return_exceptions=True)
    assert [str(error) for error in found] == ["a failed after 1 tokens: error event: worker_lost: it is gone"] * 2
    assert all(isinstance(error, RequestFailedError) for error in found)
