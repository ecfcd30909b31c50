"""Sole owner of the routers' frame streams, and of which request belongs to which stream.

Between the routes and the engine process: submits go in by `submit`, the engine's reports come back through the
`EngineListener` methods and leave as frames, at most one per stream and step. A request is forgotten the moment it
ends. All methods are called on the event loop, and none of them waits, so each leaves everything consistent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stallfree_shared.drain import Drain
from stallfree_shared.errors import (
    DrainingError,
    ErrorInfo,
    InvalidRequestError,
    OverloadedError,
    StallfreeError,
    UnavailableError,
    WorkerLostError,
)
from stallfree_shared.wire import (
    STATUS_INTERVAL_SECONDS,
    ConnectionId,
    Frame,
    RequestId,
    SubmitAccepted,
    SubmitRequest,
    TokenEvent,
    Usage,
)
from stallfree_shared.worker_status import WorkerStatus
from stallfree_worker.engine.step import EngineEvent, NewRequest
from stallfree_worker.engine_messages import EngineReady, EngineReport
from stallfree_worker.engine_process import EngineProcess
from stallfree_worker.frame_stream import FrameStream
from stallfree_worker.metrics import Outcome, WorkerMetrics
from stallfree_worker.settings import WorkerSettings
from stallfree_worker.status import StatusBook

_logger = logging.getLogger(__name__)

_BUSY_STATUS_INTERVAL_SECONDS = 0.1
_TICK_SECONDS = STATUS_INTERVAL_SECONDS / 2

_EventsByStream = dict[FrameStream, list[TokenEvent]]


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request that has not ended."""

    engine_id: RequestId
    """Never used again, so that late events of a cancelled request cannot reach a later one of the same name."""
    request_id: RequestId
    attempt: int
    num_prompt_tokens: int
    stream: FrameStream
    received_at: float
    hold: contextlib.ExitStack
    """Keeps the process from leaving; closed at the end."""
    num_output_tokens: int = 0


class Connections:
    """See the module. `run` must be running for streams to hear of an idle or loading engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        engine: EngineProcess,
        drain: Drain,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._drain = drain
        self._metrics = metrics
        self._book = StatusBook(settings)
        self._clock = clock
        self._streams: dict[ConnectionId, FrameStream] = {}
        self._requests: dict[RequestId, _Request] = {}
        """By the id that the engine knows."""
        self._engine_ids: dict[tuple[RequestId, int], RequestId] = {}
        """By the router's request id and attempt."""
        self._serial = itertools.count(1)
        self._published_at = clock()

    # What routers do

    def open(self, connection_id: ConnectionId) -> FrameStream:
        """A fresh stream, with the present status as its first frame.

        Raises:
            InvalidRequestError: the connection id is in use.
            DrainingError: the worker has left.
        """
        if connection_id in self._streams:
            raise InvalidRequestError(f"connection_id {connection_id!r} is in use", param="connection_id")
        if self._drain.left.is_set():
            raise DrainingError("this worker has left")
        stream = FrameStream(connection_id, max_frames_behind=self._settings.max_frames_behind)
        self._streams[connection_id] = stream
        stream.push(Frame(status=self._make_status()))
        return stream

    def close(self, stream: FrameStream) -> None:
        """Forgets `stream` and cancels all its requests. Does nothing for a stream that is closed already."""
        if self._streams.get(stream.connection_id) is stream:
            del self._streams[stream.connection_id]
        for engine_id in tuple(stream.engine_ids):
            self._cancel(self._requests[engine_id])

    def submit(self, submit: SubmitRequest) -> SubmitAccepted:
        """Hands a request to the engine, which may still refuse it: that comes as its only event.

        Raises:
            InvalidRequestError: a token id that the model does not know, or a request that is running already.
            UnavailableError: the engine is not ready, or there is no such stream.
            OverloadedError: too many requests are on their way to the engine.
            DrainingError: the worker takes no new requests.
        """
        stream = self._admit(submit)
        engine_id = RequestId(f"{submit.request_id}#{submit.attempt}#{next(self._serial)}")
        tbt_target_seconds = submit.tbt_target_seconds or self._settings.tbt_target_seconds
        with contextlib.ExitStack() as hold:
            hold.enter_context(self._drain.request())
            self._engine.submit(_new_request(engine_id, submit, tbt_target_seconds))
            request = _Request(
                engine_id=engine_id,
                request_id=submit.request_id,
                attempt=submit.attempt,
                num_prompt_tokens=len(submit.prompt_token_ids),
                stream=stream,
                received_at=self._clock(),
                hold=hold.pop_all(),
            )
        self._requests[engine_id] = request
        self._engine_ids[request.request_id, request.attempt] = engine_id
        stream.engine_ids.add(engine_id)
        return SubmitAccepted(status_sequence=self._book.count_submit(), tbt_target_seconds=tbt_target_seconds)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Ends a request without an event. One that is not there is cancelled already."""
        engine_id = self._engine_ids.get((request_id, attempt))
        if engine_id is not None:
            self._cancel(self._requests[engine_id])

    # What the engine does

    def engine_ready(self, ready: EngineReady) -> None:
        self._book.engine_started(block_size=ready.block_size)
        self._published_at = -math.inf  # the report that follows at once is news to everyone

    def engine_reported(self, report: EngineReport) -> None:
        """Turns a report into frames: one for each stream that has events in it, for all where a status is due."""
        self._metrics.observe_step(report.step)
        num_before = len(self._requests)
        is_news = self._book.engine_reported(report.step.status, submits_taken=report.submits_taken)
        events = self._route(report.step.events)
        is_news = is_news or len(self._requests) < num_before
        self._publish(events, with_status=is_news or self._is_status_due(_BUSY_STATUS_INTERVAL_SECONDS))

    def engine_lost(self) -> None:
        """Ends every request with an error that another worker may do better on."""
        self._book.engine_lost()
        self._fail_all(WorkerLostError("the engine of this worker is lost"))

    def engine_restarting(self) -> None:
        self._metrics.engine_restarts.inc()

    # What time does

    async def run(self) -> None:
        """Tells every stream the status often enough, whatever the engine does, until the worker leaves."""
        while not self._drain.left.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._drain.left.wait()
            if self._is_status_due(_TICK_SECONDS):
                self._publish({}, with_status=True)
        self._fail_all(WorkerLostError("this worker had to leave before the request ended"))
        for stream in self._streams.values():
            stream.end()

    # The parts

    def _admit(self, submit: SubmitRequest) -> FrameStream:
        """Refuses what the engine must not see. Returns the stream that the request's events will take."""
        ready = self._engine.ready
        if ready is None:
            raise UnavailableError(f"this worker cannot serve now: {self._engine.state}", retry_after_seconds=1)
        _check_token_ids(submit.prompt_token_ids, ready.card.vocab_size)
        if (submit.request_id, submit.attempt) in self._engine_ids:
            raise InvalidRequestError(
                f"request_id {submit.request_id!r} is running as attempt {submit.attempt} already", param="request_id"
            )
        stream = self._streams.get(submit.connection_id)
        if stream is None:
            raise UnavailableError(f"no frame stream is open as connection_id {submit.connection_id!r}")
        limit = self._settings.max_waiting_requests
        if self._book.submits_untaken >= limit:
            raise OverloadedError(f"{limit} requests are on their way to the engine", retry_after_seconds=1)
        return stream

    def _cancel(self, request: _Request) -> None:
        self._engine.cancel(request.engine_id)
        self._end(request, "abort")

    def _end(self, request: _Request, outcome: Outcome) -> None:
        """Forgets `request`. The one place where a request that was accepted ends."""
        del self._requests[request.engine_id]
        del self._engine_ids[request.request_id, request.attempt]
        request.stream.engine_ids.discard(request.engine_id)
        request.hold.close()
        self._metrics.count_outcome(outcome)
        _logger.info(
            "request finished",
            extra={
                "request_id": request.request_id,
                "attempt": request.attempt,
                "outcome": outcome,
                "prompt_tokens": request.num_prompt_tokens,
                "completion_tokens": request.num_output_tokens,
                "seconds": round(self._clock() - request.received_at, 6),
            },
        )

    def _route(self, events: Sequence[EngineEvent]) -> _EventsByStream:
        events_by_stream: _EventsByStream = {}
        for event in events:
            request = self._requests.get(event.request_id)
            if request is not None:  # else it was cancelled while the step ran
                events_by_stream.setdefault(request.stream, []).append(self._note(request, event))
        return events_by_stream

    def _note(self, request: _Request, event: EngineEvent) -> TokenEvent:
        """Takes `event` into account, and turns it into what the router reads."""
        if event.token_id is not None:
            request.num_output_tokens = event.index + 1
            if event.index == 0:
                self._metrics.time_to_first_token.observe(self._clock() - request.received_at)
        if event.error is not None:
            self._end(request, "rejected" if _is_refusal(event.error) else "error")
        elif event.finish_reason is not None:
            self._end(request, event.finish_reason)
        else:
            return _token_event(request, event)
        return _token_event(request, event, usage=_usage(request))

    def _fail_all(self, error: StallfreeError) -> None:
        events: _EventsByStream = {}
        for request in tuple(self._requests.values()):
            events.setdefault(request.stream, []).append(_failure(request, error.info))
            self._engine.cancel(request.engine_id)
            self._end(request, "error")
        self._publish(events, with_status=True)

    def _is_status_due(self, interval_seconds: float) -> bool:
        return self._clock() - self._published_at >= interval_seconds

    def _publish(self, events_by_stream: _EventsByStream, *, with_status: bool) -> None:
        status = self._make_status() if with_status else None
        if with_status:
            self._published_at = self._clock()
        for stream in tuple(self._streams.values()) if with_status else events_by_stream:
            if not stream.push(Frame(events=tuple(events_by_stream.get(stream, ())), status=status)):
                _logger.warning("frame stream cut: its router is too slow", extra={"connection": stream.connection_id})
                self.close(stream)

    def _make_status(self) -> WorkerStatus:
        status = self._book.make(is_ready=self._engine.is_ready, is_draining=self._drain.is_draining)
        self._metrics.set_state(status)
        return status


def _check_token_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    smallest, largest = min(token_ids), max(token_ids)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise InvalidRequestError(
            f"prompt_token_ids must lie in 0 to {vocab_size - 1}, and one is {wrong}", param="prompt_token_ids"
        )


def _new_request(engine_id: RequestId, submit: SubmitRequest, tbt_target_seconds: float) -> NewRequest:
    return NewRequest(
        request_id=engine_id,
        prompt_token_ids=submit.prompt_token_ids,
        sampling=submit.sampling,
        tbt_target_seconds=tbt_target_seconds,
        expected_output_tokens=submit.expected_output_tokens,
    )


def _is_refusal(error: ErrorInfo) -> bool:
    """Whether the request was never begun: the client's mistake (4xx), or no room (429)."""
    return StallfreeError.from_info(error).http_status < StallfreeError.http_status


def _usage(request: _Request) -> Usage:
    return Usage(prompt_tokens=request.num_prompt_tokens, completion_tokens=request.num_output_tokens)


def _token_event(request: _Request, event: EngineEvent, usage: Usage | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id,
        attempt=request.attempt,
        index=event.index,
        token_ids=() if event.token_id is None else (event.token_id,),
        finish_reason=event.finish_reason,
        usage=usage,
        error=event.error,
    )


def _failure(request: _Request, error: ErrorInfo) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id,
        attempt=request.attempt,
        index=request.num_output_tokens,
        token_ids=(),
        usage=_usage(request),
        error=error,
    )
