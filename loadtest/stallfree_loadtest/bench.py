"""Prefill and decode speed through whole servers, ours and others that serve the same model, side by side.

Every contender is started, measured and ended once a round, each round beginning with another, so that whatever else
the machine does meets all of them; ratios are taken within a round. Prefill: tokens of a prompt over the time to its
one output token. Decode: tokens of all streams in the time that they take once all have begun. What the machine could
do at most is measured in every round too.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.contenders import Contender
from stallfree_loadtest.limits import Limits
from stallfree_loadtest.live import LiveRequests, RequestFailedError
from stallfree_loadtest.measures import Spread, spread
from stallfree_loadtest.peers import OURS
from stallfree_loadtest.picture import Mark, Panel, Row, draw
from stallfree_loadtest.prompts import Vocabulary
from stallfree_loadtest.report import markdown_table, spread_text

LIMIT = "limit"
"""In place of a contender's name."""
_REPEATED_PREFILLS = 3
_WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS = 64, 4
_LEAST_PREFILL_TOKENS_A_SECOND = 50
_MOST_DECODE_TOKENS_A_SECOND = 200
"""Of one stream. A machine outside these two needs more output tokens than are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    prefill_tokens: tuple[int, ...]
    decode_streams: tuple[int, ...]
    context_tokens: int
    decode_tokens: int
    """That a stream gets while it is measured, in the mean over all."""
    vocabulary: Vocabulary
    seed: int
    temperature: float = 0.0

    @property
    def measures(self) -> tuple[str, ...]:
        prefills = [f"prefill {count:,}" for count in self.prefill_tokens]
        return (*prefills, *[f"decode x {count}" for count in self.decode_streams])

    @property
    def max_model_len(self) -> int:
        outputs = [self.most_output_tokens(count) for count in self.decode_streams]
        return max([*self.prefill_tokens, *[self.context_tokens + count for count in outputs]]) + 1

    def limits(self, limits: Limits) -> Iterator[tuple[str, float]]:
        """Of every measure the tokens a second that the machine could give at most."""
        # while a stream is measured it grows
        context_tokens = self.context_tokens + self.decode_tokens // 2
        prefills = [limits.prefill_tokens_per_second(count) for count in self.prefill_tokens]
        decodes = [limits.decode_tokens_per_second(count, context_tokens) for count in self.decode_streams]
        return zip(self.measures, [*prefills, *decodes], strict=True)

    def most_output_tokens(self, num_streams: int) -> int:
        """The first streams go on while the last ones are still prefilled."""
        prefill_seconds = num_streams * self.context_tokens / _LEAST_PREFILL_TOKENS_A_SECOND
        tokens_meanwhile = math.ceil(prefill_seconds * _MOST_DECODE_TOKENS_A_SECOND / num_streams)
        return tokens_meanwhile + 4 * self.decode_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    contender: str
    round_number: int
    measure: str
    tokens_per_second: float


async def run_bench(
    contenders: Sequence[Contender],
    load: BenchLoad,
    *,
    rounds: int,
    on_run: Callable[[BenchRun], None],
    find_limits: Callable[[], Awaitable[Limits]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[BenchRun]:
    """Measures every contender once a round, and before them the machine's limits. `on_run` gets each figure as it
    comes.

    Raises:
        ClusterError, NotIdleError, PageError, PeerError: a contender could not be started or asked.
        LimitsError: what `find_limits` raises.
        RequestFailedError: a request failed.
    """
    runs: list[BenchRun] = []
    for round_number in range(1, rounds + 1):
        if find_limits is not None:
            for measure, limit in load.limits(await find_limits()):
                run = BenchRun(contender=LIMIT, round_number=round_number, measure=measure, tokens_per_second=limit)
                runs.append(run)
                on_run(run)
        first = (round_number - 1) % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            async with contender.serving() as server:
                scenario = _Scenario(load, server, seed=f"{load.seed} {round_number}", clock=clock)
                await scenario.warm_up()
                for measure, figure in scenario.figures():
                    run = BenchRun(
                        contender=contender.name,
                        round_number=round_number,
                        measure=measure,
                        tokens_per_second=await figure(),
                    )
                    runs.append(run)
                    on_run(run)
    return runs


class _Scenario:
    """Owns the requests of one contender's turn."""

    def __init__(self, load: BenchLoad, server: Server, *, seed: str, clock: Callable[[], float]) -> None:
        self._load = load
        self._server = server
        self._clock = clock
        self._random = random.Random(seed)
        self._num_requests = 0

    async def warm_up(self) -> None:
        await self._prefill(_WARM_UP_PROMPT_TOKENS, _WARM_UP_OUTPUT_TOKENS)

    def figures(self) -> Iterator[tuple[str, Callable[[], Awaitable[float]]]]:
        """Every measure's name, and what measures its tokens a second."""
        load = self._load
        figures = [partial(self._prefills, count) for count in load.prefill_tokens]
        figures += [partial(self._decode, count) for count in load.decode_streams]
        return zip(load.measures, figures, strict=True)

    async def _prefills(self, num_tokens: int) -> float:
        seconds = [await self._prefill(num_tokens, 1) for _ in range(_REPEATED_PREFILLS)]
        return num_tokens / statistics.median(seconds)

    async def _prefill(self, num_tokens: int, max_tokens: int) -> float:
        """Seconds to the first token of a prompt that is alone."""
        async with LiveRequests(self._server, clock=self._clock) as live:
            sent_at = self._clock()
            stream = live.start(self._request(num_tokens, max_tokens))
            await live.until(lambda: live.has_ended(stream))
            live.check()
            if stream.first_token_at is None:
                raise RequestFailedError(f"{stream.request.request_id} ended without a token")
            return stream.first_token_at - sent_at

    async def _decode(self, num_streams: int) -> float:
        """Tokens a second of streams that run side by side."""
        load = self._load
        async with LiveRequests(self._server, clock=self._clock) as live:
            streams = [
                live.start(self._request(load.context_tokens, load.most_output_tokens(num_streams)), must_last=True)
                for _ in range(num_streams)
            ]
            await live.until(lambda: all(stream.num_tokens > 0 for stream in streams))
            began_at, num_before = self._clock(), _num_tokens(streams)
            wanted = num_before + load.decode_tokens * num_streams
            await live.until(lambda: _num_tokens(streams) >= wanted)
            return (_num_tokens(streams) - num_before) / (self._clock() - began_at)

    def _request(self, num_prompt_tokens: int, max_tokens: int) -> CompletionRequest:
        self._num_requests += 1
        return CompletionRequest(
            request_id=f"request-{self._num_requests}",
            prompt=self._load.vocabulary.draw(self._random, num_prompt_tokens),
            max_tokens=max_tokens,
            temperature=self._load.temperature,
        )


def _num_tokens(streams: Sequence[CompletionStream]) -> int:
    return sum(stream.num_tokens for stream in streams)


def bench_report(runs: Sequence[BenchRun], load: BenchLoad) -> str:
    """What was measured: a column for each contender, what ours is to the best of the others, and to the limit."""
    names = _names(runs)
    peers = [name for name in names if name not in {OURS, LIMIT}]
    has_limit = LIMIT in names
    headers = ["tokens a second", *names]
    headers += [f"{OURS} to the best other"] if peers else []
    headers += [f"{OURS} to the {LIMIT}"] if has_limit else []
    rows = []
    for measure in load.measures:
        figures = {name: _figure(runs, name, measure) for name in names}
        row = [measure, *[spread_text(figures[name], digits=0) for name in names]]
        if peers:
            best = max(peers, key=lambda name: figures[name].median)
            row.append(f"{spread_text(_ratios(runs, measure, to=best), digits=2)} x {best}")
        if has_limit:
            row.append(spread_text(_ratios(runs, measure, to=LIMIT), digits=2))
        rows.append(row)
    told = (
        f"Prefill: a prompt alone. Decode: streams with a context of {load.context_tokens:,} tokens, "
        f"{load.decode_tokens} tokens each, temperature {load.temperature:g}. Medians [least..most] of "
        f"{max(run.round_number for run in runs)} rounds; ratios are those of each round."
    )
    if has_limit:
        told += (
            f" The {LIMIT} is what the machine could give: the larger of the time to read all weights, keys and values "
            "at its memory's speed, and the time of all products at the speed of large ones, both measured each round."
        )
    return f"{told}\n\n{markdown_table(headers, rows)}"


def bench_picture(runs: Sequence[BenchRun], load: BenchLoad, *, title: str) -> str:
    """An SVG: a row for each measure, a dot for each contender."""
    names = _names(runs)
    rows = []
    for measure in load.measures:
        figures = [_figure(runs, name, measure) for name in names]
        marks = [Mark(median=each.median, low=each.low, high=each.high) for each in figures]
        rows.append(Row(label=measure, marks=tuple(marks)))
    panel = Panel(
        title="more is better", unit="tokens a second", series=tuple(names), rows=tuple(rows), is_logarithmic=True
    )
    return draw(title, (panel,), note=f"Through whole servers; {max(run.round_number for run in runs)} rounds.")


def _names(runs: Sequence[BenchRun]) -> list[str]:
    """Of all contenders, the limit last."""
    names = dict.fromkeys(run.contender for run in runs)
    return sorted(names, key=lambda name: name == LIMIT)


def run_row(run: BenchRun) -> dict[str, object]:
    """One figure for JSON."""
    return {
        "kind": "figure",
        "contender": run.contender,
        "round": run.round_number,
        "measure": run.measure,
        "tokens_per_second": run.tokens_per_second,
    }


def _ratios(runs: Sequence[BenchRun], measure: str, *, to: str) -> Spread:
    """Ours to another, round by round: what the machine does for a while meets both."""
    own, other = (_by_round(runs, name, measure) for name in (OURS, to))
    return spread(own[number] / other[number] for number in own.keys() & other.keys())


def _figure(runs: Sequence[BenchRun], contender: str, measure: str) -> Spread:
    return spread(_by_round(runs, contender, measure).values())


def _by_round(runs: Sequence[BenchRun], contender: str, measure: str) -> dict[int, float]:
    return {
        run.round_number: run.tokens_per_second for run in runs if (run.contender, run.measure) == (contender, measure)
    }
