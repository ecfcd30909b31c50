"""What `follow` shows: how many steps the token budget needs to follow a change, and how well steps are predicted.

Pure: from stamps and steps to figures and text. Steps are counted by the tokens of the first stream, one a step; every
gap of a stream belongs to the step whose token of the first stream came closest to the gap's end.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from stallfree_loadtest.follow import FollowLoad, FollowResult, Phase
from stallfree_loadtest.measures import gaps, quantile
from stallfree_loadtest.pages import WorkerStep
from stallfree_loadtest.report import markdown_table, request_row, without_nan

_HEADERS = (
    "the load changes", "streams", "steps", "steps until back", "P99 TBT then ms", "worst TBT ms", "decodes alone ms",
    "prefill tok/s", "error P50", "error P95",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """|predicted - real| / real of step times; NaN without steps."""

    num_steps: int
    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    name: str
    num_streams: int
    num_steps: int
    steps_until_back: int | None
    """Steps after the change until the P99 of all gaps in a window of steps is within the target; None: never."""
    p99_then_seconds: float
    """Of all gaps from then to the phase's end; NaN where it never came."""
    worst_seconds: float
    decode_step_seconds: float
    """Median of steps without prefill: no budget brings TBT below it; NaN without such a step."""
    prefill_tokens_per_second: float
    errors: StepErrors


def phase_figures(result: FollowResult, *, tbt_target_seconds: float, window_steps: int) -> list[PhaseFigures]:
    """One for each phase."""
    counted = _gaps_by_step(result)
    found = []
    for phase, following in zip(result.phases, (*result.phases[1:], None), strict=True):
        end = math.inf if following is None else following.began_at
        last_id = math.inf if following is None else following.last_step_id_before
        by_step = [found_gaps for ended_at, found_gaps in counted if phase.began_at < ended_at <= end]
        steps = [step for step in result.steps if phase.last_step_id_before < step.step_id <= last_id]
        found.append(_figures_of(phase, by_step, steps, target=tbt_target_seconds, window_steps=window_steps))
    return found


def steps_until_within(by_step: Sequence[Sequence[float]], *, target: float, window_steps: int) -> int | None:
    """The least number of steps after which the P99 of the gaps in the next `window_steps` steps is within `target`.
    None: there is no such window, or no gaps."""
    for start in range(len(by_step) - window_steps + 1):
        window = sorted(gap for found in by_step[start : start + window_steps] for gap in found)
        if window and quantile(window, 0.99) <= target:
            return start
    return None


def step_errors(steps: Iterable[WorkerStep]) -> StepErrors:
    errors = sorted(abs(step.predicted_seconds - step.seconds) / step.seconds for step in steps if step.seconds > 0)
    return StepErrors(num_steps=len(errors), median=quantile(errors, 0.5), p95=quantile(errors, 0.95))


def follow_report(result: FollowResult, load: FollowLoad, *, tbt_target_seconds: float, window_steps: int) -> str:
    """A table with one line a phase, and what its columns mean."""
    figures = phase_figures(result, tbt_target_seconds=tbt_target_seconds, window_steps=window_steps)
    whole = step_errors(result.steps)
    told = (
        f"TBT target {tbt_target_seconds * 1000:g} ms; all the time one prompt of {load.trickle_tokens} tokens after "
        f"the other is computed ({result.num_prefills} in all). Steps until back: after the change, until the P99 of "
        f"all streams' gaps within {window_steps} steps is within the target. Decodes alone: median of the steps "
        "without prefill. Error: |predicted - real| / real of the step times."
    )
    last = (
        f"Step model over all {whole.num_steps:,} steps: median error {whole.median:.1%}, P95 {whole.p95:.1%}"
        f"{f'; {result.num_missed_steps} steps were not seen' if result.num_missed_steps else ''}."
    )
    return "\n\n".join((told, markdown_table(_HEADERS, [_table_row(each) for each in figures]), last))


def result_rows(result: FollowResult, *, tbt_target_seconds: float, window_steps: int) -> Iterator[dict[str, object]]:
    """For JSON: a row a phase, the errors over all, a row a step, a row a stream with its stamps."""
    for figures in phase_figures(result, tbt_target_seconds=tbt_target_seconds, window_steps=window_steps):
        yield {"kind": "phase", **without_nan(asdict(figures))}
    yield {"kind": "errors", **without_nan(asdict(step_errors(result.steps))), "missed": result.num_missed_steps}
    yield from ({"kind": "step", **asdict(step)} for step in result.steps)
    zero = result.phases[0].began_at
    yield from ({"kind": "request", **request_row(trace, zero=zero)} for trace in result.streams)


def _gaps_by_step(result: FollowResult) -> list[tuple[float, list[float]]]:
    """For every step that the first stream counts, its end and the gaps of all streams that ended with it."""
    ends = [stamp.at for stamp in result.streams[0].stamps]
    by_step: list[tuple[float, list[float]]] = [(end, []) for end in ends]
    for trace in result.streams:
        for gap in gaps(trace):
            place = bisect.bisect_left(ends, gap.ended_at)
            nearest = min(
                range(max(0, place - 1), min(place + 1, len(ends))), key=lambda i: abs(ends[i] - gap.ended_at)
            )
            by_step[nearest][1].append(gap.seconds)
    return by_step


def _figures_of(
    phase: Phase, by_step: Sequence[Sequence[float]], steps: Sequence[WorkerStep], *, target: float, window_steps: int
) -> PhaseFigures:
    back = steps_until_within(by_step, target=target, window_steps=window_steps)
    then = [] if back is None else sorted(gap for found in by_step[back:] for gap in found)
    alone = [step.seconds for step in steps if step.prefill_tokens == 0]
    seconds = math.fsum(step.seconds for step in steps)
    return PhaseFigures(
        name=phase.name,
        num_streams=phase.num_streams,
        num_steps=len(by_step),
        steps_until_back=back,
        p99_then_seconds=quantile(then, 0.99),
        worst_seconds=max((gap for found in by_step for gap in found), default=math.nan),
        decode_step_seconds=statistics.median(alone) if alone else math.nan,
        prefill_tokens_per_second=sum(step.prefill_tokens for step in steps) / seconds if seconds else math.nan,
        errors=step_errors(steps),
    )


def _table_row(figures: PhaseFigures) -> tuple[str, ...]:
    def text(value: float, *, factor: float = 1000) -> str:
        return "-" if math.isnan(value) else f"{value * factor:,.0f}"

    def share(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.1%}"

    return (
        figures.name,
        str(figures.num_streams),
        f"{figures.num_steps:,}",
        "never" if figures.steps_until_back is None else str(figures.steps_until_back),
        text(figures.p99_then_seconds),
        text(figures.worst_seconds),
        text(figures.decode_step_seconds),
        text(figures.prefill_tokens_per_second, factor=1),
        share(figures.errors.median),
        share(figures.errors.p95),
    )
