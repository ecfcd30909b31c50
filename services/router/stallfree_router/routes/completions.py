"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stallfree_router.routes.answers import answer_call
from stallfree_router.routes.shapes import CompletionShape
from stallfree_shared.openai_api import CompletionRequest

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    return await answer_call(request, CompletionRequest, CompletionShape)
