"""For a person who looks: `GET /debug/steps`, the last steps, newest last. No API for clients, and never a token."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from stallfree_worker.step_history import MAX_STEPS, StepHistory, steps_json


def debug_routes(history: StepHistory) -> APIRouter:
    router = APIRouter()

    @router.get("/debug/steps")
    async def steps(limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = MAX_STEPS) -> Response:
        body = await asyncio.to_thread(steps_json, history.last(limit))
        return Response(body, media_type="application/json")

    return router
