"""What the handlers work with, made once by app.py and found on the application's state."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from stallfree_router.generation import ServedModels, TextGenerator
from stallfree_router.metrics import RouterMetrics
from stallfree_router.settings import ApiSettings
from stallfree_shared.drain import Drain

READ_METHODS = ["GET", "HEAD"]
"""Where one of them is answered, so is the other (RFC 9110, 9.1); the server leaves the body of HEAD out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    settings: ApiSettings
    drain: Drain
    metrics: RouterMetrics
    served_models: ServedModels
    text_generator: TextGenerator
    created: int
    """Unix time at which this router started: what /v1/models tells as a model's age."""


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services
