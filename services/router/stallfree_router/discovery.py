"""Who the workers are. Level-triggered: every item is the complete set of addresses, so a missed change heals with
the next one (C12). Knows addresses only; whether a worker there lives is `workers`' business, which reads this."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol
from urllib.parse import urlsplit

from stallfree_router.settings import DNS_SCHEME, DiscoverySettings

LOOKUP_TIMEOUT_SECONDS = 5.0

_logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""(host name, port) → all its addresses. Raises OSError where the name cannot be looked up."""


class Discovery(Protocol):
    def watch(self) -> AsyncGenerator[frozenset[str], None]:
        """Complete sets of workers' base URLs, the present one first. Ends only when it is closed."""
        ...


async def resolve_by_system(host: str, port: int) -> frozenset[str]:
    """Looks a name up as the system does, off the event loop."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(str(address[0]) for *_, address in found)


class UrlDiscovery:
    """The workers behind the URLs of the settings. A plain URL is one worker, for ever. A `dns+http://` URL is every
    address of its name, such as the pods of a headless Service, looked up every `discovery_seconds`.

    A look-up that fails, or finds nothing, changes nothing: a name server that is away must not empty the router, and
    a worker that has gone is noticed by the silence of its frames.
    """

    def __init__(self, settings: DiscoverySettings, *, resolve: Resolve = resolve_by_system) -> None:
        self._settings = settings
        self._resolve = resolve
        self._plain = frozenset(url for url in settings.worker_urls if not url.startswith(f"{DNS_SCHEME}://"))
        self._found: dict[str, frozenset[str]] = {}
        self._named = tuple(url for url in settings.worker_urls if url not in self._plain)
        self._failing: set[str] = set()

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        told: frozenset[str] | None = None
        while True:
            for url in self._named:
                await self._look_up(url)
            urls = self._plain.union(*self._found.values())
            if urls != told:
                told = urls
                yield urls
            if not self._named:
                await asyncio.Event().wait()
            await asyncio.sleep(self._settings.discovery_seconds)

    async def _look_up(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise AssertionError(f"the settings let {url!r} through")
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_SECONDS):
                addresses = await self._resolve(parts.hostname, parts.port)
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: no name can look like that
            if url not in self._failing:
                self._failing.add(url)
                _logger.warning("worker name not found", extra={"url": url, "error": str(error)})
            return
        self._failing.discard(url)
        if addresses:
            self._found[url] = frozenset(_worker_url(address, parts.port) for address in addresses)


def _worker_url(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}"
