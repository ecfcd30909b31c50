"""What mixing and chunking give, each alone and both together: table 4 of Sarathi-Serve (arXiv 2403.02310), §5.4.

Every configuration gets the same requests at the same instants: Poisson arrivals, an open loop, prompts and outputs
with a long tail. Orca's rule mixes whole prompts into the decodes, `chunked_only` never mixes its chunks, sarathi does
both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stallfree_loadtest import arrivals
from stallfree_loadtest.client import CompletionRequest
from stallfree_loadtest.fleet import Configuration, Fleet
from stallfree_loadtest.measures import LoadSummary, RequestTrace, Spread, Targets, spread, summarize
from stallfree_loadtest.open_loop import run_open_loop
from stallfree_loadtest.picture import Mark, Panel, Row, draw
from stallfree_loadtest.prompts import LongTail, Vocabulary
from stallfree_loadtest.report import markdown_table, spread_text, summary_row

_HEADERS = (
    "configuration", "TTFT P50 s", "TTFT P99 s", "TBT P50 ms", "TBT P99 ms", "TBT max ms", "stalled", "tokens a second",
    "failed",
)  # fmt: skip

_KIND_BY_RULE = {"orca": "mixed", "vllm": "neither", "chunked_only": "chunks", "sarathi": "both"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationLoad:
    num_requests: int
    rate_per_second: float
    prompts: LongTail
    outputs: LongTail
    vocabulary: Vocabulary
    seed: int

    @property
    def max_model_len(self) -> int:
        """What the longest request may need: Orca reserves memory for it, whatever a request really is."""
        return self.prompts.most + self.outputs.most

    def instants(self) -> Iterator[float]:
        return arrivals.limited(arrivals.poisson(self.rate_per_second, seed=self.seed), max_requests=self.num_requests)

    def requests(self, *, round_number: int) -> Iterator[CompletionRequest]:
        """Endless. Lengths are the same in every round; the tokens are not, so that no cached prefix helps."""
        lengths = random.Random(self.seed)
        tokens = random.Random(f"{self.seed} {round_number}")
        number = 0
        while True:
            number += 1
            num_prompt_tokens, max_tokens = self.prompts.draw(lengths), self.outputs.draw(lengths)
            yield CompletionRequest(
                request_id=f"request-{number}",
                prompt=self.vocabulary.draw(tokens, num_prompt_tokens),
                max_tokens=max_tokens,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    configuration: Configuration
    round_number: int
    summary: LoadSummary


async def run_ablation(
    fleet: Fleet,
    configurations: Sequence[Configuration],
    load: AblationLoad,
    *,
    rounds: int,
    targets: Targets,
    on_run: Callable[[AblationRun], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[AblationRun]:
    """Runs every configuration once a round. `on_run` gets each run as it ends.

    Raises:
        ClusterError, NotIdleError, PageError: a cluster could not be started or asked.
    """
    runs: list[AblationRun] = []
    for round_number in range(1, rounds + 1):
        for configuration in configurations:
            async with fleet.serving(configuration) as serving:
                traces: list[RequestTrace] = await run_open_loop(
                    [serving.server],
                    arrivals=load.instants(),
                    requests=load.requests(round_number=round_number),
                    clock=clock,
                )
            run = AblationRun(
                configuration=configuration, round_number=round_number, summary=summarize(traces, targets)
            )
            runs.append(run)
            on_run(run)
    return runs


def ablation_report(runs: Sequence[AblationRun], load: AblationLoad, *, tbt_target_seconds: float) -> str:
    """What was sent, and one line a configuration."""
    told = (
        f"{load.num_requests} requests, {load.rate_per_second:g} a second on average (Poisson, the same for all): "
        f"prompts of {load.prompts.median} tokens in the median and {load.prompts.p90} at P90, outputs of "
        f"{load.outputs.median} and {load.outputs.p90}; stalled: share of decoding time beyond gaps of "
        f"{tbt_target_seconds * 1000:g} ms."
    )
    rows = [_table_row(name, [run.summary for run in found]) for name, found in _by_name(runs).items()]
    return f"{told}\n\n{markdown_table(_HEADERS, rows)}"


def ablation_picture(runs: Sequence[AblationRun], *, title: str) -> str:
    """An SVG: P50 TTFT on the left, P99 TBT on the right, as the paper pairs them."""
    by_name = {name: [run.summary for run in found] for name, found in _by_name(runs).items()}
    ttft = Panel(
        title="median time to first token",
        unit="seconds",
        series=("TTFT P50",),
        rows=tuple(_row(name, (each.ttft_seconds.p50 for each in found)) for name, found in by_name.items()),
    )
    tbt = Panel(
        title="P99 time between tokens",
        unit="seconds",
        series=("TBT P99",),
        rows=tuple(_row(name, (each.gaps.tbt_seconds.p99 for each in found)) for name, found in by_name.items()),
    )
    num_rounds = max(run.round_number for run in runs)
    note = f"{runs[0].summary.num_requests} requests a run, {num_rounds} run{'s' * (num_rounds > 1)} each."
    return draw(title, (ttft, tbt), note=note)


def run_row(run: AblationRun) -> dict[str, object]:
    """One run for JSON."""
    return {
        "kind": "run",
        "configuration": run.configuration.name,
        "round": run.round_number,
        **summary_row(run.summary),
    }


def _by_name(runs: Sequence[AblationRun]) -> dict[str, list[AblationRun]]:
    found: dict[str, list[AblationRun]] = {}
    for run in runs:
        found.setdefault(_label(run.configuration), []).append(run)
    return found


def _label(configuration: Configuration) -> str:
    """`both: sarathi:256`: what of mixing and chunking it does, and its name."""
    kind = _KIND_BY_RULE.get(configuration.rule)
    return configuration.name if kind is None else f"{kind}: {configuration.name}"


def _table_row(name: str, summaries: Sequence[LoadSummary]) -> tuple[str, ...]:
    def seconds(values: Spread) -> str:
        return spread_text(values, digits=2)

    def milliseconds(values: Spread) -> str:
        return spread_text(values, digits=0, factor=1000)

    return (
        name,
        seconds(spread(each.ttft_seconds.p50 for each in summaries)),
        seconds(spread(each.ttft_seconds.p99 for each in summaries)),
        milliseconds(spread(each.gaps.tbt_seconds.p50 for each in summaries)),
        milliseconds(spread(each.gaps.tbt_seconds.p99 for each in summaries)),
        milliseconds(spread(each.gaps.tbt_seconds.max for each in summaries)),
        f"{spread(each.gaps.stalled_ratio for each in summaries).median:.1%}",
        f"{spread(each.output_tokens_per_second for each in summaries).median:.0f}",
        str(sum(each.num_failed for each in summaries)),
    )


def _row(label: str, values: Iterator[float]) -> Row:
    figures = spread(values)
    return Row(label=label, marks=(Mark(median=figures.median, low=figures.low, high=figures.high),))
