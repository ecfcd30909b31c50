"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stallfree_router.routes.answers import answer_call
from stallfree_router.routes.shapes import ChatShape
from stallfree_shared.openai_api import ChatCompletionRequest

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    return await answer_call(request, ChatCompletionRequest, ChatShape)
