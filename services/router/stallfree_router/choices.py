"""Runs the generations of one call side by side and merges what they give. Knows nothing of what flows through.

One source fails: the others are cancelled and the error is raised. The reader leaves: all are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

_MAX_EVENTS_AHEAD = 16
"""Events that wait for a slow client, per call. Beyond that the sources wait too."""


async def merge(
    sources: Sequence[AsyncGenerator[_T, None]], *, silence_seconds: float | None = None
) -> AsyncGenerator[_T | None, None]:
    """What the sources give, as it comes; None after each `silence_seconds` without anything.

    Closing this generator closes the sources before it returns.
    """
    queue: asyncio.Queue[_T | _End] = asyncio.Queue(_MAX_EVENTS_AHEAD)
    running = asyncio.create_task(_run_all(sources, queue))
    try:
        while True:
            try:
                async with asyncio.timeout(silence_seconds):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class _End:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _run_all(sources: Sequence[AsyncGenerator[_T, None]], queue: asyncio.Queue[_T | _End]) -> None:
    end = _End()
    try:
        async with asyncio.TaskGroup() as tasks:
            moves = [tasks.create_task(_move(source, queue)) for source in sources]
        if any(move.cancelled() for move in moves):
            # Cancelled from inside, not by the reader: without this the answer would end as if it were whole.
            end = _End(RuntimeError("a source was cancelled before its end"))
    except ExceptionGroup as errors:
        end = _End(errors.exceptions[0])
    await queue.put(end)


async def _move(source: AsyncGenerator[_T, None], queue: asyncio.Queue[_T | _End]) -> None:
    async with contextlib.aclosing(source):
        async for item in source:
            await queue.put(item)
