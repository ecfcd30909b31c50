"""Log lines as people see them when a part has died."""

from __future__ import annotations

import json

import pytest

from stallfree_loadtest.log_lines import last_error, readable


def test_a_json_line_becomes_a_readable_one() -> None:
    line = json.dumps(
        {"time": "t", "level": "ERROR", "logger": "worker", "message": "engine lost", "service": "s", "reason": "gone"}
    )
    assert readable(line) == "ERROR worker: engine lost (reason=gone)"


def test_a_traceback_stands_below_its_line() -> None:
    line = json.dumps({"level": "ERROR", "logger": "worker", "message": "failed", "exc_info": "Traceback:\n  x"})
    assert readable(line) == "ERROR worker: failed\nTraceback:\n  x"


@pytest.mark.parametrize("line", ["", "listening http://127.0.0.1:1", "{broken", "[1]", "3", '{"a": 1}'])
def test_any_other_line_stays_as_it_is(line: str) -> None:
    assert readable(line) == line


def test_the_last_error_is_one_line_without_its_traceback() -> None:
    records = [
        {"level": "ERROR", "logger": "worker", "message": "engine lost"},
        {"level": "CRITICAL", "logger": "worker", "message": "given up", "reason": "no such file", "exc_info": "Trace"},
        {"level": "INFO", "logger": "worker", "message": "draining"},
    ]
    lines = [*(json.dumps(record) for record in records), "a line of another program"]
    assert last_error(lines) == "CRITICAL worker: given up (reason=no such file)"
    assert last_error(lines[2:]) is None
