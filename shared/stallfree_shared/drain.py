"""How a service starts to serve and how it leaves.

SIGTERM or SIGINT: not ready at once → new requests are still taken for `drain_delay_seconds` → then refused, while
those that run get `drain_timeout_seconds` to end → exit. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator

import uvicorn

from stallfree_shared.errors import DrainingError
from stallfree_shared.settings import DrainSettings, ServerSettings

_logger = logging.getLogger(__name__)


class Drain:
    """Owns whether this process is leaving, and the count of requests that it may not leave behind."""

    def __init__(self) -> None:
        self._is_draining = False
        self._accepts_requests = True
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.left = asyncio.Event()
        """Set when nothing runs any more: streams that carry no request end now."""

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Holds the process back from leaving while a request runs.

        Raises:
            DrainingError: the process takes no new requests.
        """
        if not self._accepts_requests:
            raise DrainingError("this server is shutting down", retry_after_seconds=1)
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def run(self, settings: DrainSettings) -> None:
        """Leaves: returns when nothing runs any more, or when the time for that is over."""
        self._is_draining = True
        _logger.info("draining", extra={"in_flight": self._in_flight})
        await asyncio.sleep(settings.drain_delay_seconds)
        self._accepts_requests = False
        try:
            async with asyncio.timeout(settings.drain_timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            _logger.warning("drain timed out", extra={"in_flight": self._in_flight})
        self.left.set()


class _DrainingServer(uvicorn.Server):
    """A uvicorn server that leaves through a `Drain` instead of closing its sockets at the first signal."""

    def __init__(self, config: uvicorn.Config, *, drain: Drain, settings: DrainSettings) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_settings = settings
        self._leaving: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave())
        else:
            self.should_exit = True
            self.force_exit = True

    async def _leave(self) -> None:
        await self._drain.run(self._drain_settings)
        self.should_exit = True


async def serve(
    app: Callable[..., Awaitable[None]], *, server: ServerSettings, drain: Drain, drain_settings: DrainSettings
) -> None:
    """Serves `app` until a signal has drained it. Prints `listening URL` as the only line on standard output."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.create_server((server.host, server.port), family=family, backlog=2048)
    # Accepted sockets inherit it. asyncio sets it by itself only where a socket's protocol is named, and here it is
    # not; then every answer on a kept connection would wait some 40 ms for the peer's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    host = f"[{server.host}]" if family == socket.AF_INET6 else server.host
    sys.stdout.write(f"listening http://{host}:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
        lifespan="on",
        server_header=False,
    )
    await _DrainingServer(config, drain=drain, settings=drain_settings).serve(sockets=[listener])
