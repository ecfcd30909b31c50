"""Reports: aligned tables for people, JSON lines that tell everything for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

from stallfree_loadtest.measures import RequestTrace, Spread, Targets, TokenStamp, summarize
from stallfree_loadtest.report import (
    load_report,
    markdown_table,
    milliseconds,
    spread_text,
    summary_row,
    table,
    write_json_lines,
)

TRACES = (
    RequestTrace(
        request_id="a",
        due_at=100.0,
        sent_at=100.0,
        ended_at=102.0,
        stamps=(TokenStamp(at=101.0, num_tokens=1), TokenStamp(at=101.5, num_tokens=2)),
        finish_reason="length",
        prompt_tokens=10,
        completion_tokens=3,
        text="never written to a file",
    ),
    RequestTrace(request_id="b", due_at=101.0, sent_at=101.0, ended_at=101.5, outcome="error", error="HTTP 429: no"),
)
TARGETS = Targets(tbt_seconds=0.2)


def test_a_markdown_table_is_aligned_too() -> None:
    assert markdown_table(("name", "P50"), [("a", "1.0"), ("longer", "10.25")]).splitlines() == [
        "| name   |   P50 |",
        "| ------ | ----: |",
        "| a      |   1.0 |",
        "| longer | 10.25 |",
    ]


def test_a_spread_shows_its_ends_where_there_is_more_than_one_value() -> None:
    assert spread_text(Spread(median=0.2, low=0.1, high=1.25), digits=0, factor=1000) == "200 [100..1,250]"
    assert spread_text(Spread(median=0.2, low=0.2, high=0.2), digits=2) == "0.20"
    assert spread_text(Spread(median=math.nan, low=math.nan, high=math.nan), digits=2) == "-"


def test_a_table_aligns_its_columns() -> None:
    assert table(("name", "P50"), [("a", "1.0 ms"), ("longer", "10.0 ms")], indent=0).splitlines() == [
        "name        P50",
        "------  -------",
        "a        1.0 ms",
        "longer  10.0 ms",
    ]


def test_no_figure_is_a_dash() -> None:
    assert milliseconds(math.nan) == "-"
    assert milliseconds(0.0123) == "12.3 ms"


def test_a_load_report_names_every_measure_with_its_unit() -> None:
    report = load_report(summarize(TRACES, TARGETS), TARGETS)
    for text in (
        "TTFT",
        "TBT",
        "TPOT",
        "1,000.0 ms",
        "stall time",
        "0.300 s",
        "1 of 2 finished",
        "1 failed",
        "goodput",
    ):
        assert text in report
    assert "careful" not in report


def test_a_server_that_counts_otherwise_is_pointed_out() -> None:
    trace = RequestTrace(request_id="a", due_at=0, sent_at=0, ended_at=1, completion_tokens=5)
    assert "careful: 1 requests whose usage disagrees" in load_report(summarize([trace], TARGETS), TARGETS)


def test_an_empty_load_has_a_report() -> None:
    assert "0 of 0 finished" in load_report(summarize([], TARGETS), TARGETS)


def test_json_lines_hold_every_stamp_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_json_lines(path, TRACES, summary=summary_row(summarize(TRACES, TARGETS)))
    first, second, summary = (json.loads(line) for line in path.read_text().splitlines())
    assert first["stamps"] == [[1.0, 1], [1.5, 2]]
    assert (first["sent_seconds"], first["ttft_seconds"], first["tpot_seconds"]) == (0.0, 1.0, 0.5)
    assert (first["outcome"], first["prompt_tokens"], first["counted_tokens"]) == ("finished", 10, 3)
    assert (second["outcome"], second["error"], second["ttft_seconds"]) == ("error", "HTTP 429: no", None)
    assert (summary["kind"], summary["num_requests"], summary["gaps"]["num_stalls"]) == ("summary", 2, 1)
    assert "never written" not in path.read_text()


def test_json_lines_are_strict_json_without_samples(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_json_lines(path, [], summary=summary_row(summarize([], TARGETS)))
    assert "NaN" not in path.read_text()
