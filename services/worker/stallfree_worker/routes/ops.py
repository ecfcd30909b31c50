"""For Kubernetes and Prometheus: /livez, /readyz, /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest

from stallfree_shared.drain import Drain
from stallfree_shared.metrics import METRICS_CONTENT_TYPE
from stallfree_worker.connections import Connections
from stallfree_worker.engine_process import EngineProcess
from stallfree_worker.metrics import WorkerMetrics


def ops_routes(
    *, engine: EngineProcess, drain: Drain, metrics: WorkerMetrics, connections: Connections, max_stuck_seconds: float
) -> APIRouter:
    """`max_stuck_seconds` is how long requests may be here without a step before this process counts as dead."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> JSONResponse:
        if connections.stuck_seconds >= max_stuck_seconds:
            reason = f"requests have been here for {connections.stuck_seconds:.0f} s without a step"
            return JSONResponse({"status": "stuck", "reason": reason}, status_code=503)
        return JSONResponse({"status": "alive"})

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        if drain.is_draining:
            return _not_ready("the worker is draining")
        return JSONResponse({"status": "ready"}) if engine.is_ready else _not_ready(engine.state)

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": METRICS_CONTENT_TYPE})

    return router


def _not_ready(reason: str) -> JSONResponse:
    return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
