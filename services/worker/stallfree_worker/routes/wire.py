"""What routers call: the routes at the top of `stallfree_shared.wire`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from stallfree_shared.errors import InvalidRequestError, PayloadTooLargeError, StallfreeError, UnavailableError
from stallfree_shared.wire import (
    FRAMES_PATH,
    MAX_DEFINITION_BYTES,
    MODEL_PATH,
    REQUESTS_PATH,
    TOKENIZER_PATH,
    ConnectionId,
    RequestId,
    SubmitRequest,
)
from stallfree_worker.connections import Connections
from stallfree_worker.engine_messages import EngineReady
from stallfree_worker.engine_process import EngineProcess
from stallfree_worker.frame_stream import FrameStream
from stallfree_worker.metrics import WorkerMetrics
from stallfree_worker.routes.errors import invalid_body

_FRAMES_CONTENT_TYPE = b"application/x-ndjson"
_MAX_ID_CHARACTERS = 256
_MAX_BYTES_PER_TOKEN_ID = 12
_BODY_BYTES_BESIDE_PROMPT = 64 * 1024 + 6 * MAX_DEFINITION_BYTES
"""JSON writes a byte of a definition with six at most, as \\u0001."""


def wire_routes(*, engine: EngineProcess, connections: Connections, metrics: WorkerMetrics) -> APIRouter:
    router = APIRouter()

    @router.get(MODEL_PATH)
    async def model() -> Response:
        return Response(_ready(engine).card.model_dump_json(), media_type="application/json")

    @router.api_route(TOKENIZER_PATH, methods=["GET", "HEAD"])
    async def tokenizer(request: Request) -> Response:
        found = engine.tokenizer
        if found is None:
            raise UnavailableError(f"this worker has no tokenizer yet: {engine.state}", retry_after_seconds=1)
        etag = f'"{found.sha256}"'
        headers = {"ETag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        if request.method == "HEAD":
            return Response(headers=headers)
        content = await asyncio.to_thread(found.path.read_bytes)
        return Response(content, media_type="application/json", headers=headers)

    @router.get(FRAMES_PATH)
    async def frames(connection_id: Annotated[str, Query(min_length=1, max_length=_MAX_ID_CHARACTERS)]) -> Response:
        return _FrameResponse(connections, connections.open(ConnectionId(connection_id)))

    @router.post(REQUESTS_PATH)
    async def submit(request: Request) -> Response:
        try:
            accepted = connections.submit(_parse(await _read_body(request, max_bytes=_max_body_bytes(engine))))
        except StallfreeError as error:
            metrics.count_refusal(error.code)
            raise
        return Response(accepted.model_dump_json(), status_code=202, media_type="application/json")

    @router.delete(f"{REQUESTS_PATH}/{{request_id:path}}")
    async def cancel(request_id: str, attempt: Annotated[int, Query(ge=1)]) -> Response:
        connections.cancel(RequestId(request_id), attempt)
        return Response(status_code=204)

    return router


def _ready(engine: EngineProcess) -> EngineReady:
    if engine.ready is None:
        raise UnavailableError(f"this worker cannot serve now: {engine.state}", retry_after_seconds=1)
    return engine.ready


def _parse(body: bytes) -> SubmitRequest:
    try:
        return SubmitRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


def _max_body_bytes(engine: EngineProcess) -> int:
    """What the longest prompt that the model takes can need, and the largest definition."""
    return _BODY_BYTES_BESIDE_PROMPT + _MAX_BYTES_PER_TOKEN_ID * _ready(engine).card.max_model_len


async def _read_body(request: Request, *, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise PayloadTooLargeError(f"the body is longer than {max_bytes} bytes")
    except ClientDisconnect:
        raise InvalidRequestError("the router left in the midst of the body") from None
    return bytes(body)


class _FrameResponse(Response):
    """Writes one frame stream until it ends, the router leaves, or the stream is cut; then closes it.

    Unlike StreamingResponse it can be stopped while it waits for a router that does not read.
    """

    def __init__(self, connections: Connections, stream: FrameStream) -> None:
        super().__init__()
        self._connections = connections
        self._stream = stream

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._write(send)),
                    group.create_task(_wait_until_gone(receive)),
                    group.create_task(self._wait_until_cut()),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        finally:
            self._connections.close(self._stream)

    async def _write(self, send: Send) -> None:
        headers = [(b"content-type", _FRAMES_CONTENT_TYPE), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self._stream.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait_until_cut(self) -> None:
        await self._stream.cut.wait()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
