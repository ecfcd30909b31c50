"""What `make demo` runs: answers stream, a long prompt arrives, and the stamps tell whether the answers went on.

Starts a cluster, measures as a client from outside, prints a report and stops everything. Owns the order of the demo;
`demo_report` writes what came of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.cluster import ClusterError, ClusterSettings, LocalCluster
from stallfree_loadtest.demo_texts import OPENINGS, long_text
from stallfree_loadtest.live import LiveRequests, RequestFailedError
from stallfree_loadtest.measures import RequestTrace, Windows, gaps, split_around
from stallfree_loadtest.pages import PageError, served_model, worker_totals

_SAMPLE_CHARS = 1200
_SETTLED_TOKENS = 8
_LONG_OUTPUT_TOKENS = 16
_OPENING_TOKENS = 128
"""Room that the longest opening needs, by any tokenizer."""


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    cluster: ClusterSettings
    num_streams: int
    long_tokens: int
    tbt_target_seconds: float
    seconds_before: float
    """From when all streams run to when the long prompt is sent."""
    seconds_after: float
    """From the long prompt's first token to the end of the streams."""
    timeout_seconds: float
    """Most seconds for all requests together, once the cluster serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """What one worker's own metrics say that it did."""

    name: str
    num_streams: int
    long_prompt_tokens: int
    """Prompt tokens that it took in since the streams ran: the long prompt's, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All that the report is made from."""

    streams: tuple[RequestTrace, ...]
    long: RequestTrace
    windows: Windows
    """The streams' gaps around the long prompt's prefill."""
    workers: tuple[WorkerShare, ...]
    phase_seconds: dict[str, float]


class Phases:
    """Owns the list of what took how long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._last_at = clock()
        self.seconds_by_name: dict[str, float] = {}

    def now(self) -> float:
        return self._clock()

    def end(self, name: str) -> None:
        now = self._clock()
        self.seconds_by_name[name] = now - self._last_at
        self._last_at = now

    @property
    def total_seconds(self) -> float:
        return self._clock() - self._began_at


async def run_demo(
    settings: DemoSettings, *, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
) -> DemoResult:
    """Starts everything, runs the requests, stops everything.

    Raises:
        ClusterError: a part could not be started.
        DemoError: a request failed, or the time was over; the message ends with the logs of parts in trouble.
    """
    phases = Phases(clock)

    def report(line: str) -> None:
        say(f"[{phases.total_seconds:6.1f} s] {line}")

    cluster = LocalCluster(settings.cluster, report=report)
    report(f"starting a store, {settings.cluster.num_workers} workers and a router; logs are in {cluster.log_dir}")
    report(f"the model is {settings.cluster.model}; its very first start may download or convert it")
    async with cluster:
        phases.end("start of the cluster")
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                result = await _Run(settings, cluster, phases=phases, report=report).run()
        except TimeoutError:
            raise DemoError(_with_logs(f"not done within {settings.timeout_seconds:g} s", cluster)) from None
        except (DemoError, PageError, RequestFailedError) as error:
            raise DemoError(_with_logs(str(error), cluster)) from None
    phases.end("stop of the cluster")
    return result


class _Run:
    """Owns the requests of one demo on a cluster that serves."""

    def __init__(
        self, settings: DemoSettings, cluster: LocalCluster, *, phases: Phases, report: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._phases = phases
        self._report = report
        self._server = Server(url=cluster.router_urls[0], model="", silence_timeout_seconds=settings.timeout_seconds)
        self._most_stream_tokens = 1

    async def run(self) -> DemoResult:
        await self._find_model()
        async with LiveRequests(self._server, clock=self._phases.now) as live:
            text = await self._long_text(live)
            self._phases.end("a sample of the long prompt")
            streams = self._start_streams(live)
            settled_at = await self._settle(live, streams)
            long, shares = await self._send_long(live, text)
            await live.pause(self._settings.seconds_after)
        self._phases.end("streams after the long prompt")
        traces = tuple(stream.trace() for stream in streams)
        found = [gap for trace in traces for gap in gaps(trace) if gap.began_at >= settled_at]
        windows = split_around(found, began_at=long.sent_at, ended_at=long.stamps[0].at)
        return DemoResult(
            streams=traces, long=long, windows=windows, workers=shares, phase_seconds=self._phases.seconds_by_name
        )

    async def _find_model(self) -> None:
        """Asks under which name the router serves the model, and how long its answers may get: as long as they can, so
        that none ends before the demo does."""
        model = await served_model(self._server.url)
        self._server = dataclasses.replace(self._server, model=model.name)
        self._most_stream_tokens = max(1, model.max_model_len - _OPENING_TOKENS)

    async def _long_text(self, live: LiveRequests) -> str:
        """A text of about as many tokens as wanted: a sample tells how many characters make a token."""
        sample = long_text(_SAMPLE_CHARS)
        self._report("a sample of the long prompt is sent, to count its tokens")
        stream = live.start(CompletionRequest(request_id="sample", prompt=sample, max_tokens=1))
        await live.until(lambda: live.has_ended(stream))
        num_tokens = stream.trace().prompt_tokens
        if not num_tokens:
            raise DemoError("the server told no usage.prompt_tokens for a sample of the long text")
        wanted = int(self._settings.long_tokens * len(sample) / num_tokens)
        return long_text(wanted)[:wanted]

    def _start_streams(self, live: LiveRequests) -> Sequence[CompletionStream]:
        self._report(f"{self._settings.num_streams} completions start to stream")
        return [
            live.start(self._stream_request(number), must_last=True) for number in range(self._settings.num_streams)
        ]

    def _stream_request(self, number: int) -> CompletionRequest:
        return CompletionRequest(
            request_id=f"stream-{number + 1}",
            role="stream",
            prompt=OPENINGS[number % len(OPENINGS)],
            max_tokens=self._most_stream_tokens,
            temperature=0.7,
            seed=number,
        )

    async def _settle(self, live: LiveRequests, streams: Sequence[CompletionStream]) -> float:
        """Waits until every stream runs. Returns the instant from which their gaps count."""
        await live.until(lambda: all(stream.num_tokens >= _SETTLED_TOKENS for stream in streams))
        settled_at = self._phases.now()
        self._phases.end("streams until all run")
        self._report(f"all streams run; the long prompt follows in {self._settings.seconds_before:g} s")
        await live.pause(self._settings.seconds_before)
        self._phases.end("streams before the long prompt")
        return settled_at

    async def _send_long(self, live: LiveRequests, text: str) -> tuple[RequestTrace, tuple[WorkerShare, ...]]:
        """Sends the long prompt, waits for its first token, then for its end."""
        before = await _worker_figures(self._cluster)
        self._report(f"a prompt of about {self._settings.long_tokens:,} tokens is sent")
        stream = live.start(
            CompletionRequest(request_id="long", role="long", prompt=text, max_tokens=_LONG_OUTPUT_TOKENS)
        )
        await live.until(lambda: live.has_ended(stream) or stream.first_token_at is not None)
        self._phases.end("prefill of the long prompt")
        self._report(f"it has its first token; the streams go on for {self._settings.seconds_after:g} s")
        await live.until(lambda: live.has_ended(stream))
        trace = stream.trace()
        if not trace.stamps:
            raise DemoError("the long prompt got no token")
        return trace, _shares(before, await _worker_figures(self._cluster))


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerFigures:
    name: str
    requests_running: int
    prompt_tokens: int


async def _worker_figures(cluster: LocalCluster) -> list[_WorkerFigures]:
    return [await _figures_of(worker.name, worker.url) for worker in cluster.workers]


async def _figures_of(name: str, url: str) -> _WorkerFigures:
    totals = await worker_totals(url)
    return _WorkerFigures(
        name=name,
        requests_running=int(totals.get("requests_running", 0)),
        prompt_tokens=int(totals.get("prompt_tokens_total", 0)),
    )


def _shares(before: Sequence[_WorkerFigures], after: Sequence[_WorkerFigures]) -> tuple[WorkerShare, ...]:
    return tuple(
        WorkerShare(
            name=early.name,
            num_streams=early.requests_running,
            long_prompt_tokens=late.prompt_tokens - early.prompt_tokens,
        )
        for early, late in zip(before, after, strict=True)
    )


def _with_logs(reason: str, cluster: LocalCluster) -> str:
    """The reason, and what is known of parts that have ended or logged an error."""
    troubled = [part.obituary() for part in cluster.parts if part.has_trouble]
    return "\n\n".join((f"{reason}; all logs are in {cluster.log_dir}", *troubled))


__all__ = ["ClusterError", "DemoError", "DemoResult", "DemoSettings", "run_demo"]
