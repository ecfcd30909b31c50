"""Streams one completion and stamps every token on arrival.

The stamp is taken first thing when the event loop hands over the bytes of a socket, before they are parsed. A socket
protocol and h11 in place of a whole HTTP client: about 20 microseconds of CPU an event, because the client shares its
cores with the engine that it measures. Used by `open_loop` and the demo.

Tokens are counted by `token_ids` (the request asks with `return_token_ids`). A server that does not tell them gets one
token an event, and `RequestTrace.is_count_confirmed` says whether its usage agrees.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from stallfree_loadtest.http_exchange import ExchangeError, HttpExchange
from stallfree_loadtest.measures import Outcome, RequestTrace, TokenStamp
from stallfree_shared import sse

COMPLETIONS_PATH = "/v1/completions"
_MAX_ERROR_BYTES = 4096

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go, and how long the client waits."""

    url: str
    """Base URL, such as http://127.0.0.1:8000."""
    model: str
    api_key: str | None = None
    silence_timeout_seconds: float = 120.0
    """Most seconds without a single byte, connecting included; then the request counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What is asked of the server."""

    request_id: str
    role: str = "request"
    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignores_eos: bool = True

    def body(self, model: str) -> dict[str, object]:
        body: dict[str, object] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignores_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        return body


class ServerSaidError(Exception):
    """The server refused the request, or ended its stream with an error."""


@dataclass(slots=True)
class _Answer:
    """What the events have told so far."""

    stamps: list[TokenStamp] = field(default_factory=list)
    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    is_done: bool = False

    def take(self, data: str, *, at: float) -> None:
        """Takes one event.

        Raises:
            ServerSaidError: it is an error event, or no JSON object.
        """
        if data == sse.DONE:
            self.is_done = True
            return
        event = _json_object(data)
        if isinstance(error := event.get("error"), dict):
            raise ServerSaidError(f"error event: {error.get('code')}: {error.get('message')}")
        if isinstance(usage := event.get("usage"), dict):
            self.prompt_tokens = cast("int | None", usage.get("prompt_tokens"))
            self.completion_tokens = cast("int | None", usage.get("completion_tokens"))
        for choice in cast("Iterable[Json]", event.get("choices") or ()):
            self._take_choice(choice, at=at)

    def _take_choice(self, choice: Json, *, at: float) -> None:
        text = str(choice.get("text") or "")
        token_ids = choice.get("token_ids")
        num_tokens = len(token_ids) if isinstance(token_ids, list) else int(bool(text))
        if num_tokens:
            self.stamps.append(TokenStamp(at=at, num_tokens=num_tokens))
            self.num_tokens += num_tokens
        if text:
            self.texts.append(text)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason


class CompletionStream(asyncio.Protocol):
    """Owns one request's socket and what has come over it. `run` once; `trace` at any time."""

    def __init__(
        self,
        server: Server,
        request: CompletionRequest,
        *,
        clock: Callable[[], float] = time.perf_counter,
        due_at: float | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self._server = server
        self._clock = clock
        self._due_at = due_at
        self._on_token = on_token
        headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
        self._exchange = HttpExchange(
            server.url.rstrip("/") + COMPLETIONS_PATH, request.body(server.model), headers=headers
        )
        self._decoder = sse.Decoder()
        self._answer = _Answer()
        self._refusal = bytearray()
        self._sent_at: float | None = None
        self._ended_at: float | None = None
        self._outcome: Outcome = "dropped"
        self._error: str | None = None
        self._ended: asyncio.Future[None] | None = None
        self._silence: asyncio.Timeout | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._answer.num_tokens

    @property
    def first_token_at(self) -> float | None:
        return self._answer.stamps[0].at if self._answer.stamps else None

    async def run(self) -> RequestTrace:
        """Sends the request and reads its stream to the end. Failures are part of the trace. Cancelled, it leaves the
        connection, and the trace says "dropped"."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        transport: asyncio.Transport | None = None
        self._sent_at = self._clock()
        try:
            async with asyncio.timeout(self._server.silence_timeout_seconds) as self._silence:
                transport = await self._connect(loop)
                transport.write(self._exchange.request_bytes)
                await self._ended
            self._outcome = "finished"
        except TimeoutError:
            self._fail(f"nothing came for {self._server.silence_timeout_seconds:g} s")
        except (OSError, ExchangeError, ServerSaidError) as error:
            self._fail(str(error) or type(error).__name__)
        finally:
            self._ended_at = self._clock()
            if transport is not None:
                transport.abort()
        return self.trace()

    def trace(self) -> RequestTrace:
        """What has been seen up to now."""
        now = self._clock()
        sent_at = now if self._sent_at is None else self._sent_at
        answer = self._answer
        return RequestTrace(
            request_id=self.request.request_id,
            role=self.request.role,
            due_at=sent_at if self._due_at is None else self._due_at,
            sent_at=sent_at,
            ended_at=now if self._ended_at is None else self._ended_at,
            stamps=tuple(answer.stamps),
            outcome=self._outcome,
            error=self._error,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            text="".join(answer.texts),
        )

    def data_received(self, data: bytes) -> None:
        at = self._clock()
        if self._silence is not None:
            self._silence.reschedule(asyncio.get_running_loop().time() + self._server.silence_timeout_seconds)
        self._read(data, at=at)

    def eof_received(self) -> None:
        self._read(b"", at=self._clock())

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ExchangeError("the connection was closed"))

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> asyncio.Transport:
        parts = urlsplit(self._server.url)
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        transport, _ = await loop.create_connection(lambda: self, parts.hostname or "", port, ssl=is_tls or None)
        return transport

    def _read(self, data: bytes, *, at: float) -> None:
        if self._ended is None or self._ended.done():
            return
        tokens_before = len(self._answer.stamps)
        try:
            for piece in self._exchange.feed(data):
                self._take(piece, at=at)
            if self._exchange.is_complete or not data:
                self._finish()
        except (ExchangeError, ServerSaidError) as error:
            self._end(error)
        if len(self._answer.stamps) > tokens_before:
            self._on_token()

    def _take(self, piece: bytes, *, at: float) -> None:
        if self._exchange.status != 200:
            self._refusal += piece[: _MAX_ERROR_BYTES - len(self._refusal)]
            return
        for event in self._decoder.feed(piece):
            self._answer.take(event.data, at=at)

    def _finish(self) -> None:
        """The answer has been read to its last byte: leaving at `[DONE]` could look like a client that went away."""
        if self._exchange.status != 200:
            raise ServerSaidError(f"HTTP {self._exchange.status}: {_message(bytes(self._refusal))}")
        if not self._answer.is_done:
            raise ServerSaidError("the stream ended without [DONE]")
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _fail(self, reason: str) -> None:
        self._outcome, self._error = "error", reason


def _json_object(data: str) -> Json:
    try:
        event = json.loads(data)
    except json.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise ServerSaidError(f"an event is no JSON object: {data[:200]!r}")
    return event


def _message(body: bytes) -> str:
    """The message of an error body in the OpenAI shape, or the body as it is."""
    text = body.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return text.strip()
