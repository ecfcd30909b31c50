"""Discovery tells complete sets of addresses, and never fewer because a name server is away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Sequence

import pytest

from stallfree_router.discovery import UrlDiscovery
from stallfree_router.settings import DiscoverySettings

NAME = "dns+http://workers.models.svc:8000"


class _Names:
    """A name server whose answers are listed; the last one stays."""

    def __init__(self, *answers: Sequence[str] | OSError) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def resolve(self, host: str, port: int) -> frozenset[str]:
        self.asked.append((host, port))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return frozenset(answer)


def _watch(*urls: str, names: _Names) -> AsyncGenerator[frozenset[str], None]:
    settings = DiscoverySettings(worker_urls=urls, discovery_seconds=0.001)
    return UrlDiscovery(settings, resolve=names.resolve).watch()


@pytest.mark.parametrize("urls", [(), ("http://a:1",), ("http://a:1", "http://b:2", "http://a:1")])
async def test_plain_urls_are_told_whole_once_and_never_end(urls: tuple[str, ...]) -> None:
    names = _Names(())
    async with contextlib.aclosing(_watch(*urls, names=names)) as watch:
        assert await anext(watch) == frozenset(urls)
        following = asyncio.ensure_future(anext(watch))
        done, _ = await asyncio.wait((following,), timeout=0.01)
        assert not done
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    assert names.asked == []


async def test_a_name_is_every_address_it_has_and_is_looked_up_again() -> None:
    names = _Names(["10.0.0.1"], ["10.0.0.1"], ["10.0.0.1", "fd00::2"], ["fd00::2"])
    async with asyncio.timeout(5), contextlib.aclosing(_watch(NAME, "http://a:1", names=names)) as watch:
        assert await anext(watch) == {"http://a:1", "http://10.0.0.1:8000"}
        assert await anext(watch) == {"http://a:1", "http://10.0.0.1:8000", "http://[fd00::2]:8000"}
        assert await anext(watch) == {"http://a:1", "http://[fd00::2]:8000"}
    assert set(names.asked) == {("workers.models.svc", 8000)}


async def test_c12_a_failed_or_empty_look_up_keeps_the_last_known_workers() -> None:
    names = _Names(["10.0.0.1"], socket.gaierror("away"), [], socket.gaierror("away"), ["10.0.0.2"])
    async with asyncio.timeout(5), contextlib.aclosing(_watch(NAME, names=names)) as watch:
        assert await anext(watch) == {"http://10.0.0.1:8000"}
        assert await anext(watch) == {"http://10.0.0.2:8000"}


async def test_c45_a_name_that_does_not_resolve_yet_is_no_worker_and_no_error() -> None:
    names = _Names(socket.gaierror("not yet"), ["10.0.0.1"])
    async with asyncio.timeout(5), contextlib.aclosing(_watch(NAME, names=names)) as watch:
        assert await anext(watch) == frozenset()
        assert await anext(watch) == {"http://10.0.0.1:8000"}


async def test_the_systems_own_look_up_finds_this_machine() -> None:
    discovery = UrlDiscovery(DiscoverySettings(worker_urls=("dns+http://localhost:8000",)))
    async with asyncio.timeout(10), contextlib.aclosing(discovery.watch()) as watch:
        assert await anext(watch) & {"http://127.0.0.1:8000", "http://[::1]:8000"}


async def test_a_name_that_cannot_be_one_is_not_found_and_ends_nothing() -> None:
    urls = f"dns+http://{'a' * 64}.svc:8000", "http://a:1"
    discovery = UrlDiscovery(DiscoverySettings(worker_urls=urls))
    async with asyncio.timeout(10), contextlib.aclosing(discovery.watch()) as watch:
        assert await anext(watch) == {"http://a:1"}
