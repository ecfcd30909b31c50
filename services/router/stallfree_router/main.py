"""`stallfree-router`: reads the settings, serves the router, and leaves when told to."""

from __future__ import annotations

import uvloop

from stallfree_router.app import create_app
from stallfree_router.settings import RouterSettings
from stallfree_shared.drain import Drain, serve
from stallfree_shared.logging import configure_logging
from stallfree_shared.settings import load_settings


def main() -> None:
    settings = load_settings(RouterSettings, program="stallfree-router")
    configure_logging(service="stallfree-router", level=settings.log_level, log_format=settings.log_format)
    uvloop.run(_serve(settings))


async def _serve(settings: RouterSettings) -> None:
    drain = Drain()
    app = create_app(settings, drain=drain)
    await serve(app, server=settings, drain=drain, drain_settings=settings)


if __name__ == "__main__":
    main()
