"""A worker with a scripted model as a real process, and a router's side of the wire on real sockets, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stallfree_shared.wire import (
    FRAMES_PATH,
    REQUESTS_PATH,
    ConnectionId,
    Frame,
    RequestId,
    SamplingParams,
    SubmitAccepted,
    SubmitRequest,
    TokenEvent,
)
from stallfree_shared.worker_status import WorkerStatus
from tests.support.waiting import wait_until, wait_until_sync

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """A running worker. Made by `scripted_worker`."""

    def __init__(self, process: subprocess.Popen[str], log: TextIO, url: str) -> None:
        self.process = process
        self.url = url
        self._log = log
        self._http = httpx.Client(base_url=url, timeout=5)

    def close(self) -> None:
        self._http.close()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._http.get(path, headers=headers)

    def is_ready(self) -> bool:
        return self.get("/readyz").status_code == 200

    def wait_until_ready(self) -> None:
        wait_until_sync(self.is_ready, 20, what="/readyz")

    def engine_pid(self) -> int:
        """The one child of the worker."""
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> list[int]:
        """The children of the worker: none while a lost engine is not yet started anew."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples `stallfree_worker_{name}` that have `labels`."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"stallfree_worker_{name}" and labels.items() <= sample.labels.items()
        )


@contextlib.contextmanager
def scripted_worker(
    *arguments: str, environment: Mapping[str, str] | None = None, wait: bool = True
) -> Iterator[WorkerProcess]:
    """Starts a worker, by default until it is ready, and ends it and its engine in any case."""
    command = [
        sys.executable,
        "-m",
        "tests.support.scripted_worker",
        "--host=127.0.0.1",
        "--port=0",
        "--model=scripted",
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(_end, process)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening "), f"no address but {line!r}"
            worker = WorkerProcess(process, log, line.split()[1])
            cleanup.callback(worker.close)
            if wait:
                worker.wait_until_ready()
            yield worker


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=8)
    assert process.stdout is not None
    process.stdout.close()


class WireClient:
    """One router's connection to a worker: what it sends, and every frame it has read. Made by `connect`."""

    _serial = itertools.count(1)

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.connection_id = ConnectionId(f"connection-{next(self._serial)}")
        self.frames: list[Frame] = []
        self._events: dict[tuple[RequestId, int], list[TokenEvent]] = {}
        self.has_ended = False
        """Whether the worker ended the stream whole."""

    @property
    def status(self) -> WorkerStatus:
        """The latest."""
        return next(frame.status for frame in reversed(self.frames) if frame.status is not None)

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        request_id: str | None = None,
        attempt: int = 1,
        max_tokens: int = 1000,
    ) -> RequestId:
        """Returns the request's id once it is accepted."""
        name = RequestId(request_id or f"request-{next(self._serial)}")
        response = await self.post(self.request(prompt, request_id=name, attempt=attempt, max_tokens=max_tokens))
        assert response.status_code == 202, response.text
        SubmitAccepted.model_validate_json(response.content)
        return name

    def request(
        self, prompt: Sequence[int], *, request_id: str = "request", attempt: int = 1, max_tokens: int = 1000
    ) -> SubmitRequest:
        return SubmitRequest(
            request_id=RequestId(request_id),
            attempt=attempt,
            connection_id=self.connection_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            expected_output_tokens=float(len(prompt)),
        )

    async def post(self, request: SubmitRequest) -> httpx.Response:
        return await self.http.post(REQUESTS_PATH, content=request.model_dump_json())

    async def cancel(self, request_id: RequestId, *, attempt: int = 1) -> None:
        response = await self.http.delete(f"{REQUESTS_PATH}/{request_id}", params={"attempt": attempt})
        assert response.status_code == 204

    def events(self, request_id: RequestId, *, attempt: int = 1) -> list[TokenEvent]:
        return self._events.get((request_id, attempt), [])

    def tokens(self, request_id: RequestId, *, attempt: int = 1) -> list[int]:
        return [token for event in self.events(request_id, attempt=attempt) for token in event.token_ids]

    async def end_of(self, request_id: RequestId, *, attempt: int = 1, timeout_seconds: float = 20) -> TokenEvent:
        """Returns a request's last event."""

        def has_ended() -> bool:
            events = self.events(request_id, attempt=attempt)
            return bool(events) and events[-1].is_last

        await wait_until(has_ended, timeout_seconds, what=f"the end of {request_id}")
        return self.events(request_id, attempt=attempt)[-1]

    def forget(self) -> None:
        """Drops what was read so far, the statuses too."""
        self.frames.clear()
        self._events.clear()

    def _note(self, frame: Frame) -> None:
        self.frames.append(frame)
        for event in frame.events:
            self._events.setdefault((event.request_id, event.attempt), []).append(event)

    async def read(self) -> None:
        """Reads frames until the worker ends the stream, or cuts it."""
        url = f"{FRAMES_PATH}?connection_id={self.connection_id}"
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            async with self.http.stream("GET", url) as response:
                assert response.headers["content-type"] == "application/x-ndjson"
                async for line in response.aiter_lines():
                    self._note(Frame.model_validate_json(line))
                self.has_ended = True


@contextlib.asynccontextmanager
async def connect(worker: WorkerProcess) -> AsyncIterator[WireClient]:
    """A connection whose first frame has arrived. Leaving closes the stream."""
    async with httpx.AsyncClient(base_url=worker.url, timeout=20) as http:
        client = WireClient(http)
        reading = asyncio.create_task(client.read())
        try:
            await wait_until(lambda: bool(client.frames) or reading.done(), what="the first frame")
            yield client
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
