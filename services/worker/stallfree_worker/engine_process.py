"""Keeps one engine process alive, and is the only way to it. Lives in the HTTP front; owns no model and no request.

An engine that dies, fails, or is silent for too long is noticed, reported to the listener (which fails its requests),
and started anew, after a pause that grows. It is given up where the very first load fails, or where it had to be
restarted `max_engine_restarts` times within ten minutes: the worker then leaves with a non-zero status, because a
front without an engine serves nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stallfree_shared.errors import UnavailableError
from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import NewRequest
from stallfree_worker.engine_messages import (
    Cancel,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineReport,
    EngineSetup,
    Submit,
)
from stallfree_worker.engine_pipe import EnginePipe, start_engine
from stallfree_worker.loaded_model import ModelLoader, TokenizerFile
from stallfree_worker.settings import WorkerSettings

_logger = logging.getLogger(__name__)

_RESTART_WINDOW_SECONDS = 600.0
_MAX_PAUSE_SECONDS = 30.0


class EngineListener(Protocol):
    """Who is told what the engine does. Called on the event loop, in the engine's order."""

    def engine_ready(self, ready: EngineReady) -> None: ...

    def engine_reported(self, report: EngineReport) -> None: ...

    def engine_lost(self) -> None: ...

    def engine_restarting(self) -> None: ...


class EngineProcess:
    """See the module. `run` supervises until `stop`, or until the engine is given up."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        load_model: ModelLoader,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._setup = EngineSetup(settings=settings, load_model=load_model)
        self._clock = clock
        self._pipe: EnginePipe | None = None
        self._ready: EngineReady | None = None
        self._tokenizer: TokenizerFile | None = None
        self._lost = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure = ""
        self._heard_at = 0.0
        self._restarted_at: deque[float] = deque()
        self._was_ever_ready = False
        self.state = "the model is loading"
        """What routers and probes are told where `is_ready` is false; the reason of a failure is in the log only."""

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    @property
    def ready(self) -> EngineReady | None:
        """What the engine that runs now told when it was ready."""
        return self._ready

    @property
    def tokenizer(self) -> TokenizerFile | None:
        """The model's, as soon as it is known, and then always."""
        return self._tokenizer

    def submit(self, request: NewRequest) -> None:
        """Hands `request` to the engine, which must be ready. Its events, a refusal too, come in a report.

        Raises:
            UnavailableError: there is no engine now.
        """
        if self._pipe is None:
            raise UnavailableError(f"this worker cannot serve now: {self.state}", retry_after_seconds=1)
        self._pipe.send(Submit(request=request))

    def cancel(self, request_id: RequestId) -> None:
        """The engine frees the request before its next step; no event follows."""
        if self._pipe is not None:
            self._pipe.send(Cancel(request_id=request_id))

    async def run(self, listener: EngineListener) -> str | None:
        """Keeps an engine running. Returns None after `stop`, or why the engine is given up."""
        while True:
            reason = await self._run_once(listener)
            if reason is None:
                return None
            _logger.error("engine lost", extra={"reason": reason})
            if not self._was_ever_ready or not self._may_restart():
                self.state = "the engine is given up"
                _logger.critical("engine given up", extra={"reason": reason, "restarts": len(self._restarted_at)})
                return reason
            self.state = "the engine is being restarted"
            await self._pause()
            if not self._stopping.is_set():
                listener.engine_restarting()

    async def stop(self) -> None:
        """Ends the engine after the step it is in, or in the midst of loading; `run` then returns."""
        self._stopping.set()
        if self._pipe is None:
            return
        if self.is_ready:
            await self._pipe.stop()
        else:
            self._pipe.kill()

    async def _run_once(self, listener: EngineListener) -> str | None:
        """One engine from start to end. Returns why it ended; None: it was stopped."""
        if self._stopping.is_set():
            return None
        self._lost.clear()
        self._failure = ""
        self._heard_at = self._clock()
        self._pipe = pipe = await start_engine(self._setup, lambda message: self._on_message(message, listener))
        try:
            if not self._stopping.is_set():
                await self._watch(listener)
        finally:
            self._pipe = None
            self._ready = None
            pipe.kill()
            status = await pipe.wait()
        if self._stopping.is_set():
            return None
        return self._failure or f"the engine process ended with status {status}"

    async def _watch(self, listener: EngineListener) -> None:
        """Returns when the engine is gone, or has been silent for too long."""
        while not self._lost.is_set():
            left_seconds = self._heard_at + self._patience_seconds() - self._clock()
            if left_seconds <= 0:
                self._lose(f"the engine was silent for {self._patience_seconds():g} s", listener)
                return
            with contextlib.suppress(TimeoutError):
                # the patience shrinks once the engine is ready, so no wait is longer than the short one
                async with asyncio.timeout(min(left_seconds, self._settings.step_timeout_seconds)):
                    await self._lost.wait()

    def _patience_seconds(self) -> float:
        settings = self._settings
        return settings.step_timeout_seconds if self.is_ready else settings.engine_start_timeout_seconds

    def _on_message(self, message: EngineMessage | None, listener: EngineListener) -> None:
        self._heard_at = self._clock()
        if self._lost.is_set():
            return
        try:
            self._tell(message, listener)
        except Exception as error:  # this is the top of a callback: an error must fail the requests, not vanish
            _logger.exception("engine message could not be handled")
            self._lose(f"the front failed on its report: {type(error).__name__}", listener)

    def _tell(self, message: EngineMessage | None, listener: EngineListener) -> None:
        match message:
            case EngineReport():
                listener.engine_reported(message)
            case TokenizerFile():
                self._tokenizer = message
            case EngineReady():
                self._ready = message
                self._was_ever_ready = True
                listener.engine_ready(message)
            case EngineFailed():
                self._lose(message.reason, listener)
            case None:
                self._lose("", listener)

    def _lose(self, failure: str, listener: EngineListener) -> None:
        """Takes note of the engine's end, once, and lets the listener fail its requests without delay."""
        self._failure = failure
        self._ready = None
        self.state = "the engine is lost"
        self._lost.set()
        if not self._stopping.is_set():
            listener.engine_lost()

    def _may_restart(self) -> bool:
        now = self._clock()
        while self._restarted_at and now - self._restarted_at[0] > _RESTART_WINDOW_SECONDS:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._settings.max_engine_restarts:
            return False
        self._restarted_at.append(now)
        return True

    async def _pause(self) -> None:
        """No pause before the first restart, then 1, 2, 4 seconds and so on. Ends early where the worker stops."""
        seconds = min(2.0 ** (len(self._restarted_at) - 2), _MAX_PAUSE_SECONDS) if len(self._restarted_at) > 1 else 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
