"""Waiting for real conditions, with an end. Tests use this in place of sleeping for a guessed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_POLL_SECONDS = 0.01


async def wait_until(
    condition: Callable[[], bool | Awaitable[bool]], timeout_seconds: float = 10.0, *, what: str = "the condition"
) -> None:
    """Returns once `condition()` holds. Raises TimeoutError, naming `what`, after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not hold within {timeout_seconds} s")
        await asyncio.sleep(_POLL_SECONDS)


def wait_until_sync(
    condition: Callable[[], bool], timeout_seconds: float = 10.0, *, what: str = "the condition"
) -> None:
    """`wait_until` for code without an event loop."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not hold within {timeout_seconds} s")
        time.sleep(_POLL_SECONDS)
