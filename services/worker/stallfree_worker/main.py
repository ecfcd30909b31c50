"""The worker's entry point: settings, log, server, exit status."""

from __future__ import annotations

import asyncio
import signal
import sys

from stallfree_shared.drain import Drain, serve
from stallfree_shared.logging import configure_logging
from stallfree_shared.settings import load_settings
from stallfree_worker.app import create_app
from stallfree_worker.loaded_model import ModelLoader
from stallfree_worker.real_model import load_real_model
from stallfree_worker.settings import WorkerSettings
from stallfree_worker.trace import TraceFileError


async def run(settings: WorkerSettings, load_model: ModelLoader) -> int:
    """Serves until a signal has drained the worker. Returns the exit status: 1 where the engine was given up."""
    drain = Drain()
    status = 0

    def give_up() -> None:
        nonlocal status
        status = 1
        signal.raise_signal(signal.SIGTERM)  # leaves the way that every worker leaves

    app = create_app(settings, load_model=load_model, drain=drain, give_up=give_up)
    await serve(app, server=settings, drain=drain, drain_settings=settings)
    return status


def main(load_model: ModelLoader = load_real_model) -> None:
    settings = load_settings(WorkerSettings, program="stallfree-worker")
    configure_logging(service="stallfree-worker", level=settings.log_level, log_format=settings.log_format)
    try:
        status = asyncio.run(run(settings, load_model))
    except TraceFileError as error:
        sys.stderr.write(f"stallfree-worker: --trace (STALLFREE_TRACE): {error}\n")
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
