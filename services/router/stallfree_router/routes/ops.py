"""What the platform asks: /livez, /readyz, /metrics. No key is needed, and no user's words are in the answers."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import Response

from stallfree_router.routes.services import READ_METHODS, services_of
from stallfree_shared.errors import DrainingError, UnavailableError
from stallfree_shared.metrics import METRICS_CONTENT_TYPE

router = APIRouter()


@router.api_route("/livez", methods=READ_METHODS)
async def is_alive() -> Response:
    return Response("ok\n", media_type="text/plain")


@router.api_route("/readyz", methods=READ_METHODS)
async def is_ready(request: Request) -> Response:
    """200 where a request would find a worker."""
    services = services_of(request)
    if services.drain.is_draining:
        raise DrainingError("this router is shutting down")
    if not any(map(services.served_models.usable, services.served_models.models())):
        raise UnavailableError("no usable worker")
    return Response("ready\n", media_type="text/plain")


@router.api_route("/metrics", methods=READ_METHODS)
async def read_metrics(request: Request) -> Response:
    metrics = generate_latest(services_of(request).metrics.registry)
    return Response(metrics, headers={"Content-Type": METRICS_CONTENT_TYPE})
