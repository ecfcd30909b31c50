"""Wires the worker's HTTP front. The only place that puts its parts together; it owns no model and imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI

from stallfree_shared.drain import Drain
from stallfree_worker.connections import Connections
from stallfree_worker.engine_process import EngineProcess
from stallfree_worker.loaded_model import ModelLoader
from stallfree_worker.metrics import WorkerMetrics
from stallfree_worker.routes.errors import translate_errors
from stallfree_worker.routes.ops import ops_routes
from stallfree_worker.routes.wire import wire_routes
from stallfree_worker.settings import WorkerSettings

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
    """
    metrics = WorkerMetrics()
    engine = EngineProcess(settings, load_model=load_model)
    connections = Connections(settings, engine=engine, drain=drain, metrics=metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
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
    app.include_router(ops_routes(engine=engine, drain=drain, metrics=metrics))
    return app


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
