"""The way to one worker: fetches what it serves, follows its frames, submits and cancels.

Owns the sockets to that worker and the table of attempts whose events travel on them; `workers` runs one per address
and owns what is known. Each life of the connection has its own HTTP client, so that a frozen worker holds nobody's
sockets but its own (C04, C05), and its own connection id, which all its requests die with. Silence, an end of the
stream or any error ends the life: every attempt on it fails at once, and another life begins after a back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Never, Protocol

import anyio
import anyio.abc
import httpx
from pydantic import ValidationError

from stallfree_router.attempt import Attempt, AttemptKey
from stallfree_router.messages import Generation
from stallfree_router.settings import DispatchSettings
from stallfree_router.worker_answers import failure_of, read_json, read_lines
from stallfree_shared.errors import ServingError, StallfreeError, UnavailableError, WorkerLostError, WorkerTimeoutError
from stallfree_shared.wire import (
    FRAMES_PATH,
    MODEL_PATH,
    REQUESTS_PATH,
    TOKENIZER_PATH,
    ConnectionId,
    Frame,
    ModelCard,
    SubmitAccepted,
    SubmitRequest,
)
from stallfree_shared.worker_status import WorkerStatus

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 2.0
MAX_CONNECTIONS = 16
"""Sockets to one worker: one for the frames of all requests, the others for submits and cancels, which are short. The
pool looks at all of them for each call, so many would cost more than they give."""
KEEPALIVE_SECONDS = 2.0
"""An idle socket is closed well before a worker does so (after 5): a submit must not meet one that is being closed."""
TOKENIZER_TIMEOUT_SECONDS = 30.0
CANCEL_TRIES = 3
CANCEL_AGAIN_SECONDS = 1.0
SILENCE_TICKS = 6
_JSON = {"content-type": "application/json"}

_logger = logging.getLogger(__name__)

FetchTokenizer = Callable[[], Awaitable[bytes]]


class WorkerListener(Protocol):
    """Who keeps what a worker tells. Two connections to one URL may overlap for a moment, so each names itself."""

    async def on_tokenizer(self, sha256: str, fetch: FetchTokenizer) -> None:
        """A worker has the tokenizer of this hash, and may still be loading its model. Returns when texts can be made
        with it."""
        ...

    def on_card(self, connection: WorkerConnection, card: ModelCard) -> None:
        """The worker is there and says what it serves."""
        ...

    def on_status(self, connection: WorkerConnection, status: WorkerStatus) -> None: ...

    def on_lost(self, connection: WorkerConnection, *, was_connected: bool) -> None:
        """The worker is gone; what it has told before holds no longer."""
        ...


class _Life:
    """One frame stream and all that depends on it.

    Its tasks are in a group of anyio's, because only a cancellation of anyio's leaves the HTTP client's clean-up alone:
    cut in the midst of it by asyncio's, the client forgets sockets that are still open.
    """

    def __init__(self, client: httpx.AsyncClient, tasks: anyio.abc.TaskGroup) -> None:
        self.connection_id = ConnectionId(uuid.uuid4().hex)
        self.client = client
        self.tasks = tasks
        self.attempt_by_key: dict[AttemptKey, Attempt] = {}
        self.has_status = False
        self.has_ended = False
        self.num_frames = 0


class WorkerConnection:
    """Keeps the connection to one worker alive for as long as `run` runs."""

    def __init__(self, url: str, *, settings: DispatchSettings, listener: WorkerListener) -> None:
        self.url = url
        self._settings = settings
        self._listener = listener
        self._life: _Life | None = None
        self._is_leaving = False
        self._refused_tokenizer_sha256 = ""
        """Of the last one that could not be used."""

    @property
    def num_attempts(self) -> int:
        """Attempts whose events are awaited."""
        return 0 if self._life is None else len(self._life.attempt_by_key)

    async def run(self) -> None:
        """Connects, follows, and begins again; ends only by cancellation, and then in bounded time.

        The work is in a task of its own: a group of anyio's that is ending by an error forgets a cancellation that
        reaches it then, and the router would never end.
        """
        keeping = asyncio.create_task(self._keep_connected())
        try:
            await asyncio.wait((keeping,))
            keeping.result()
        finally:
            self._is_leaving = True
            while not keeping.done():
                keeping.cancel()
                await asyncio.wait((keeping,), timeout=CANCEL_AGAIN_SECONDS)

    async def _keep_connected(self) -> None:
        backoff_seconds, was_reported = FIRST_BACKOFF_SECONDS, False
        while True:
            try:
                was_connected, error = await self._live()
            except Exception as bug:  # top-level: what goes wrong with one worker must not end the way to the others
                if not was_reported:
                    _logger.exception("worker connection failed", extra={"worker": self.url})
                was_connected, error = False, failure_of(bug, "connecting")
            if self._is_leaving:
                return
            if was_connected or not was_reported:
                fields = {"worker": self.url, "reason": error.message}
                _logger.warning("worker lost" if was_connected else "worker unreachable", extra=fields)
                backoff_seconds, was_reported = FIRST_BACKOFF_SECONDS, True
            if isinstance(error, UnavailableError):
                backoff_seconds = FIRST_BACKOFF_SECONDS  # it is there and loads: it shall be used as soon as it can be
            await asyncio.sleep(backoff_seconds * random.uniform(0.5, 1.0))
            backoff_seconds = min(MAX_BACKOFF_SECONDS, 2 * backoff_seconds)

    @contextlib.asynccontextmanager
    async def submitted(
        self, generation: Generation, *, attempt_number: int, expected_output_tokens: float
    ) -> AsyncIterator[tuple[SubmitAccepted, Attempt]]:
        """Submits a generation and holds its attempt; leaving before the last event cancels it on the worker.

        Raises:
            StallfreeError: the worker refused (its own error), cannot be reached, or is lost.
        """
        life = self._life
        if life is None:
            raise WorkerLostError("the worker is not connected")
        request = SubmitRequest(
            request_id=generation.request_id,
            attempt=attempt_number,
            connection_id=life.connection_id,
            prompt_token_ids=generation.prompt_token_ids,
            sampling=generation.sampling,
            expected_output_tokens=expected_output_tokens,
            tbt_target_seconds=generation.tbt_target_seconds,
            ttft_target_seconds=generation.ttft_target_seconds,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
        )
        attempt = life.attempt_by_key[request.request_id, attempt_number] = Attempt(request.request_id, attempt_number)
        life.tasks.start_soon(self._post, life.client, request, attempt)
        try:
            yield await self._accepted(attempt), attempt
        finally:
            self._give_up(life, attempt)

    def _give_up(self, life: _Life, attempt: Attempt) -> None:
        """Forgets the attempt; cancels it on the worker where that may still know it. Never waits."""
        known = life.attempt_by_key.pop(attempt.key, None)
        if known is not None and not attempt.has_ended and life is self._life:
            life.tasks.start_soon(self._cancel, life.client, attempt)

    async def _accepted(self, attempt: Attempt) -> SubmitAccepted:
        """The worker's answer, or the loss of the worker, whichever comes first."""
        await asyncio.wait((attempt.answer, attempt.failed), return_when=asyncio.FIRST_COMPLETED)
        if not attempt.answer.done():
            raise attempt.failed.result()
        answer = attempt.answer.result()
        if isinstance(answer, StallfreeError):
            attempt.has_ended = not isinstance(answer, ServingError)
            raise answer
        return answer

    async def _post(self, client: httpx.AsyncClient, request: SubmitRequest, attempt: Attempt) -> None:
        """Never raises: a failed submit must not end the life of the others."""
        try:
            with anyio.fail_after(self._settings.submit_timeout_seconds):
                response = await client.post(REQUESTS_PATH, content=request.model_dump_json(), headers=_JSON)
            attempt.answer.set_result(read_json(response, SubmitAccepted))
        except StallfreeError as error:
            attempt.answer.set_result(error)
        except (TimeoutError, httpx.HTTPError) as error:
            attempt.answer.set_result(failure_of(error, "submitting a request"))

    async def _cancel(self, client: httpx.AsyncClient, attempt: Attempt) -> None:
        """Cancels on the worker, once its answer to the submit is there: a cancel must not overtake it."""
        await asyncio.wait((attempt.answer,))
        path, parameters = f"{REQUESTS_PATH}/{attempt.request_id}", {"attempt": attempt.number}
        for number in range(CANCEL_TRIES):
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                with anyio.fail_after(self._settings.submit_timeout_seconds):
                    response = await client.delete(path, params=parameters)
                if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                    return
            await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2**number)
        _logger.warning("cancel failed", extra={"worker": self.url, "request_id": attempt.request_id})

    async def _live(self) -> tuple[bool, StallfreeError]:
        """One life, to its end. Returns whether it ever got to a status, and why it ended."""
        life: _Life | None = None
        error: StallfreeError = WorkerLostError("the router is leaving")
        try:
            async with self._client() as client, anyio.create_task_group() as tasks:
                life = _Life(client, tasks)
                try:
                    await self._follow(life)
                finally:
                    self._end(life)
        except* StallfreeError as group:
            error = _first(group)
        finally:
            for attempt in tuple(life.attempt_by_key.values()) if life is not None else ():
                attempt.fail(type(error)(error.message))  # each its own: a raised error collects its traceback
        return life is not None and life.has_status, error

    def _end(self, life: _Life) -> None:
        """No request may come this way any more, and no task may join the life's group. Said before the sockets close,
        which takes a while, or requests would be sent to a worker that cannot be reached. Idempotent."""
        if not life.has_ended:
            life.has_ended, self._life = True, None
            self._listener.on_lost(self, was_connected=life.has_status)

    def _client(self) -> httpx.AsyncClient:
        settings = self._settings
        timeout = httpx.Timeout(settings.submit_timeout_seconds, connect=settings.connect_timeout_seconds)
        limits = httpx.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEPALIVE_SECONDS,
        )
        return httpx.AsyncClient(
            base_url=self.url, timeout=timeout, limits=limits, verify=_tls_context(), trust_env=False
        )

    async def _follow(self, life: _Life) -> Never:
        """Introduces the worker and reads its frames until it is lost.

        Raises:
            WorkerTimeoutError: it is silent.
            WorkerLostError: anything else.
        """
        try:
            await self._introduce(life.client)
            life.tasks.start_soon(self._watch_silence, life)
            await self._read_frames(life)
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValidationError) as error:
            raise failure_of(error, "reading its frames") from error
        raise WorkerLostError("the worker closed its frames")

    async def _introduce(self, client: httpx.AsyncClient) -> None:
        with anyio.fail_after(self._settings.submit_timeout_seconds):
            answer = await client.get(MODEL_PATH)
        if not answer.is_success:
            await self._take_tokenizer_early(client)
        card = read_json(answer, ModelCard)
        await self._take_tokenizer(client, card.tokenizer_sha256)
        self._listener.on_card(self, card)

    async def _take_tokenizer_early(self, client: httpx.AsyncClient) -> None:
        """While the model is loading, which takes longer. What fails now is tried again, and told, when it is there."""
        with contextlib.suppress(StallfreeError, httpx.HTTPError, TimeoutError):
            with anyio.fail_after(self._settings.submit_timeout_seconds):
                head = await client.head(TOKENIZER_PATH)
            sha256 = head.headers.get("etag", "").strip('"')
            if head.is_success and sha256 and sha256 != self._refused_tokenizer_sha256:
                await self._take_tokenizer(client, sha256)

    async def _take_tokenizer(self, client: httpx.AsyncClient, sha256: str) -> None:
        """Raises:
        WorkerLostError: no text can be made with it.
        """

        async def fetch() -> bytes:
            with anyio.fail_after(TOKENIZER_TIMEOUT_SECONDS):
                response = await client.get(TOKENIZER_PATH)
            response.raise_for_status()
            return response.content

        try:
            await self._listener.on_tokenizer(sha256, fetch)
        except (StallfreeError, httpx.HTTPError, TimeoutError):
            raise
        except Exception as error:
            if sha256 != self._refused_tokenizer_sha256:
                self._refused_tokenizer_sha256 = sha256
                fields = {"worker": self.url, "tokenizer_sha256": sha256}
                _logger.exception("model cannot be served", extra=fields)
            raise WorkerLostError(f"the worker's model cannot be served: {error}") from error

    async def _watch_silence(self, life: _Life) -> Never:
        """Measures silence in ticks of this router's own event loop: where that is late itself, as under load, the
        frames lie unread in the socket and the worker is not to blame.

        Raises:
            WorkerTimeoutError: no frame for the silence timeout.
        """
        num_silent_ticks = 0
        while num_silent_ticks < SILENCE_TICKS:
            num_frames = life.num_frames
            await asyncio.sleep(self._settings.silence_timeout_seconds / SILENCE_TICKS)
            num_silent_ticks = num_silent_ticks + 1 if life.num_frames == num_frames else 0
        self._end(life)
        raise WorkerTimeoutError(f"the worker was silent for {self._settings.silence_timeout_seconds:g} seconds")

    async def _read_frames(self, life: _Life) -> None:
        request = life.client.stream(
            "GET",
            FRAMES_PATH,
            params={"connection_id": life.connection_id},
            timeout=httpx.Timeout(None, connect=self._settings.connect_timeout_seconds),
        )
        async with request as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
            response.raise_for_status()
            async for line in read_lines(response):
                life.num_frames += 1
                self._take(life, Frame.model_validate_json(line), time.monotonic())

    def _take(self, life: _Life, frame: Frame, received_at: float) -> None:
        for event in frame.events:
            # Absent: an attempt that was given up, or an older one of the request. Its tokens are nobody's (C02).
            attempt = life.attempt_by_key.get((event.request_id, event.attempt))
            if attempt is not None and not attempt.take(event, received_at):
                self._give_up(life, attempt)
        if frame.status is not None:
            if not life.has_status:
                life.has_status = True
                self._life = life
                _logger.info("worker connected", extra={"worker": self.url})
            self._listener.on_status(self, frame.status)


def _first(group: BaseExceptionGroup[StallfreeError]) -> StallfreeError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """One for all lives: reading the certificates takes tens of milliseconds, in which no token would move."""
    return ssl.create_default_context()
