"""The demo's result, written so that a newcomer can read it. Pure: from figures to text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from stallfree_loadtest.demo import DemoResult, DemoSettings
from stallfree_loadtest.demo_texts import OPENINGS
from stallfree_loadtest.measures import Gap, RequestTrace, quantiles, summarize_gaps, time_to_first_token
from stallfree_loadtest.report import milliseconds, seconds_text, table

_WIDTH = 110


def demo_report(result: DemoResult, settings: DemoSettings) -> str:
    sections = (
        _headline(result, settings),
        _token_table(result, settings),
        _first_tokens(result),
        _workers(result),
        _texts(result.streams),
        _times(result),
    )
    return "\n\n".join(sections)


def _prefill_seconds(result: DemoResult) -> float:
    return time_to_first_token(result.long) or 0.0


def _headline(result: DemoResult, settings: DemoSettings) -> str:
    tbt = summarize_gaps(result.windows.during, tbt_target_seconds=settings.tbt_target_seconds).tbt_seconds
    sentence = (
        f"What this shows: {len(result.streams)} answers were being written when a prompt of "
        f"{result.long.prompt_tokens or 0:,} tokens arrived. It took {_prefill_seconds(result):.1f} s to read it, "
        f"chunk by chunk, and in that time the answers went on: they got {tbt.count:,} more tokens, the longest "
        f"wait for one was {milliseconds(tbt.max)} (target {milliseconds(settings.tbt_target_seconds)}). "
        f"{_what_one_piece_would_do(result)}"
    )
    return "\n".join((textwrap.fill(sentence, _WIDTH), *_too_slow(result, settings)))


def _what_one_piece_would_do(result: DemoResult) -> str:
    reader = max(result.workers, key=lambda share: share.long_prompt_tokens)
    if reader.num_streams == 0:
        return f"It was read by {reader.name}, which wrote none of the answers."
    return (
        f"It was read by {reader.name}, which wrote {reader.num_streams} of the answers: read in one piece, "
        "it would have let them stand still until its first token."
    )


def _too_slow(result: DemoResult, settings: DemoSettings) -> list[str]:
    """A hint, where the target cannot be met even without a long prompt."""
    tbt = summarize_gaps(result.windows.before, tbt_target_seconds=settings.tbt_target_seconds).tbt_seconds
    if not tbt.p50 > settings.tbt_target_seconds / 2:
        return []
    hint = (
        f"This machine is slow or busy: a token took {milliseconds(tbt.p50)} even before the long prompt came. "
        "Stop other work on it, or choose a larger --tbt-target."
    )
    return [textwrap.fill(hint, _WIDTH)]


def _token_table(result: DemoResult, settings: DemoSettings) -> str:
    windows = result.windows
    rows = [
        _token_row("before the long prompt", windows.before, settings),
        _token_row("during its prefill", windows.during, settings),
        _token_row("after its first token", windows.after, settings),
    ]
    headers = ("time between two tokens (TBT)", "tokens", "P50", "P99", "max", "stalls", "stall time")
    note = f"  A stall is the part of a wait beyond the target of {milliseconds(settings.tbt_target_seconds)}."
    return f"The {len(result.streams)} streams\n{table(headers, rows)}\n{note}"


def _token_row(name: str, found: Sequence[Gap], settings: DemoSettings) -> tuple[str, ...]:
    summary = summarize_gaps(found, tbt_target_seconds=settings.tbt_target_seconds)
    tbt = summary.tbt_seconds
    times = (milliseconds(tbt.p50), milliseconds(tbt.p99), milliseconds(tbt.max))
    return (name, str(tbt.count), *times, str(summary.num_stalls), seconds_text(summary.stall_seconds))


def _first_tokens(result: DemoResult) -> str:
    streams = quantiles(ttft for trace in result.streams if (ttft := time_to_first_token(trace)) is not None)
    long = _prefill_seconds(result)
    rows = [
        (
            f"the {len(result.streams)} streams",
            seconds_text(streams.p50),
            seconds_text(streams.p99),
            seconds_text(streams.max),
        ),
        (f"the long prompt ({result.long.prompt_tokens or 0:,} tokens)", *(seconds_text(long),) * 3),
    ]
    return table(("time to first token (TTFT)", "P50", "P99", "max"), rows)


def _workers(result: DemoResult) -> str:
    rows = [
        (
            share.name,
            str(share.num_streams),
            f"{share.long_prompt_tokens:,} tokens" if share.long_prompt_tokens else "-",
        )
        for share in result.workers
    ]
    return table(("who served what", "streams", "long prompt"), rows)


def _texts(streams: Sequence[RequestTrace]) -> str:
    lines = ["What the model wrote (the opening is ours, the rest after | is the model's)"]
    for number, trace in enumerate(streams):
        text = f"{OPENINGS[number % len(OPENINGS)]} | {' '.join(trace.text.split())}"
        lines.append(textwrap.shorten(f"{number + 1}. {text}", 3 * _WIDTH, placeholder=" …"))
    return "\n".join(
        textwrap.fill(line, _WIDTH, initial_indent="  ", subsequent_indent="     ") if index else line
        for index, line in enumerate(lines)
    )


def _times(result: DemoResult) -> str:
    rows = [(name, f"{seconds:.1f} s") for name, seconds in result.phase_seconds.items()]
    rows.append(("in total", f"{sum(result.phase_seconds.values()):.1f} s"))
    return table(("how long the demo took", ""), rows)
