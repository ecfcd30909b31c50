"""One engine process and the two pipes to it. Owns the process, its threads and its end; decides nothing.

Used by `engine_process.EngineProcess`, on the event loop. Neither sending nor reading ever blocks that loop: a thread
each does it. What the engine says arrives in order, and `None` after its last word, which is how its death is noticed:
the pipe ends the instant the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

from stallfree_worker.engine_messages import Command, EngineMessage, EngineSetup, Stop, unpack

_logger = logging.getLogger(__name__)

_MAX_UNHANDLED_MESSAGES = 256
_STANDARD_ERROR = 2
_STOP_TIMEOUT_SECONDS = 5.0

OnMessage = Callable[[EngineMessage | None], None]


class EnginePipe:
    """Made by `start_engine`; ended by `stop` or `kill`, then `wait`."""

    def __init__(self, process: Process, commands: Connection, reports: Connection, on_message: OnMessage) -> None:
        self._process = process
        self._commands = commands
        self._reports = reports
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[EngineSetup | Command | None] = queue.SimpleQueue()
        self._unhandled = threading.Semaphore(_MAX_UNHANDLED_MESSAGES)
        self._threads = [
            threading.Thread(target=self._write, name="engine-commands", daemon=True),
            threading.Thread(target=self._read, name="engine-reports", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: EngineSetup | Command) -> None:
        """Hands over `message` without waiting. To an engine that is gone it is lost; the `None` tells of that."""
        self._outbox.put(message)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Asks the engine to end after its step; kills it where it does not."""
        self.send(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                await self._process.wait()
        self.kill()

    async def wait(self) -> int:
        """Returns the exit status once the process is gone and its threads and pipes are closed."""
        status = await self._process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._commands.close()
        self._reports.close()
        return status

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the engine is gone: the reading side tells of it
            while (message := self._outbox.get()) is not None:
                self._commands.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._hand_over(unpack(self._reports.recv_bytes()))
        except (EOFError, OSError):
            self._hand_over(None)

    def _hand_over(self, message: EngineMessage | None) -> None:
        """Waits while the event loop is far behind, so that the engine waits too, and memory does not grow."""
        self._unhandled.acquire()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._handle, message)

    def _handle(self, message: EngineMessage | None) -> None:
        self._unhandled.release()
        self._on_message(message)


_ENGINE_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "1"}
"""What libraries of the engine's process are told, where nobody has told them something else.

OpenMP's threads spin for each other for some tens of microseconds before they sleep. With its own default, one process
that takes a core away made steps of 89 ms take 4 s on two cores; with this, 134 ms. On idle cores the steps of a
cluster are as long as before. Torch asks the kernel for huge pages: weights and KV cache are read a tenth faster.
"""


async def start_engine(setup: EngineSetup, on_message: OnMessage) -> EnginePipe:
    """Starts a fresh engine process. `on_message` is called on this event loop."""
    engine_commands, commands = Pipe(duplex=False)
    reports, engine_reports = Pipe(duplex=False)
    with engine_commands, engine_reports:  # the engine has its own copies: only then does its death end the pipes
        ends = (engine_commands.fileno(), engine_reports.fileno())
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "stallfree_worker.engine_loop",
            *map(str, ends),
            pass_fds=ends,
            stdin=DEVNULL,
            stdout=_STANDARD_ERROR,  # standard output is for the front's one line
            env={**_ENGINE_ENVIRONMENT, **os.environ},
        )
    pipe = EnginePipe(process, commands, reports, on_message)
    pipe.send(setup)
    return pipe
