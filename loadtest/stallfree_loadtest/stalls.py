"""What a long prompt does to running streams, for one configuration, and other servers, after another.

A run: so many streams decode, all with the same context; then one long prompt is sent. The client's stamps tell how
long the streams waited between two tokens until the long prompt had its first token, and when it had it. Every round
measures each contender once, in the same order with the same prompts, so that a slow minute of the machine hits
all of them alike; no engine sees a prompt twice. Owns the order of the runs; `stalls_report` writes what came of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.contenders import Contender
from stallfree_loadtest.fleet import Configuration
from stallfree_loadtest.live import LiveRequests
from stallfree_loadtest.measures import Gap, gaps, split_around
from stallfree_loadtest.prompts import Vocabulary

_SETTLED_TOKENS = 8
_GATE_SECONDS = 0.5
_LONG_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLoad:
    num_streams: int
    context_tokens: int
    """Of each stream, when it begins to decode."""
    stream_tokens: int
    """Output of each stream: more than it gets during the prefill, so that it outlasts it. Request-level batching lets
    the long prompt wait until all of it is there."""
    long_tokens: int
    seconds_before: float
    """From when all streams decode to when the long prompt is sent."""
    patience_seconds: float
    """Most seconds that the long prompt's first token is waited for."""
    vocabulary: Vocabulary
    seed: int

    @property
    def max_model_len(self) -> int:
        """What the longest of the requests needs. Rules that reserve memory for the longest request that there may be
        would otherwise run out of it."""
        return max(self.context_tokens + self.stream_tokens, self.long_tokens + _LONG_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRun:
    """One contender in one round."""

    contender: str
    configuration: Configuration | None
    """None for a server that is not ours."""
    round_number: int
    before: tuple[Gap, ...]
    """The streams' gaps before the long prompt was sent, from when all of them decoded."""
    during: tuple[Gap, ...]
    """Those that touch the time between it and its first token."""
    num_tokens_during: int
    """That the streams got in this time."""
    num_streams_ended: int
    """Streams that were at their end before the long prompt's first token."""
    ttft_seconds: float | None
    """Of the long prompt; None where patience ended first."""


async def run_stalls(
    contenders: Sequence[Contender],
    load: StallLoad,
    *,
    rounds: int,
    on_run: Callable[[StallRun], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[StallRun]:
    """Runs every contender once a round. `on_run` gets each run as it ends.

    Raises:
        ClusterError, NotIdleError, PageError, PeerError: a contender could not be started or asked.
        RequestFailedError: a request failed.
    """
    runs: list[StallRun] = []
    for round_number in range(1, rounds + 1):
        for contender in contenders:
            async with contender.serving() as server:
                run = await _StallScenario(load, contender, round_number, clock=clock).run(server)
            runs.append(run)
            on_run(run)
    return runs


class _StallScenario:
    """Owns the requests of one run."""

    def __init__(self, load: StallLoad, contender: Contender, round_number: int, *, clock: Callable[[], float]) -> None:
        self._load = load
        self._contender = contender
        self._round_number = round_number
        self._clock = clock
        self._random = random.Random(f"{load.seed} {round_number}")

    async def run(self, server: Server) -> StallRun:
        load = self._load
        async with LiveRequests(server, clock=self._clock) as live:
            streams = await self._start_streams(live)
            await live.until(lambda: all(stream.num_tokens >= _SETTLED_TOKENS for stream in streams))
            settled_at = self._clock()
            await live.pause(load.seconds_before)
            long = live.start(self._request("long", load.long_tokens, _LONG_OUTPUT_TOKENS))
            num_ended = 0
            try:
                async with asyncio.timeout(load.patience_seconds):
                    await live.until(lambda: long.first_token_at is not None)
                    num_ended = sum(live.has_ended(stream) for stream in streams)
                    await _next_tokens(live, streams)
            except TimeoutError:
                pass  # the run tells it
        return self._result(streams, long, settled_at=settled_at, num_ended=num_ended)

    async def _start_streams(self, live: LiveRequests) -> list[CompletionStream]:
        """Sends the streams while another request computes, which leaves when all of them are there: request-level
        batching takes only those that wait when it begins a batch, and would leave out all but the first."""
        load = self._load
        gate = live.start(self._request("gate", load.context_tokens, load.stream_tokens))
        await live.until(lambda: gate.num_tokens > 0)
        streams = [
            live.start(self._request(f"stream-{number + 1}", load.context_tokens, load.stream_tokens))
            for number in range(load.num_streams)
        ]
        await live.pause(_GATE_SECONDS)
        await live.drop(gate)
        return streams

    def _request(self, name: str, num_prompt_tokens: int, max_tokens: int) -> CompletionRequest:
        prompt = self._load.vocabulary.draw(self._random, num_prompt_tokens)
        return CompletionRequest(request_id=name, role=name, prompt=prompt, max_tokens=max_tokens)

    def _result(
        self, streams: Sequence[CompletionStream], long: CompletionStream, *, settled_at: float, num_ended: int
    ) -> StallRun:
        trace, traces = long.trace(), [stream.trace() for stream in streams]
        first_token_at = trace.stamps[0].at if trace.stamps else None
        ended_at = trace.ended_at if first_token_at is None else first_token_at
        found = [gap for stream in traces for gap in gaps(stream) if gap.began_at >= settled_at]
        windows = split_around(found, began_at=trace.sent_at, ended_at=ended_at)
        stamps = [stamp for stream in traces for stamp in stream.stamps]
        return StallRun(
            contender=self._contender.name,
            configuration=self._contender.configuration,
            round_number=self._round_number,
            before=windows.before,
            during=windows.during,
            num_tokens_during=sum(stamp.num_tokens for stamp in stamps if trace.sent_at < stamp.at <= ended_at),
            num_streams_ended=num_ended,
            ttft_seconds=None if first_token_at is None else first_token_at - trace.sent_at,
        )


async def _next_tokens(live: LiveRequests, streams: Sequence[CompletionStream]) -> None:
    """Waits until every stream has one token more, or its end. A wait that the prefill began may end only then."""
    num_tokens = [stream.num_tokens for stream in streams]
    await live.until(
        lambda: all(
            stream.num_tokens > before or live.has_ended(stream)
            for stream, before in zip(streams, num_tokens, strict=True)
        )
    )
