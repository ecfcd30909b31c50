"""Requests that run beside a scenario: started, waited for, dropped. Used by the demo and the experiments.

Owns the tasks of its requests; leaving the block drops those that still run, as a client that leaves would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.measures import RequestTrace


class RequestFailedError(Exception):
    """A request that the scenario depends on failed, or ended before it should."""


class LiveRequests:
    def __init__(self, server: Server, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._server = server
        self._clock = clock
        self._progress = asyncio.Event()
        self._task_by_stream: dict[CompletionStream, asyncio.Task[RequestTrace]] = {}
        self._lasting: set[CompletionStream] = set()
        self._failure: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drop(*self._task_by_stream)

    def start(self, request: CompletionRequest, *, must_last: bool = False) -> CompletionStream:
        """Sends a request now. One that `must_last` may end only by being dropped."""
        stream = CompletionStream(self._server, request, clock=self._clock, on_token=self._progress.set)
        task = asyncio.ensure_future(stream.run())
        self._task_by_stream[stream] = task
        if must_last:
            self._lasting.add(stream)
        task.add_done_callback(lambda _: self._take_end(stream))
        return stream

    def now(self) -> float:
        """The instant, on the clock of all stamps."""
        return self._clock()

    def has_ended(self, stream: CompletionStream) -> bool:
        return self._task_by_stream[stream].done()

    async def drop(self, *streams: CompletionStream) -> None:
        """Ends requests from the client's side; those that have ended already stay as they are."""
        self._lasting.difference_update(streams)
        tasks = [self._task_by_stream[stream] for stream in streams]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def until(self, claim: Callable[[], bool]) -> None:
        """Waits until the claim holds; it is asked after every token and every end.

        Raises:
            RequestFailedError: see `check`.
        """
        while True:
            self.check()
            if claim():
                return
            self._progress.clear()
            await self._progress.wait()

    async def pause(self, seconds: float) -> None:
        """Lets the requests go on for a while.

        Raises:
            RequestFailedError: see `check`.
        """
        await asyncio.sleep(seconds)
        self.check()

    def check(self) -> None:
        """Raises RequestFailedError where a request has failed, or one that must last has ended."""
        if self._failure is not None:
            raise RequestFailedError(self._failure)

    def _take_end(self, stream: CompletionStream) -> None:
        self._progress.set()
        task = self._task_by_stream[stream]
        if task.cancelled() or task.exception() is not None:
            return  # `drop` raises what a task raised
        trace = task.result()
        if trace.outcome == "error":
            self._failure = f"{trace.request_id} failed after {trace.num_tokens} tokens: {trace.error}"
        elif stream in self._lasting:
            self._failure = f"{trace.request_id} ended after {trace.num_tokens} tokens, too early"
