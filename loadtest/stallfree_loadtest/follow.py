"""The load changes, and the token budget must follow: how many steps it takes until no stream waits too long again.

One worker with `auto` serves streams that decode, and one prompt after another besides, so that the budget has to be
limited in every step. The phases: few streams with a short context; many of them; some with a long context; another
process takes a core; it leaves. The client's stamps tell the gaps, the worker's own steps how well it predicts.
`follow_report` writes what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stallfree_loadtest.client import CompletionRequest, CompletionStream
from stallfree_loadtest.fleet import Serving
from stallfree_loadtest.live import LiveRequests
from stallfree_loadtest.measures import RequestTrace
from stallfree_loadtest.pages import WorkerStep, worker_steps
from stallfree_loadtest.process import ChildProcess
from stallfree_loadtest.prompts import Vocabulary

_POLL_SECONDS = 1.0
_BUSY_LOOP = (sys.executable, "-c", "while True: pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLoad:
    few_streams: int
    many_streams: int
    short_context_tokens: int
    long_context_streams: int
    """All but the few leave, and so many with a long context come."""
    long_context_tokens: int
    trickle_tokens: int
    """Length of the prompts that come one after the other all the time; each wants one token."""
    phase_seconds: float
    """How long each phase goes on once its streams decode."""
    vocabulary: Vocabulary
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of the run that begins with a change of the load."""

    name: str
    began_at: float
    last_step_id_before: int
    """The worker's newest step when it began; -1 before the first."""
    num_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowResult:
    phases: tuple[Phase, ...]
    streams: tuple[RequestTrace, ...]
    """The first decodes from begin to end and gets one token a step: its stamps count the steps."""
    steps: tuple[WorkerStep, ...]
    num_missed_steps: int
    """That the worker had forgotten before they were asked for."""
    num_prefills: int
    """Prompts of the trickle that got their token."""


class StepLog:
    """Owns the steps that a worker has told, each once."""

    def __init__(self, worker_url: str) -> None:
        self._url = worker_url
        self._step_by_id: dict[int, WorkerStep] = {}

    @property
    def steps(self) -> tuple[WorkerStep, ...]:
        return tuple(self._step_by_id[step_id] for step_id in sorted(self._step_by_id))

    @property
    def num_missed(self) -> int:
        ids = sorted(self._step_by_id)
        return ids[-1] - ids[0] + 1 - len(ids) if ids else 0

    async def poll(self) -> int:
        """Takes in what is new. Returns the newest step's id, -1 before the first step. Raises PageError."""
        self._step_by_id.update((step.step_id, step) for step in await worker_steps(self._url))
        return max(self._step_by_id, default=-1)

    async def keep_polling(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(_POLL_SECONDS)


async def run_follow(
    serving: Serving,
    load: FollowLoad,
    *,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> FollowResult:
    """Goes through all phases on a worker that is idle.

    Raises:
        RequestFailedError, PageError: a request failed, or the worker does not tell its steps.
    """
    async with LiveRequests(serving.server, clock=clock) as live:
        return await _Run(serving, load, live, report=report).run(serving.log_dir / "busy-process.log")


class _Run:
    """Owns the streams and phases of one run."""

    def __init__(
        self, serving: Serving, load: FollowLoad, live: LiveRequests, *, report: Callable[[str], None]
    ) -> None:
        self._load = load
        self._live = live
        self._report = report
        self._max_model_len = serving.max_model_len
        self._log = StepLog(serving.worker_url)
        self._random = random.Random(load.seed)
        self._started: list[CompletionStream] = []
        self._decoding: list[CompletionStream] = []
        self._phases: list[Phase] = []
        self._num_prefills = 0

    async def run(self, busy_loop_log: Path) -> FollowResult:
        load = self._load
        short, long = load.short_context_tokens, load.long_context_tokens
        async with _beside(self._trickle()), _beside(self._log.keep_polling()):
            await self._phase(
                f"{load.few_streams} streams, context {short}", add=load.few_streams, context_tokens=short
            )
            num_more = load.many_streams - load.few_streams
            await self._phase(f"{load.many_streams} streams", add=num_more, context_tokens=short)
            name = f"{load.few_streams} streams, and {load.long_context_streams} with context {long:,}"
            await self._phase(name, add=load.long_context_streams, context_tokens=long, keep=load.few_streams)
            with _busy_process(busy_loop_log):
                await self._phase("another process takes a core")
            await self._phase("that core is free again")
            await self._log.poll()
        return FollowResult(
            phases=tuple(self._phases),
            streams=tuple(stream.trace() for stream in self._started),
            steps=self._log.steps,
            num_missed_steps=self._log.num_missed,
            num_prefills=self._num_prefills,
        )

    async def _phase(self, name: str, *, add: int = 0, context_tokens: int = 0, keep: int | None = None) -> None:
        """Changes the load (drops all streams but `keep`, adds `add`) and lets it run for the length of a phase."""
        self._report(name)
        last_step_id = await self._log.poll()
        began_at = self._live.now()
        if keep is not None:
            await self._live.drop(*self._decoding[keep:])
            del self._decoding[keep:]
        for _ in range(add):
            self._add_stream(context_tokens)
        self._phases.append(
            Phase(name=name, began_at=began_at, last_step_id_before=last_step_id, num_streams=len(self._decoding))
        )
        await self._live.until(lambda: all(stream.first_token_at is not None for stream in self._decoding))
        await self._live.pause(self._load.phase_seconds)

    def _add_stream(self, context_tokens: int) -> None:
        request = CompletionRequest(
            request_id=f"stream-{len(self._started) + 1}",
            role="stream",
            prompt=self._load.vocabulary.draw(self._random, context_tokens),
            max_tokens=max(1, self._max_model_len - context_tokens),
        )
        stream = self._live.start(request, must_last=True)
        self._started.append(stream)
        self._decoding.append(stream)

    async def _trickle(self) -> None:
        """One prompt after the other, for ever."""
        while True:
            prompt = self._load.vocabulary.draw(self._random, self._load.trickle_tokens)
            name = f"prefill-{self._num_prefills + 1}"
            stream = self._live.start(CompletionRequest(request_id=name, role="prefill", prompt=prompt, max_tokens=1))
            await self._live.until(partial(self._live.has_ended, stream))
            self._num_prefills += 1


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs endless work beside the block. What it raises is raised at the end of the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def _busy_process(log_path: Path) -> Iterator[None]:
    """A process that takes as much of one core as it can get."""
    process = ChildProcess(_BUSY_LOOP, log_path=log_path)
    try:
        yield
    finally:
        process.kill()
