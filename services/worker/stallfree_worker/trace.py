"""`--trace FILE`: every step as a Chrome trace, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

Written by the HTTP front, in a thread of its own: neither the event loop nor the engine ever waits for the disk. What
the thread cannot keep up with is dropped, and where the disk is full writing ends; both are counted and said in the
log, and serving goes on.

The file is a JSON array in Chrome's trace event format, in which the closing bracket may be missing, so it can be read
while the worker lives and after it was killed. It is bounded: at `max_bytes` it is renamed to FILE.1, in place of the
one before, and a new one begins. So there are always the newest `max_bytes` at least, and twice as many at most.

One row has the steps, with their schedule, execute and apply inside them, and the time between steps in which work
waited. Counters beside it show the tokens of each step by kind, predicted and real time, the requests, and the free KV
blocks; a preemption is an instant. A click on a step shows its chunks, its budget, and what was predicted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stallfree_worker.engine.step import StepRecord
from stallfree_worker.step_history import router_request_id, shown

_logger = logging.getLogger(__name__)

_MAX_UNWRITTEN_STEPS = 1024
_CLOSE_TIMEOUT_SECONDS = 5.0
_MICROSECONDS = 1e6
_MILLISECONDS = 1e3
_PROCESS = 1
_STEP_ROW = 1
_Event = dict[str, object]


class TraceFileError(Exception):
    """The file cannot be written; the message says which and why."""


class TraceWriter:
    """`add` steps, then `close`. Raises TraceFileError at once where the file cannot be opened."""

    def __init__(self, path: Path, *, max_bytes: int, on_dropped: Callable[[], None] = lambda: None) -> None:
        """`on_dropped` is called for each step that is not written, by whichever thread finds out."""
        self._path = path
        self._max_bytes = max_bytes
        self._on_dropped = on_dropped
        self._unwritten: queue.Queue[StepRecord | None] = queue.Queue(maxsize=_MAX_UNWRITTEN_STEPS)
        self._is_behind = False
        self._num_bytes = 0
        try:
            self._file = self._begin()
        except OSError as error:
            raise TraceFileError(f"cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord) -> None:
        """Hands over a step without waiting."""
        try:
            self._unwritten.put_nowait(record)
            self._is_behind = False
        except queue.Full:
            self._on_dropped()
            if not self._is_behind:
                _logger.warning("trace is behind: steps are dropped", extra={"path": str(self._path)})
            self._is_behind = True

    def close(self) -> None:
        """Returns when all that was added is written and the file is whole, or after a while where the disk hangs."""
        with contextlib.suppress(queue.Full):
            self._unwritten.put(None, timeout=_CLOSE_TIMEOUT_SECONDS)
        self._thread.join(timeout=_CLOSE_TIMEOUT_SECONDS)

    def _run(self) -> None:
        while (record := self._unwritten.get()) is not None:
            if self._file.closed:
                self._on_dropped()
            else:
                self._write_or_end(record)
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._end()

    def _write_or_end(self, record: StepRecord) -> None:
        try:
            self._write(record)
        except OSError:
            _logger.exception("trace ended: its file cannot be written", extra={"path": str(self._path)})
            self._give_up()
            self._on_dropped()

    def _give_up(self) -> None:
        """Leaves whole events behind: a disk that fills up takes a part of the last write."""
        if not self._file.closed:
            with contextlib.suppress(OSError), self._file:
                self._file.truncate(self._num_bytes)

    def _write(self, record: StepRecord) -> None:
        """One write a step, so that a worker which is killed leaves whole events."""
        data = b"".join(b",\n" + json.dumps(event).encode() for event in step_events(record))
        if self._num_bytes + len(data) > self._max_bytes:
            self._end()
            self._path.replace(f"{self._path}.1")
            self._file = self._begin()
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._num_bytes += len(data)

    def _begin(self) -> io.FileIO:
        head = b"[\n" + b",\n".join(json.dumps(event).encode() for event in _head_events())
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(io.FileIO(self._path, "w"))
            file.write(head)
            self._num_bytes = len(head)
            undo.pop_all()
        return file

    def _end(self) -> None:
        with self._file:
            self._file.write(b"\n]\n")


def _head_events() -> Iterator[_Event]:
    named = {"ph": "M", "pid": _PROCESS}
    yield {**named, "name": "process_name", "args": {"name": "stallfree-worker"}}
    yield {**named, "name": "thread_name", "tid": _STEP_ROW, "args": {"name": "steps"}}


def step_events(record: StepRecord) -> Iterator[_Event]:
    """One step as trace events. Chrome's unit of time is the microsecond."""
    starts_at = record.started_at
    if record.idle_seconds is not None:
        yield _slice("idle with work", starts_at - record.idle_seconds, record.idle_seconds)
    name = f"step: {record.num_decode_tokens} decodes + {record.num_prefill_tokens} prefill tokens"
    yield {**_slice(name, starts_at, record.seconds), "args": shown(record)}
    for part, seconds in (
        ("schedule", record.schedule_seconds),
        ("execute", record.execute_seconds),
        ("apply", record.apply_seconds),
    ):
        yield _slice(part, starts_at, seconds)
        starts_at += seconds
    for request_id in record.preempted_request_ids:
        instant = {"ph": "i", "s": "p", "name": "preemption", "args": {"request_id": router_request_id(request_id)}}
        yield _at(record.started_at, instant)
    yield from _counters(record)


def _counters(record: StepRecord) -> Iterator[_Event]:
    values: dict[str, dict[str, float]] = {
        "step tokens": {"decode": record.num_decode_tokens, "prefill": record.num_prefill_tokens},
        "step ms": {
            "predicted": record.predicted_seconds * _MILLISECONDS,
            "real": record.seconds * _MILLISECONDS,
        },
        "requests": {"running": record.requests_running, "waiting": record.requests_waiting},
        "free KV blocks": {"free": record.num_free_blocks},
    }
    for name, args in values.items():
        yield _at(record.started_at, {"ph": "C", "name": name, "args": args})


def _slice(name: str, started_at: float, seconds: float) -> _Event:
    return _at(started_at, {"ph": "X", "name": name, "dur": seconds * _MICROSECONDS})


def _at(instant: float, event: Mapping[str, object]) -> _Event:
    return {**event, "ts": instant * _MICROSECONDS, "pid": _PROCESS, "tid": _STEP_ROW}
