"""Wires the worker's HTTP front. The only place that puts its parts together; it owns no model and imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI

from stallfree_shared.drain import Drain
from stallfree_worker.connections import Connections
from stallfree_worker.engine.step import StepRecord
from stallfree_worker.engine_process import EngineProcess
from stallfree_worker.loaded_model import ModelLoader
from stallfree_worker.metrics import WorkerMetrics
from stallfree_worker.routes.debug import debug_routes
from stallfree_worker.routes.errors import translate_errors
from stallfree_worker.routes.ops import ops_routes
from stallfree_worker.routes.wire import wire_routes
from stallfree_worker.settings import EngineProcessSettings, WorkerSettings
from stallfree_worker.step_history import StepHistory
from stallfree_worker.trace import TraceWriter

_logger = logging.getLogger(__name__)


def create_app(
    settings: WorkerSettings,
    *,
    load_model: ModelLoader,
    drain: Drain,
    give_up: Callable[[], None],
) -> FastAPI:
    """The worker as an ASGI application. Its lifespan starts and stops the engine's process.

    `give_up` is called once where the engine cannot be kept alive: the process should then end, with a non-zero status.

    Raises:
        TraceFileError: the file of the trace cannot be written.
    """
    metrics = WorkerMetrics()
    engine = EngineProcess(settings, load_model=load_model)
    history = StepHistory()
    trace = _open_trace(settings, metrics)

    def note_step(record: StepRecord) -> None:
        history.add(record)
        if trace is not None:
            trace.add(record)

    connections = Connections(settings, engine=engine, drain=drain, metrics=metrics, on_step=note_step)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as leaving, asyncio.TaskGroup() as group:
            if trace is not None:
                leaving.push_async_callback(asyncio.to_thread, trace.close)
            supervising = group.create_task(_guard(_supervise(engine, connections, give_up), give_up))
            publishing = group.create_task(_guard(connections.run(), give_up))
            try:
                yield
            finally:
                publishing.cancel()
                await engine.stop()
                await supervising

    app = FastAPI(title="Stallfree worker", lifespan=lifespan, openapi_url=None)
    translate_errors(app)
    app.include_router(wire_routes(engine=engine, connections=connections, metrics=metrics))
    app.include_router(
        ops_routes(
            engine=engine,
            drain=drain,
            metrics=metrics,
            connections=connections,
            max_stuck_seconds=settings.no_progress_liveness_seconds,
        )
    )
    app.include_router(debug_routes(history))
    return app


def _open_trace(settings: EngineProcessSettings, metrics: WorkerMetrics) -> TraceWriter | None:
    if settings.trace is None:
        return None
    return TraceWriter(settings.trace, max_bytes=settings.trace_max_bytes, on_dropped=metrics.trace_dropped.inc)


async def _supervise(engine: EngineProcess, connections: Connections, give_up: Callable[[], None]) -> None:
    if await engine.run(connections) is not None:
        give_up()


async def _guard(work: Awaitable[None], give_up: Callable[[], None]) -> None:
    """The worker never lives on half: what runs beside its routes takes it along when it fails."""
    try:
        await work
    except Exception:
        _logger.exception("worker failed")
        give_up()
