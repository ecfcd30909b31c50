"""A whole Stallfree on one machine: store, workers and routers as processes.

    async with LocalCluster(ClusterSettings(model=folder)) as cluster:
        ...                          # cluster.router_urls, cluster.workers, cluster.store
        cluster.kill(cluster.workers[0], signal.SIGKILL)
        await cluster.start(cluster.workers[0])     # on the same port

Owns every part and the folder of their logs; leaving the block stops all of them, whatever happened inside. Starts
nothing again unless asked. Used by `stallfree-local`, the demo, load tests and the tests.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from stallfree_loadtest.parts import ClusterError, ClusterSettings, Part, router_part, store_part, worker_part

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 15.0
_LONGEST_RESTART_DELAY_SECONDS = 30.0


def _say_nothing(about: object) -> None:
    del about


class LocalCluster:
    """See the module. `report` gets one line for every step of the start and for every part that dies."""

    def __init__(self, settings: ClusterSettings, *, report: Callable[[str], None] = _say_nothing) -> None:
        self.settings = settings
        self.store: Part | None = None
        """None when the store is not ours."""
        self.workers: tuple[Part, ...] = ()
        self.routers: tuple[Part, ...] = ()
        self.log_dir = settings.log_dir or Path(tempfile.mkdtemp(prefix="stallfree-"))
        self._report = report

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order in which they are started."""
        return (*(() if self.store is None else (self.store,)), *self.workers, *self.routers)

    @property
    def router_urls(self) -> tuple[str, ...]:
        return tuple(router.url for router in self.routers)

    @property
    def store_url(self) -> str:
        if self.store is not None:
            return self.store.url
        if self.settings.redis_url is None:
            raise ClusterError("the store is not started yet")
        return self.settings.redis_url

    async def __aenter__(self) -> Self:
        try:
            await self._start_all()
        except BaseException:
            await self._stop_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_all()
        is_asked_for = kind is None or issubclass(kind, asyncio.CancelledError)
        if self.settings.log_dir is None and is_asked_for:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def start(self, part: Part) -> None:
        """Starts a part that was stopped or killed, on the port it had, and waits until it is ready.

        Raises:
            ClusterError: it runs already, it ended, or it was not ready in time.
        """
        part.spawn()
        await self._until_ready([part])

    async def stop(self, part: Part) -> int:
        """Ends a part by SIGTERM, by SIGKILL if it does not leave in time. Returns its exit status."""
        part.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.settings.stop_timeout_seconds):
                return await part.wait_ended()
        except TimeoutError:
            part.kill()
            return await part.wait_ended()

    def kill(self, part: Part, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals a part's own process and returns at once; `Part.wait_ended` waits."""
        part.send_signal(number)

    async def supervise(self, *, is_restarting: bool) -> None:
        """Reports every part that dies, for ever. With `is_restarting` it is started again, each time a bit later."""
        seen: set[tuple[str, int]] = set()
        loop = asyncio.get_running_loop()
        due_at: dict[str, float] = {}
        while True:
            for part in self.parts:
                if not part.has_died:
                    continue
                if (part.name, part.pid) not in seen:
                    seen.add((part.name, part.pid))
                    self._report(part.obituary())
                    due_at[part.name] = loop.time() + min(_LONGEST_RESTART_DELAY_SECONDS, 0.5 * 2**part.num_restarts)
                if is_restarting and loop.time() >= due_at[part.name]:
                    part.spawn()
                    self._report(f"{part.name} is started again as pid {part.pid}")
            await asyncio.sleep(_POLL_SECONDS)

    def describe(self) -> dict[str, object]:
        """Process ids and URLs of every part, ready for JSON."""
        store: dict[str, object] = {"url": self.store_url, "pid": None if self.store is None else self.store.pid}
        workers = [{**_describe(worker), "engine_pid": worker.engine_pid} for worker in self.workers]
        routers = [_describe(router) for router in self.routers]
        return {"log_dir": str(self.log_dir), "store": store, "workers": workers, "routers": routers}

    async def _start_all(self) -> None:
        settings = self.settings
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if settings.redis_url is None:
            self.store = store_part(self.log_dir)
            self.store.spawn()
            await self._until_ready([self.store])
        self.workers = tuple(worker_part(settings, number + 1, self.log_dir) for number in range(settings.num_workers))
        for worker in self.workers:
            worker.spawn()
        await self._until(self.workers, Part.is_listening)
        urls = [worker.url for worker in self.workers]
        self.routers = tuple(
            router_part(settings, number + 1, worker_urls=urls, store_url=self.store_url, log_dir=self.log_dir)
            for number in range(settings.num_routers)
        )
        for router in self.routers:
            router.spawn()
        await self._until_ready([*self.workers, *self.routers])

    async def _until_ready(self, parts: Sequence[Part]) -> None:
        def tell(part: Part) -> None:
            self._report(f"{part.name} is ready after {time.monotonic() - part.spawned_at:.1f} s: {part.url}")

        await self._until(parts, Part.is_ready, on_there=tell)

    async def _until(
        self,
        parts: Sequence[Part],
        is_there: Callable[[Part], Awaitable[bool]],
        *,
        on_there: Callable[[Part], None] = _say_nothing,
    ) -> None:
        """Waits until the claim holds for every part; a part that ends fails all at once.

        Raises:
            ClusterError: a part ended, or the time for the start is over.
        """
        missing = list(parts)
        limit = self.settings.start_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await self._watch(missing, is_there, on_there)
        except TimeoutError:
            raise ClusterError(f"not ready within {limit:g} s: {missing[0].obituary()}") from None

    async def _watch(
        self, missing: list[Part], is_there: Callable[[Part], Awaitable[bool]], on_there: Callable[[Part], None]
    ) -> None:
        """Takes parts out of `missing` as they come, and says now and then what is still waited for."""
        loop = asyncio.get_running_loop()
        told_at = loop.time()
        while missing:
            for part in tuple(missing):
                part.raise_if_ended()
                if await is_there(part):
                    missing.remove(part)
                    on_there(part)
            if missing:
                await asyncio.sleep(_POLL_SECONDS)
            if missing and loop.time() - told_at >= _PATIENCE_SECONDS:
                told_at = loop.time()
                self._report(f"still waiting for {', '.join(part.name for part in missing)}")

    async def _stop_all(self) -> None:
        """Services first, then the store that they still write to. Whatever interrupts this, nothing is left."""
        running = [part for part in self.parts if part.is_running]
        self._report(f"stopping everything; what still runs gets {self.settings.stop_timeout_seconds:g} s")
        try:
            for part in running:
                if part.role != "store":
                    part.send_signal(signal.SIGTERM)
            async with asyncio.timeout(self.settings.stop_timeout_seconds):
                for part in running:
                    if part.role == "store":
                        continue
                    await part.wait_ended()
        except TimeoutError:
            late = [part.name for part in running if part.role != "store" and part.is_running]
            self._report(f"{', '.join(late)} did not leave within {self.settings.stop_timeout_seconds:g} s: killed")
        finally:
            for part in self.parts:
                part.kill()


def _describe(part: Part) -> dict[str, object]:
    return {"name": part.name, "url": part.url, "pid": part.pid, "log": str(part.log_path)}


__all__ = ["ClusterError", "ClusterSettings", "LocalCluster", "Part"]
