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
)
from stallfree_shared.worker_status import WorkerStatus
from stallfree_worker.engine.step import EngineEvent, NewRequest, StepRecord
from stallfree_worker.engine_messages import EngineReady, EngineReport
from stallfree_worker.engine_process import EngineProcess
from stallfree_worker.frame_stream import FrameStream
from stallfree_worker.metrics import Outcome, WorkerMetrics
from stallfree_worker.progress_watch import ProgressWatch
from stallfree_worker.request_timing import RequestTiming
from stallfree_worker.served_request import ServedRequest
from stallfree_worker.settings import SchedulerSettings, WorkerSettings
from stallfree_worker.status import StatusBook
from stallfree_worker.step_history import engine_request_id
from stallfree_worker.submit_checks import check_submit

_logger = logging.getLogger(__name__)

_BUSY_STATUS_INTERVAL_SECONDS = 0.1
_TICK_SECONDS = STATUS_INTERVAL_SECONDS / 2

_EventsByStream = dict[FrameStream, list[TokenEvent]]


class Connections:
    """See the module. `run` must be running for streams to hear of an idle or loading engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        engine: EngineProcess,
        drain: Drain,
        metrics: WorkerMetrics,
        on_step: Callable[[StepRecord], None] = lambda _record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_step` is told of every step that computed something, before its events leave. `clock` is the engine's:
        monotonic seconds."""
        self._settings = settings
        self._engine = engine
        self._drain = drain
        self._metrics = metrics
        self._on_step = on_step
        self._book = StatusBook(settings)
        self._watch = ProgressWatch(warning_seconds=settings.no_progress_warning_seconds)
        self._clock = clock
        self._streams: dict[ConnectionId, FrameStream] = {}
        self._requests: dict[RequestId, ServedRequest] = {}
        """By the id that the engine knows."""
        self._engine_ids: dict[tuple[RequestId, int], RequestId] = {}
        """By the router's request id and attempt."""
        self._serial = itertools.count(1)
        self._published_at = clock()

    @property
    def stuck_seconds(self) -> float:
        """How long there have been requests and no step."""
        return self._watch.stuck_seconds

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
            InvalidRequestError: what `submit_checks` refuses, or a request that is running already.
            UnavailableError: the engine is not ready, or there is no such stream.
            OverloadedError: too many requests are on their way to the engine.
            DrainingError: the worker takes no new requests.
        """
        stream = self._admit(submit)
        engine_id = engine_request_id(submit.request_id, submit.attempt, next(self._serial))
        new = _new_request(engine_id, submit, self._settings)
        with contextlib.ExitStack() as hold:
            hold.enter_context(self._drain.request())
            self._engine.submit(new)
            request = ServedRequest(
                engine_id=engine_id,
                request_id=submit.request_id,
                attempt=submit.attempt,
                num_prompt_tokens=len(submit.prompt_token_ids),
                stream=stream,
                timing=RequestTiming(received_at=self._clock()),
                hold=hold.pop_all(),
            )
        self._requests[engine_id] = request
        self._engine_ids[request.request_id, request.attempt] = engine_id
        stream.engine_ids.add(engine_id)
        return SubmitAccepted(status_sequence=self._book.count_submit(), tbt_target_seconds=new.tbt_target_seconds)

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Ends a request without an event. One that is not there is cancelled already."""
        engine_id = self._engine_ids.get((request_id, attempt))
        if engine_id is not None:
            self._cancel(self._requests[engine_id])

    # What the engine does

    def engine_ready(self, ready: EngineReady) -> None:
        self._book.engine_started(kv_cache_tokens=ready.kv_cache_tokens)
        self._metrics.set_kv_cache(
            num_blocks=ready.num_blocks, num_tokens=ready.kv_cache_tokens, num_bytes=ready.kv_cache_bytes
        )
        self._published_at = -math.inf  # the report that follows at once is news to everyone

    def engine_reported(self, report: EngineReport) -> None:
        """Turns a report into frames: one for each stream that has events in it, for all where a status is due."""
        self._metrics.observe_step(report.step)
        if report.step.record is not None:
            self._note_step(report.step.record)
        num_before = len(self._requests)
        is_news = self._book.engine_reported(report.step.status, submits_taken=report.submits_taken)
        events = self._route(report.step.events)
        is_news = is_news or len(self._requests) < num_before
        self._publish(events, with_status=is_news or self._is_status_due(_BUSY_STATUS_INTERVAL_SECONDS))

    def engine_lost(self) -> None:
        """Ends every request with an error that another worker may do better on."""
        self._book.engine_lost()
        self._metrics.forget_engine()
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
            self._look_for_progress()
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
        check_submit(submit, ready.card)
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

    def _note_step(self, record: StepRecord) -> None:
        self._watch.note_step(self._clock())
        for engine_id in record.preempted_request_ids:
            if engine_id in self._requests:
                self._requests[engine_id].timing.note_preemption(record.started_at)
        for engine_id, num_tokens, context_tokens in zip(
            record.request_ids, record.chunk_tokens, record.context_tokens, strict=True
        ):
            request = self._requests.get(engine_id)
            if request is not None:  # else it was cancelled while the step ran
                self._note_chunk(request.timing, record, num_computed=context_tokens + num_tokens)
        self._on_step(record)

    def _note_chunk(self, timing: RequestTiming, record: StepRecord, *, num_computed: int) -> None:
        is_first = timing.scheduling_delay_seconds is None
        timing.note_chunk(started_at=record.started_at, ended_at=record.ended_at, num_computed=num_computed)
        if is_first and timing.scheduling_delay_seconds is not None:
            self._metrics.scheduling_delay.observe(timing.scheduling_delay_seconds)

    def _look_for_progress(self) -> None:
        is_stuck_anew = self._watch.check(self._clock(), has_work=bool(self._requests))
        self._metrics.no_progress.set(self._watch.stuck_seconds)
        if is_stuck_anew:
            _logger.error("no progress: requests are here and nothing is computed", extra=self._needs())

    def _needs(self) -> dict[str, object]:
        """What the oldest request without a token asks for, or the oldest of all, and what there is."""
        status = self._make_status()
        requests = self._requests.values()
        head = next((request for request in requests if request.num_output_tokens == 0), next(iter(requests)))
        return {
            "request_id": head.request_id,
            "waiting_seconds": round(self._clock() - head.timing.received_at, 3),
            "needed_tokens": head.num_prompt_tokens + head.num_output_tokens,
            "kv_free_tokens": status.kv_free_tokens,
            "kv_total_tokens": status.kv_total_tokens,
            "requests_running": status.requests_running,
            "requests_waiting": status.requests_waiting,
            "submits_untaken": self._book.submits_untaken,
        }

    def _cancel(self, request: ServedRequest) -> None:
        self._engine.cancel(request.engine_id)
        self._end(request, "abort")

    def _end(self, request: ServedRequest, outcome: Outcome) -> None:
        """Forgets `request`. The one place where a request that was accepted ends."""
        del self._requests[request.engine_id]
        del self._engine_ids[request.request_id, request.attempt]
        request.stream.engine_ids.discard(request.engine_id)
        request.hold.close()
        now = self._clock()
        request.timing.note_end(now)
        self._metrics.observe_end(request.timing)
        if outcome != "rejected":  # a refusal has been counted with its reason
            self._metrics.count_outcome(outcome)
        _logger.info(
            "request finished",
            extra={
                "request_id": request.request_id,
                "attempt": request.attempt,
                "outcome": outcome,
                "prompt_tokens": request.num_prompt_tokens,
                "completion_tokens": request.num_output_tokens,
                "seconds": round(now - request.timing.received_at, 6),
            },
        )

    def _route(self, events: Sequence[EngineEvent]) -> _EventsByStream:
        events_by_stream: _EventsByStream = {}
        for event in events:
            request = self._requests.get(event.request_id)
            if request is not None:  # else it was cancelled while the step ran
                events_by_stream.setdefault(request.stream, []).append(self._note(request, event))
        return events_by_stream

    def _note(self, request: ServedRequest, event: EngineEvent) -> TokenEvent:
        if event.token_id is not None and event.output_index == 0:
            self._metrics.time_to_first_token.observe(self._clock() - request.timing.received_at)
        told = request.tell(event)
        if event.error is not None:
            self._end_by(request, event.error)
        elif event.finish_reason is not None:
            self._end(request, event.finish_reason)
        return told

    def _end_by(self, request: ServedRequest, error: ErrorInfo) -> None:
        if _is_refusal(error):
            self._metrics.count_refusal(error.code)
        self._end(request, "rejected" if _is_refusal(error) else "error")

    def _fail_all(self, error: StallfreeError) -> None:
        events: _EventsByStream = {}
        for request in tuple(self._requests.values()):
            events.setdefault(request.stream, []).append(request.failure(error.info))
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


def _new_request(engine_id: RequestId, submit: SubmitRequest, settings: SchedulerSettings) -> NewRequest:
    return NewRequest(
        request_id=engine_id,
        prompt_token_ids=submit.prompt_token_ids,
        sampling=submit.sampling,
        tbt_target_seconds=submit.tbt_target_seconds or settings.tbt_target_seconds,
        expected_output_tokens=submit.expected_output_tokens,
        ttft_target_seconds=submit.ttft_target_seconds or settings.ttft_target_seconds,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
    )


def _is_refusal(error: ErrorInfo) -> bool:
    """Whether the request was never begun: the client's mistake (4xx), or no room (429)."""
    return StallfreeError.from_info(error).http_status < StallfreeError.http_status
