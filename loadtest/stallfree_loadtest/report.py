"""Results for people (plain-text tables) and for programs (JSON lines). Used by `main` and `demo`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from stallfree_loadtest.measures import (
    GapSummary,
    LoadSummary,
    Quantiles,
    RequestTrace,
    Spread,
    Targets,
    time_per_output_token,
    time_to_first_token,
)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 2) -> str:
    """Columns as wide as they need to be: the first to the left, the others to the right."""
    lines = [tuple(headers), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    ruled = [lines[0], tuple("-" * width for width in widths), *lines[1:]]
    margin = " " * indent
    return "\n".join(margin + _aligned(line, widths).rstrip() for line in ruled)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; readable as plain text too."""
    lines = [tuple(headers), *(tuple(row) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(headers))]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    return "\n".join(f"| {_aligned(line, widths, gap=' | ')} |" for line in (lines[0], rule, *lines[1:]))


def _aligned(line: Sequence[str], widths: Sequence[int], *, gap: str = "  ") -> str:
    cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
    return gap.join((line[0].ljust(widths[0]), *cells))


def milliseconds(seconds: float) -> str:
    """`12.3 ms`, or `-` where there is no figure."""
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.1f} ms"


def seconds_text(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds:,.2f} s"


def spread_text(values: Spread, *, digits: int, factor: float = 1.0) -> str:
    """`0.20 [0.19..0.23]`: median, least, most, each times `factor`; where all look the same just that."""
    if math.isnan(values.median):
        return "-"
    median, low, high = (f"{value * factor:,.{digits}f}" for value in (values.median, values.low, values.high))
    return median if low == high else f"{median} [{low}..{high}]"


def quantile_cells(values: Quantiles) -> tuple[str, ...]:
    """Cells for P50, P90, P99, max."""
    return tuple(milliseconds(value) for value in (values.p50, values.p90, values.p99, values.max))


def load_report(summary: LoadSummary, targets: Targets) -> str:
    """The whole report of one load."""
    latency = table(
        ("latency", "samples", "P50", "P90", "P99", "max"),
        [
            (name, str(values.count), *quantile_cells(values))
            for name, values in (
                ("TTFT  request sent to first token", summary.ttft_seconds),
                ("TBT   between two tokens", summary.gaps.tbt_seconds),
                ("TPOT  mean of a request's later tokens", summary.tpot_seconds),
                ("client: sent later than due", summary.send_delay_seconds),
            )
        ],
    )
    ttft = "" if targets.ttft_seconds is None else f"first token within {milliseconds(targets.ttft_seconds)}, "
    figures = table(
        ("throughput", "", ""),
        [
            ("requests", f"{summary.num_finished} of {summary.num_requests} finished", f"{summary.num_failed} failed"),
            ("requests a second", f"{summary.requests_per_second:.2f}", f"goodput {summary.goodput_per_second:.2f}"),
            ("output tokens a second", f"{summary.output_tokens_per_second:,.1f}", ""),
            ("prompt tokens a second", f"{summary.prompt_tokens_per_second:,.1f}", ""),
            (f"stalls beyond {milliseconds(targets.tbt_seconds)}", f"{summary.gaps.num_stalls}", ""),
            ("stall time", f"{summary.gaps.stall_seconds:.3f} s", f"{summary.gaps.stalled_ratio:.2%} of decoding"),
            ("length of the load", seconds_text(summary.seconds), ""),
        ],
    )
    goodput = f"  goodput: {ttft}99 % of the gaps between tokens within {milliseconds(targets.tbt_seconds)}"
    notes = [goodput]
    if summary.num_miscounted:
        notes.append(
            f"  careful: {summary.num_miscounted} requests whose usage disagrees with the tokens counted here; the "
            "server tells no token_ids, so TBT is per event"
        )
    return "\n\n".join((latency, figures, "\n".join(notes)))


def write_json_lines(path: Path, traces: Sequence[RequestTrace], *, summary: dict[str, object]) -> None:
    """One line a request with all its stamps (seconds from the first request's start), then one with the summary."""
    zero = min((trace.sent_at for trace in traces), default=0.0)
    requests = ({"kind": "request", **request_row(trace, zero=zero)} for trace in traces)
    write_rows(path, (*requests, {"kind": "summary", **summary}))


def request_row(trace: RequestTrace, *, zero: float) -> dict[str, object]:
    """A request's trace for JSON; its text is left out. `stamps` holds pairs: seconds, tokens."""
    return {
        "id": trace.request_id,
        "role": trace.role,
        "outcome": trace.outcome,
        "error": trace.error,
        "finish_reason": trace.finish_reason,
        "due_seconds": _rounded(trace.due_at - zero),
        "sent_seconds": _rounded(trace.sent_at - zero),
        "ended_seconds": _rounded(trace.ended_at - zero),
        "ttft_seconds": _rounded(time_to_first_token(trace)),
        "tpot_seconds": _rounded(time_per_output_token(trace)),
        "prompt_tokens": trace.prompt_tokens,
        "completion_tokens": trace.completion_tokens,
        "counted_tokens": trace.num_tokens,
        "stamps": [[_rounded(stamp.at - zero), stamp.num_tokens] for stamp in trace.stamps],
    }


def summary_row(summary: LoadSummary | GapSummary) -> dict[str, object]:
    """A summary for JSON: NaN, which JSON does not know, is null."""
    return without_nan(asdict(summary))


def without_nan(row: Mapping[str, object]) -> dict[str, object]:
    """The row as JSON can hold it: what is not finite is null."""
    return {name: _without_nan(value) for name, value in row.items()}


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return without_nan(value)
    if isinstance(value, float):
        return _rounded(value) if math.isfinite(value) else None
    return value


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
