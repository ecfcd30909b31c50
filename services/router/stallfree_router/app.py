"""create_app(): the only place that wires the router together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

from fastapi import FastAPI

from stallfree_router.accounting import Accounting
from stallfree_router.admission import Admission
from stallfree_router.discovery import UrlDiscovery
from stallfree_router.dispatch import Dispatcher
from stallfree_router.event_loop_lag import sample_event_loop_lag
from stallfree_router.generation import Generator, ServedModels, TextGenerator
from stallfree_router.metrics import RouterMetrics
from stallfree_router.predictor import Predictor
from stallfree_router.records import RequestRecords
from stallfree_router.routes import chat, completions, models, ops
from stallfree_router.routes.errors import add_error_handlers
from stallfree_router.routes.front import Front
from stallfree_router.routes.services import Services
from stallfree_router.settings import RouterSettings
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_router.text.structured_output import StructuredOutputChecks
from stallfree_router.workers import Workers
from stallfree_shared.drain import Drain

_logger = logging.getLogger(__name__)

Job = Callable[[], Coroutine[None, None, None]]


def create_app(settings: RouterSettings, *, drain: Drain, give_up: Callable[[], None]) -> FastAPI:
    """The router, ready to be served; `drain` belongs to the process that serves it.

    `give_up` is called where what runs beside the routes has failed: the process should then end, with a non-zero
    status.
    """
    metrics = RouterMetrics()
    tokenizers = TokenizerRegistry()
    workers = Workers(
        discovery=UrlDiscovery(settings), settings=settings, metrics=metrics, add_tokenizer=tokenizers.add
    )
    records = RequestRecords(settings, metrics)
    dispatcher = Dispatcher(
        workers=workers, predictor=Predictor(metrics), records=records, metrics=metrics, settings=settings
    )
    return assemble(
        settings,
        drain=drain,
        metrics=metrics,
        tokenizers=tokenizers,
        served_models=workers,
        generator=dispatcher,
        background=(_guarded(_until(drain.left, workers.run), give_up), _guarded(records.run, give_up)),
    )


def assemble(
    settings: RouterSettings,
    *,
    drain: Drain,
    metrics: RouterMetrics,
    tokenizers: TokenizerRegistry,
    served_models: ServedModels,
    generator: Generator,
    background: Sequence[Job] = (),
) -> FastAPI:
    """The API side on top of any dispatching side. `background` runs from start to end, and ends in that order."""
    checks = StructuredOutputChecks()
    text_generator = TextGenerator(
        admission=Admission(settings, drain=drain),
        served_models=served_models,
        tokenizers=tokenizers,
        structured_output_checks=checks,
        generator=generator,
        settings=settings,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lag = functools.partial(sample_event_loop_lag, metrics.event_loop_lag_seconds)
        try:
            async with _running(*background, lag):
                yield
        finally:
            tokenizers.close()
            checks.close()

    app = FastAPI(
        title="Stallfree router",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = Services(
        settings=settings,
        drain=drain,
        metrics=metrics,
        served_models=served_models,
        text_generator=text_generator,
        created=int(time.time()),
    )
    for routes in (completions, chat, models, ops):
        app.include_router(routes.router)
    add_error_handlers(app)
    accounting = Accounting(metrics, clock=time.monotonic)
    app.add_middleware(Front, accounting=accounting, drain=drain, api_key=settings.api_key)
    return app


def _until(left: asyncio.Event, job: Job) -> Job:
    """Ends the job when the time to leave is over: what still streams then ends with an error event, not in silence."""

    async def run() -> None:
        tasks = [asyncio.ensure_future(job()), asyncio.ensure_future(left.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    return run


def _guarded(job: Job, give_up: Callable[[], None]) -> Job:
    """The router never lives on half: a job that fails takes it along."""

    async def run() -> None:
        try:
            await job()
        except Exception:
            _logger.exception("router failed")
            give_up()

    return run


@contextlib.asynccontextmanager
async def _running(*jobs: Job) -> AsyncIterator[None]:
    """Runs `jobs` while the block runs, then cancels them one after another."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job()) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
