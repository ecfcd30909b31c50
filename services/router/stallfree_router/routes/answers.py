"""Writes an answer to the client, streamed or whole, and ends it at once when the client leaves.

A stream's headers leave before its first token, so that proxies and clients know that it lives; what fails later is
an error event and then the end, without [DONE] and without a finish reason. A call that no worker can take yet waits
for its first token or error before it is given a status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stallfree_router.accounting import CallAccount
from stallfree_router.generation import Answer
from stallfree_router.output_text import TextEvent
from stallfree_router.routes.bodies import parse_body, read_body
from stallfree_router.routes.errors import error_json
from stallfree_router.routes.services import services_of
from stallfree_router.routes.shapes import ChoiceSoFar, Shape
from stallfree_shared import sse
from stallfree_shared.errors import ServingError, StallfreeError
from stallfree_shared.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    CompletionUsage,
    GenerationBody,
    PromptTokensDetails,
)

_logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", CompletionRequest, ChatCompletionRequest)
BodyT_contra = TypeVar("BodyT_contra", CompletionRequest, ChatCompletionRequest, contravariant=True)

_STREAM_HEADERS = {"Content-Type": sse.CONTENT_TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEEPALIVE = sse.encode_comment("keepalive")


class _ClientLeftError(Exception):
    """Nobody waits for this answer any more."""


class ShapeType(Protocol[BodyT_contra]):
    def __call__(self, answer: Answer, body: BodyT_contra, *, call_id: str) -> Shape: ...


async def answer_call(request: Request, body_type: type[BodyT], shape_type: ShapeType[BodyT]) -> Response:
    """A generation route: its body in `body_type`, its answer in `shape_type`."""
    services = services_of(request)
    account = CallAccount.of(request.scope)
    body = parse_body(body_type, await read_body(request, max_bytes=services.settings.max_body_bytes))
    silence_seconds = services.settings.keepalive_seconds if body.stream else None
    answer = services.text_generator.answer(body, account, silence_seconds=silence_seconds)

    def shape_of(answer: Answer) -> Shape:
        return shape_type(answer, body, call_id=account.call_id)

    return AnswerResponse(answer, body=body, shape_of=shape_of, account=account)


class AnswerResponse(Response):
    """The response to a generation call: all of the call's work happens while it is being sent."""

    def __init__(
        self,
        answer: AbstractAsyncContextManager[Answer],
        *,
        body: GenerationBody,
        shape_of: Callable[[Answer], Shape],
        account: CallAccount,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._request = body
        self._shape_of = shape_of
        self._account = account
        self._cached_by_prompt: dict[int, int] = {}
        self._is_written = False
        """All of the answer is with the server. It may report the client as gone from then on, which is no abort."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_client_waits(receive, self._respond(scope, receive, send))
        except _ClientLeftError:
            if not self._is_written:
                self._account.aborted()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answer as answer:
            shape = self._shape_of(answer)
            if self._request.stream:
                await self._stream(answer, shape, send)
            else:
                body = await self._whole(answer, shape)
                self._is_written = True
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _whole(self, answer: Answer, shape: Shape) -> str:
        choices: defaultdict[int, ChoiceSoFar] = defaultdict(ChoiceSoFar)
        async for event in answer.events:
            if event is not None:
                self._account.tokens(event, time.monotonic())
                self._note_cached(answer, event)
                choices[event.choice].add(event)
        if self._request.wanted_prompt_logprobs is not None or self._request.wanted_logprobs is not None:
            return await asyncio.to_thread(shape.whole, choices, self._usage(answer))  # long: others' tokens must move
        return shape.whole(choices, self._usage(answer))

    async def _stream(self, answer: Answer, shape: Shape, send: Send) -> None:
        first = [await anext(answer.events)] if answer.is_waiting_for_worker else []
        headers = [(name.lower().encode(), value.encode()) for name, value in _STREAM_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._write_events(answer, shape, first, write)
        except StallfreeError as error:
            self._account.failed(error)
            await write(sse.encode_event(error_json(error)))
        except Exception as error:
            _logger.exception("stream failed", extra={"request_id": self._account.call_id})
            self._account.failed(error)
            await write(sse.encode_event(error_json(ServingError("internal error"))))
        self._is_written = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_events(
        self, answer: Answer, shape: Shape, first: list[TextEvent | None], write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        for opening in shape.opening():
            await write(sse.encode_event(opening))
        for event in first:
            await self._write_event(answer, event, shape, write)
        async for event in answer.events:
            await self._write_event(answer, event, shape, write)
        if self._request.include_usage:
            await write(sse.encode_event(shape.usage_chunk(self._usage(answer))))
        await write(sse.encode_event(sse.DONE))

    async def _write_event(
        self, answer: Answer, event: TextEvent | None, shape: Shape, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        if event is None:
            await write(_KEEPALIVE)
            return
        self._note_cached(answer, event)
        data = None
        if event.prompt_logprobs is not None:
            data = sse.encode_event(await asyncio.to_thread(shape.chunk, event))  # long: others' tokens must move
        elif self._is_visible(event):
            data = sse.encode_event(shape.chunk(event))
        self._account.tokens(event, time.monotonic())
        if data is not None:
            await write(data)

    def _is_visible(self, event: TextEvent) -> bool:
        return bool(event.text) or event.finish_reason is not None or self._request.return_token_ids

    def _note_cached(self, answer: Answer, event: TextEvent) -> None:
        """A prompt counts once, however many choices it has: with what was cached for the one that had the least."""
        if event.cached_tokens is not None:
            prompt = event.choice // answer.n
            least = min(event.cached_tokens, self._cached_by_prompt.get(prompt, event.cached_tokens))
            self._cached_by_prompt[prompt] = least

    def _usage(self, answer: Answer) -> CompletionUsage:
        completion_tokens = self._account.completion_tokens
        return CompletionUsage(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=answer.prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_by_prompt.values())),
        )


async def _while_client_waits(receive: Receive, work: Awaitable[None]) -> None:
    """Does `work`; cancels it, and waits until it has let go of everything, as soon as the client is gone.

    Raises:
        _ClientLeftError: the client left before the work was done.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientLeftError
        await working
    finally:
        for task in (working, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(working, watching, return_exceptions=True)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
