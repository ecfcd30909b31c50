"""`stallfree-router`: reads the settings, serves the router, and leaves when told to."""

from __future__ import annotations

import signal
import sys

import uvloop

from stallfree_router.app import create_app
from stallfree_router.settings import RouterSettings
from stallfree_shared.drain import Drain, serve
from stallfree_shared.logging import configure_logging
from stallfree_shared.settings import load_settings


def main() -> None:
    settings = load_settings(RouterSettings, program="stallfree-router")
    configure_logging(service="stallfree-router", level=settings.log_level, log_format=settings.log_format)
    sys.exit(uvloop.run(_serve(settings)))


async def _serve(settings: RouterSettings) -> int:
    """Serves until a signal has drained the router. Returns the exit status: 1 where a part of it has failed."""
    drain = Drain()
    status = 0

    def give_up() -> None:
        nonlocal status
        status = 1
        signal.raise_signal(signal.SIGTERM)  # leaves the way that every router leaves

    app = create_app(settings, drain=drain, give_up=give_up)
    await serve(app, server=settings, drain=drain, drain_settings=settings)
    return status


if __name__ == "__main__":
    main()
