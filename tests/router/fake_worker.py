"""A worker without an engine that speaks the wire over real sockets, and can be told to misbehave.

In this process: `async with FakeWorker().serving() as url`. As a process of its own, to be killed or stopped:
`python -m tests.router.fake_worker --step-seconds 0.01`, which prints `listening URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import (
    FRAMES_PATH,
    MODEL_PATH,
    REQUESTS_PATH,
    TOKENIZER_PATH,
    ConnectionId,
    Frame,
    ModelCard,
    RequestId,
    SubmitAccepted,
    SubmitRequest,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from stallfree_shared.worker_status import StepTimeCoefficients, WorkerStatus

MODEL = "fake"
FIRST_TOKEN_ID = 1000
Key = tuple[RequestId, int]


@dataclass
class _Running:
    submit: SubmitRequest
    num_sent: int = 0
    has_told_prompt: bool = False


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class FakeWorker:
    """Emits token FIRST_TOKEN_ID + i as output token i of each request, one a step. Log-probabilities are minus the
    token id; those of a prompt come before, each in an event of its own."""

    def __init__(self, *, model: str = MODEL, step_seconds: float = 0.002, max_model_len: int = 10_000) -> None:
        self.card = ModelCard(
            model=model,
            max_model_len=max_model_len,
            vocab_size=5000,
            eos_token_ids=frozenset({2}),
            tokenizer_sha256="0",
        )
        self.step_seconds = step_seconds
        self.status_seconds = 0.1
        self.is_ready = True
        self.is_draining = False
        self.tells_prompt = True
        """Log-probabilities of prompts are told where they were asked for."""
        self.hold_at: int | None = None
        """No request gets an output token with this index or a higher one."""
        self.stop_at: int | None = None
        """Requests end by themselves with this many tokens."""
        self.error_at: tuple[int, ErrorInfo] | None = None
        """Requests end with this error in place of the token with this index."""
        self.answer_submit: Callable[[], Response | None] = lambda: None
        self.answer_model: Callable[[], Response | None] = lambda: None
        self.takes_submits = asyncio.Event()
        """While it is not set, submits wait before the worker looks at them."""
        self.takes_submits.set()
        self.submits: list[SubmitRequest] = []
        self.cancels: list[Key] = []
        self.running: dict[Key, _Running] = {}
        self._frames: dict[ConnectionId, asyncio.Queue[Frame | None]] = {}
        self._sequence = 0

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        listener = socket.create_server(("127.0.0.1", port))
        config = uvicorn.Config(
            self._app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        server = _Server(config)
        async with asyncio.TaskGroup() as tasks:
            steps = tasks.create_task(self._step_for_ever())
            serve = tasks.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                self.cut_frames()
                server.should_exit = True
                await asyncio.wait((serve,))
                steps.cancel()

    def cut_frames(self) -> None:
        """Ends all frame streams, as a worker does that dies."""
        for queue in self._frames.values():
            queue.put_nowait(None)

    def send(self, event: TokenEvent) -> None:
        """Any event, on all streams."""
        for queue in self._frames.values():
            queue.put_nowait(Frame(events=(event,)))

    def status(self) -> WorkerStatus:
        self._sequence += 1
        left = sum(running.submit.sampling.max_tokens - running.num_sent for running in self.running.values())
        return WorkerStatus(
            sequence=self._sequence,
            is_ready=self.is_ready,
            is_draining=self.is_draining,
            max_num_seqs=128,
            token_budget_tokens=512,
            kv_total_tokens=100_000,
            kv_free_tokens=100_000,
            requests_running=len(self.running),
            requests_waiting=0,
            prefill_tokens_left=0,
            expected_output_tokens_left=left,
            step_time=StepTimeCoefficients(base_seconds=0.01, seconds_per_token=0.0001),
        )

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(MODEL_PATH, self._get_model),
                Route(TOKENIZER_PATH, self._get_tokenizer),
                Route(FRAMES_PATH, self._get_frames),
                Route(REQUESTS_PATH, self._post_request, methods=["POST"]),
                Route(REQUESTS_PATH + "/{request_id}", self._delete_request, methods=["DELETE"]),
            ]
        )

    async def _get_model(self, request: Request) -> Response:
        return self.answer_model() or Response(self.card.model_dump_json(), media_type="application/json")

    async def _get_tokenizer(self, request: Request) -> Response:
        return Response(b"{}", headers={"etag": self.card.tokenizer_sha256})

    async def _get_frames(self, request: Request) -> Response:
        connection_id = ConnectionId(request.query_params["connection_id"])
        return StreamingResponse(self._stream(connection_id), media_type="application/jsonl")

    async def _stream(self, connection_id: ConnectionId) -> AsyncIterator[str]:
        queue = self._frames[connection_id] = asyncio.Queue()
        frame: Frame | None = Frame(status=self.status())
        try:
            while frame is not None:
                yield frame.model_dump_json() + "\n"
                try:
                    async with asyncio.timeout(self.status_seconds):
                        frame = await queue.get()
                except TimeoutError:
                    frame = Frame(status=self.status())
        finally:
            del self._frames[connection_id]
            for key, running in tuple(self.running.items()):
                if running.submit.connection_id == connection_id:
                    del self.running[key]

    async def _post_request(self, request: Request) -> Response:
        submit = SubmitRequest.model_validate_json(await request.body())
        self.submits.append(submit)
        await self.takes_submits.wait()
        answer = self.answer_submit()
        if answer is not None:
            return answer
        self.running[(submit.request_id, submit.attempt)] = _Running(submit)
        accepted = SubmitAccepted(status_sequence=self._sequence, tbt_target_seconds=submit.tbt_target_seconds or 0.2)
        return Response(accepted.model_dump_json(), status_code=202, media_type="application/json")

    async def _delete_request(self, request: Request) -> Response:
        key = RequestId(request.path_params["request_id"]), int(request.query_params["attempt"])
        self.cancels.append(key)
        self.running.pop(key, None)
        return Response(status_code=204)

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            for key, running in tuple(self.running.items()):
                self._tell_prompt(key, running)
                if self.hold_at is None or running.num_sent < self.hold_at:
                    self._emit(key, running)

    def _tell_prompt(self, key: Key, running: _Running) -> None:
        submit, queue = running.submit, self._frames.get(running.submit.connection_id)
        if not self.tells_prompt or running.has_told_prompt or queue is None or submit.sampling.prompt_logprobs is None:
            return
        running.has_told_prompt = True
        for token_id in submit.prompt_token_ids[1:]:
            told = (TokenLogprobs(logprob=-float(token_id)),)
            event = TokenEvent(request_id=key[0], attempt=key[1], index=0, token_ids=(), prompt_logprobs=told)
            queue.put_nowait(Frame(events=(event,)))

    def _emit(self, key: Key, running: _Running) -> None:
        submit, index = running.submit, running.num_sent
        queue = self._frames.get(submit.connection_id)
        if queue is None:
            return
        running.num_sent += 1
        num_tokens = min(submit.sampling.max_tokens, self.stop_at or submit.sampling.max_tokens)
        is_last = running.num_sent >= num_tokens
        usage = Usage(prompt_tokens=len(submit.prompt_token_ids), completion_tokens=running.num_sent, cached_tokens=1)
        event = TokenEvent(
            request_id=submit.request_id,
            attempt=submit.attempt,
            index=index,
            token_ids=(FIRST_TOKEN_ID + index,),
            logprobs=None
            if submit.sampling.logprobs is None
            else (TokenLogprobs(logprob=-float(FIRST_TOKEN_ID + index)),),
            finish_reason=None if not is_last else ("stop" if running.num_sent == self.stop_at else "length"),
            usage=usage if is_last or index == 0 else None,
        )
        if self.error_at is not None and self.error_at[0] == index:
            update = {
                "error": self.error_at[1],
                "token_ids": (),
                "logprobs": None,
                "finish_reason": None,
                "usage": None,
            }
            event = event.model_copy(update=update)
        if event.is_last:
            del self.running[key]
        queue.put_nowait(Frame(events=(event,)))


async def _main(step_seconds: float, hold_at: int | None) -> None:
    worker = FakeWorker(step_seconds=step_seconds)
    worker.hold_at = hold_at
    async with worker.serving() as url:
        sys.stdout.write(f"listening {url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--hold-at", type=int, default=None)
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.step_seconds, arguments.hold_at))
