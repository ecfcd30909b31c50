"""Leaving: not ready at once, new requests refused after the delay, running ones get their time."""

from __future__ import annotations

import asyncio

import pytest

from stallfree_shared.drain import Drain
from stallfree_shared.errors import DrainingError
from stallfree_shared.settings import DrainSettings


async def test_drain_waits_for_the_request_that_runs() -> None:
    drain = Drain()
    release = asyncio.Event()

    async def serve_one() -> None:
        with drain.request():
            await release.wait()

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_one())
        await asyncio.sleep(0)
        leaving = tasks.create_task(drain.run(DrainSettings()))
        await asyncio.sleep(0)
        assert drain.is_draining
        assert drain.in_flight == 1
        assert not drain.left.is_set()
        release.set()
        await leaving
    assert drain.left.is_set()
    assert drain.in_flight == 0


async def test_a_new_request_is_refused_once_the_delay_is_over() -> None:
    drain = Drain()
    with drain.request():
        pass
    await drain.run(DrainSettings())
    with pytest.raises(DrainingError) as refusal, drain.request():
        pass
    assert refusal.value.retry_after_seconds
    assert drain.in_flight == 0


async def test_a_new_request_is_taken_during_the_delay() -> None:
    drain = Drain()
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(drain.run(DrainSettings(drain_delay_seconds=0.2)))
        await asyncio.sleep(0)
        assert drain.is_draining
        with drain.request():
            assert drain.in_flight == 1


async def test_drain_ends_when_its_time_is_over() -> None:
    drain = Drain()
    async with asyncio.timeout(5):
        with drain.request():
            await drain.run(DrainSettings(drain_timeout_seconds=0.01))
    assert drain.left.is_set()


async def test_a_request_that_fails_is_counted_out() -> None:
    drain = Drain()
    with pytest.raises(ZeroDivisionError), drain.request():
        _ = 1 / 0
    assert drain.in_flight == 0
