"""The runs of `stalls` as a Markdown table, as JSON, and as a picture. Pure: from figures to text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stallfree_loadtest.fleet import Configuration
from stallfree_loadtest.measures import Spread, spread, summarize_gaps
from stallfree_loadtest.picture import Line, Mark, Panel, Row, draw
from stallfree_loadtest.report import markdown_table, spread_text, summary_row
from stallfree_loadtest.stalls import StallLoad, StallRun

_HEADERS = (
    "configuration", "before: P50 ms", "P99 TBT ms", "max TBT ms", "stalled s", "tokens meanwhile", "long TTFT s"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """One contender over its rounds."""

    name: str
    configuration: Configuration | None
    num_runs: int
    p50_before: Spread
    p99: Spread
    max: Spread
    stalled: Spread
    num_tokens: Spread
    ttft: Spread
    """Infinite where patience ended first."""
    num_streams_ended: int
    """Most of any run."""


def stalls_report(runs: Sequence[StallRun], load: StallLoad, *, tbt_target_seconds: float) -> str:
    """A table with one line a configuration, what it was measured on, and how `auto` did against its targets."""
    figures = _figures(runs, tbt_target_seconds=tbt_target_seconds)
    rows = [
        (
            each.name,
            spread_text(each.p50_before, digits=0, factor=1000),
            spread_text(each.p99, digits=0, factor=1000),
            spread_text(each.max, digits=0, factor=1000),
            spread_text(each.stalled, digits=2),
            spread_text(each.num_tokens, digits=0),
            _ttft_text(each.ttft, load),
        )
        for each in figures
    ]
    told = (
        f"{load.num_streams} streams with a context of {load.context_tokens} tokens decode when a prompt of "
        f"{load.long_tokens:,} tokens arrives; figures between its sending and its first token. Medians [least..most] "
        f"of {max(each.num_runs for each in figures)} runs; stalled: beyond {tbt_target_seconds * 1000:g} ms, summed "
        "over the streams."
    )
    sections = (told, markdown_table(_HEADERS, rows), *_notes(figures), *_verdicts(figures))
    return "\n\n".join(sections)


def stalls_picture(runs: Sequence[StallRun], load: StallLoad, *, tbt_target_seconds: float, title: str) -> str:
    """An SVG: P99 and longest gap on the left, the long prompt's TTFT on the right."""
    figures = _figures(runs, tbt_target_seconds=tbt_target_seconds)
    targets = {_target(each) or tbt_target_seconds for each in figures}
    tbt = Panel(
        title="longest waits of the streams: time between tokens",
        unit="seconds",
        is_logarithmic=True,
        lines=tuple(Line(at=target, label=f"{target:g} s") for target in sorted(targets)),
        series=("P99", "max"),
        rows=tuple(_row(each.name, each.p99, each.max) for each in figures),
    )
    ttft = Panel(
        title=f"prompt of {load.long_tokens:,} tokens: time to first token",
        unit="seconds",
        is_logarithmic=True,
        series=("TTFT",),
        rows=tuple(_row(each.name, each.ttft) for each in figures),
    )
    note = f"Dots: medians of {max(each.num_runs for each in figures)} runs; bars: least to most."
    return draw(title, (tbt, ttft), note=note)


def run_row(run: StallRun, *, tbt_target_seconds: float) -> dict[str, object]:
    """One run for JSON, with every gap of the streams during the prefill."""
    return {
        "kind": "run",
        "contender": run.contender,
        "round": run.round_number,
        "before": summary_row(summarize_gaps(run.before, tbt_target_seconds=tbt_target_seconds)),
        "during": summary_row(summarize_gaps(run.during, tbt_target_seconds=tbt_target_seconds)),
        "tokens_during": run.num_tokens_during,
        "streams_ended": run.num_streams_ended,
        "ttft_seconds": None if run.ttft_seconds is None else round(run.ttft_seconds, 6),
        "gap_seconds_during": [round(gap.seconds, 6) for gap in run.during],
    }


def _figures(runs: Sequence[StallRun], *, tbt_target_seconds: float) -> list[_Figures]:
    by_name: dict[str, list[StallRun]] = {}
    for run in runs:
        by_name.setdefault(run.contender, []).append(run)
    return [_figures_of(found, tbt_target_seconds=tbt_target_seconds) for found in by_name.values()]


def _figures_of(runs: Sequence[StallRun], *, tbt_target_seconds: float) -> _Figures:
    before = [summarize_gaps(run.before, tbt_target_seconds=tbt_target_seconds) for run in runs]
    during = [summarize_gaps(run.during, tbt_target_seconds=tbt_target_seconds) for run in runs]
    return _Figures(
        name=runs[0].contender,
        configuration=runs[0].configuration,
        num_runs=len(runs),
        p50_before=spread(summary.tbt_seconds.p50 for summary in before),
        p99=spread(summary.tbt_seconds.p99 for summary in during),
        max=spread(summary.tbt_seconds.max for summary in during),
        stalled=spread(summary.stall_seconds for summary in during),
        num_tokens=spread(run.num_tokens_during for run in runs),
        ttft=spread(math.inf if run.ttft_seconds is None else run.ttft_seconds for run in runs),
        num_streams_ended=max(run.num_streams_ended for run in runs),
    )


def _ttft_text(ttft: Spread, load: StallLoad) -> str:
    return spread_text(ttft, digits=2).replace("inf", f">{load.patience_seconds:g}")


def _notes(figures: Sequence[_Figures]) -> list[str]:
    """What a reader must know of configurations in which streams ended before the long prompt had its first token."""
    notes = []
    for each in figures:
        if each.num_streams_ended and _rule(each) == "faster_transformer":
            notes.append(f"{each.name} admits nothing while a batch runs: the prompt waited for its end.")
        elif each.num_streams_ended:
            notes.append(
                f"Careful: with {each.name}, {each.num_streams_ended} streams ended before the prompt's "
                "first token; let them write more tokens."
            )
    return notes


def _verdicts(figures: Sequence[_Figures]) -> list[str]:
    """For every `auto` with a target of its own: is it kept, and at what price."""
    lines = []
    unchunked = [each.ttft.median for each in figures if _rule(each) in ("orca", "vllm")]
    for each in figures:
        target = _target(each)
        if target is None:
            continue
        kept = "kept in every run" if each.p99.high <= target else f"not kept: P99 up to {each.p99.high * 1000:.0f} ms"
        keeping = [other for other in figures if other.p99.high <= target]
        prices = [
            *_price(each, [other for other in keeping if _is_fixed(other)], "the best number that keeps it"),
            *_price(each, [other for other in keeping if other.configuration is None], "the best peer that keeps it"),
        ]
        prices += [f"{each.ttft.median / min(unchunked):.2f} x unchunked"] if unchunked else []
        price = f"; TTFT {', '.join(prices)}" if prices else ""
        lines.append(f"- {each.name}: target {kept}{price}")
    return ["\n".join(lines)] if lines else []


def _price(figures: _Figures, others: Sequence[_Figures], what: str) -> list[str]:
    """The TTFT beside the least of some others', where there are any."""
    best = min(others, key=lambda other: other.ttft.median, default=None)
    return [] if best is None else [f"{figures.ttft.median / best.ttft.median:.2f} x {best.name}, {what}"]


def _is_fixed(figures: _Figures) -> bool:
    return figures.configuration is not None and (figures.configuration.budget or "").isdecimal()


def _rule(figures: _Figures) -> str | None:
    return None if figures.configuration is None else figures.configuration.rule


def _target(figures: _Figures) -> float | None:
    return None if figures.configuration is None else figures.configuration.tbt_target_seconds


def _row(label: str, *spreads: Spread) -> Row:
    return Row(label=label, marks=tuple(Mark(median=each.median, low=each.low, high=each.high) for each in spreads))
