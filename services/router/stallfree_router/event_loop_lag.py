"""Measures how late the event loop runs what is due: every stream of this router waits that long."""

from __future__ import annotations

import asyncio

from prometheus_client import Histogram

_INTERVAL_SECONDS = 0.1


async def sample_event_loop_lag(lag_seconds: Histogram) -> None:
    """Observes the lag ten times a second until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + _INTERVAL_SECONDS
        await asyncio.sleep(_INTERVAL_SECONDS)
        lag_seconds.observe(max(0.0, loop.time() - due_at))
