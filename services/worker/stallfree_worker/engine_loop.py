"""What runs inside the engine's process: load the model, then step for as long as there is work.

Started by `engine_pipe.start_engine` as `python -m stallfree_worker.engine_loop COMMANDS REPORTS`, with two pipe ends.
It never serves HTTP and never outlives the front: when the command pipe ends, so does the process, even in the midst
of a step, because nothing may hold a GPU that nobody can reach.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from stallfree_shared.errors import StallfreeError
from stallfree_shared.logging import configure_logging
from stallfree_shared.wire import STATUS_INTERVAL_SECONDS
from stallfree_worker.engine.calibration import calibrate
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.execution import InlineExecution, ThreadExecution
from stallfree_worker.engine.step import EngineEvent, NewRequest, StepReport
from stallfree_worker.engine_messages import (
    Cancel,
    Command,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineReport,
    EngineSetup,
    Stop,
    Submit,
    pack,
)
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.settings import WorkerSettings

_logger = logging.getLogger("stallfree_worker.engine_loop")  # as __main__ it has another name


class EngineLoop:
    """Turns commands into engine calls and steps into reports."""

    def __init__(
        self, engine: Engine, *, commands: queue.SimpleQueue[Command], send_report: Callable[[EngineReport], None]
    ) -> None:
        self._engine = engine
        self._commands = commands
        self._send_report = send_report
        self._submits_taken = 0
        self._refusals: list[EngineEvent] = []
        self._held: EngineReport | None = None

    def run(self) -> None:
        """Returns after `Stop`. Raises what a step raises."""
        self._hold(self._engine.step())
        try:
            while self._take_commands():
                self._engine.begin_step()
                self._send_held()
                self._hold(self._engine.end_step())
        finally:
            self._send_held()

    def _hold(self, step: StepReport) -> None:
        """With overlap a report leaves when the next step has begun, if there is one; else at once."""
        self._held = self._make_report(step)
        if not (self._engine.overlaps and self._engine.has_work):
            self._send_held()

    def _send_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._send_report(held)

    def _take_commands(self) -> bool:
        """Hands over all commands that are there; waits for one where nothing else is to be done. False: stop."""
        try:
            command = self._commands.get(block=not self._engine.has_work, timeout=STATUS_INTERVAL_SECONDS)
            while not isinstance(command, Stop):
                self._take(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _take(self, command: Submit | Cancel) -> None:
        if isinstance(command, Cancel):
            self._engine.cancel(command.request_id)
            return
        self._submits_taken += 1
        try:
            self._engine.submit(command.request)
        except StallfreeError as error:
            self._refusals.append(_refusal(command.request, error))

    def _make_report(self, step: StepReport) -> EngineReport:
        """Its status includes all submits that were taken so far."""
        if self._refusals:
            step = step._replace(events=(*self._refusals, *step.events))
            self._refusals.clear()
        return EngineReport(step=step, submits_taken=self._submits_taken)


def _refusal(request: NewRequest, error: StallfreeError) -> EngineEvent:
    return EngineEvent(
        request_id=request.request_id,
        output_index=0,
        token_id=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        error=error.info,
    )


def _ready(loaded: LoadedModel, engine: Engine) -> EngineReady:
    """What routers may count on: no longer request than the KV cache can hold."""
    card = loaded.card
    if engine.max_model_len < card.max_model_len:
        _logger.warning(
            "the KV cache holds less than the model's context: longer requests are refused",
            extra={"model_max_len": card.max_model_len, "max_model_len": engine.max_model_len},
        )
        card = card.model_copy(update={"max_model_len": engine.max_model_len})
    return EngineReady(
        card=card,
        num_blocks=loaded.runner.num_blocks,
        kv_cache_tokens=engine.kv_cache_tokens,
        kv_cache_bytes=loaded.kv_cache_bytes,
    )


def _send(pipe: Connection, message: EngineMessage) -> None:
    pipe.send_bytes(pack(message))


def _read_commands(pipe: Connection, commands: queue.SimpleQueue[Command]) -> None:
    """Empties the pipe at once, so that a long step never holds up the front; ends the process with the pipe."""
    try:
        while True:
            commands.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)


def _serve(setup: EngineSetup, commands: queue.SimpleQueue[Command], send: Callable[[EngineMessage], None]) -> None:
    settings: WorkerSettings = setup.settings
    started_at = time.monotonic()
    loaded = setup.load_model(settings, send)
    overlaps = settings.overlap == "on" or (settings.overlap == "auto" and loaded.leaves_host_free)
    execution = ThreadExecution(loaded.runner) if overlaps else InlineExecution(loaded.runner)
    # the first steps of a model are slow: not learned from
    calibrate(Engine(settings, loaded.runner, time.monotonic, execution=execution), max_chunk_tokens=1)
    engine = Engine(
        settings, loaded.runner, time.monotonic, has_prefix_cache=settings.prefix_caching, execution=execution
    )
    calibrate(engine, max_chunk_tokens=settings.max_step_tokens)
    ready = _ready(loaded, engine)
    gc.collect()
    gc.freeze()  # what the model is made of lives as long as the process: the collector need not walk it between steps
    _logger.info(
        "engine ready",
        extra={
            "model": ready.card.model,
            "max_model_len": ready.card.max_model_len,
            "kv_cache_tokens": ready.kv_cache_tokens,
            "kv_cache_bytes": ready.kv_cache_bytes,
            "overlap": overlaps,
            "load_seconds": round(time.monotonic() - started_at, 3),
        },
    )
    send(ready)
    EngineLoop(engine, commands=commands, send_report=send).run()


def main() -> int:
    # a signal to the whole group is the front's business: it drains, and stops the engine last
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]), writable=False)
    send = partial(_send, Connection(int(sys.argv[2]), readable=False))
    setup: EngineSetup = pipe.recv()
    configure_logging(service="stallfree-engine", level=setup.settings.log_level, log_format=setup.settings.log_format)
    # bounded by the front: it counts what the engine has not yet taken
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(pipe, commands), name="commands", daemon=True).start()
    try:
        _serve(setup, commands, send)
    except Exception as error:
        _logger.exception("engine failed")
        send(EngineFailed(reason=f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
