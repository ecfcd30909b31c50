"""The file of `--trace`: readable at any moment, bounded, and never in anybody's way."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from stallfree_worker.trace import TraceFileError, TraceWriter, step_events
from tests.support.waiting import wait_until_sync
from tests.worker.step_records import step_record

PLENTY = 2**30


def read(path: Path, *, is_whole: bool = True) -> list[dict[str, Any]]:
    """The events of a trace; of one that is still written, after the bracket that its format lets be missing."""
    text = path.read_text()
    events: list[dict[str, Any]] = json.loads(text if is_whole else text + "]")
    return events


def steps_in(events: list[dict[str, Any]]) -> list[int]:
    return [event["args"]["step_id"] for event in events if event["name"].startswith("step:")]


def test_trace_is_json_at_every_moment_and_whole_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, max_bytes=PLENTY)
    for number in range(20):
        writer.add(step_record(("a", 1, number), num_decodes=1, step_id=number))
        wait_until_sync(lambda: steps_in(read(path, is_whole=False))[-1:] == [number])  # noqa: B023 - awaited here
    writer.close()
    assert steps_in(read(path)) == list(range(20))


def test_events_are_chromes() -> None:
    record = step_record(
        ("a", 1, 40), ("b", 30, 0), num_decodes=1, idle_seconds=0.004, preempted_request_ids=("c#1#1",)
    )
    events = list(step_events(record))
    assert {event["ph"] for event in events} == {"X", "C", "i"}
    assert all({"name", "ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    (step,) = [event for event in events if str(event["name"]).startswith("step:")]
    assert (step["ts"], step["name"]) == (100.0 * 1e6, "step: 1 decodes + 30 prefill tokens")
    assert step["dur"] == pytest.approx(20_000)
    arguments = step["args"]
    assert isinstance(arguments, dict)
    assert (arguments["budget_seconds"], arguments["predicted_seconds"]) == (0.19, 0.025)
    assert arguments["seconds"] == pytest.approx(0.02)
    assert arguments["chunks"][1] == {"request_id": "b", "num_tokens": 30, "context_tokens": 0}
    (preemption,) = [event for event in events if event["ph"] == "i"]
    assert preemption["args"] == {"request_id": "c"}


def test_parts_lie_within_their_step_and_the_idle_time_before_it() -> None:
    slices = {
        str(event["name"]).split(":")[0]: (float(str(event["ts"])), float(str(event["ts"])) + float(str(event["dur"])))
        for event in step_events(step_record(idle_seconds=0.004))
        if event["ph"] == "X"
    }
    step_start, step_end = slices["step"]
    assert slices["idle with work"] == pytest.approx((step_start - 4000, step_start))
    ends = [step_start, *(slices[part][1] for part in ("schedule", "execute", "apply"))]
    starts = [slices[part][0] for part in ("schedule", "execute", "apply")]
    assert starts == pytest.approx(ends[:3])
    assert ends[3] == pytest.approx(step_end)


def test_trace_never_grows_beyond_its_bound_and_keeps_the_newest_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    max_bytes = 20_000
    writer = TraceWriter(path, max_bytes=max_bytes)
    for number in range(200):
        writer.add(step_record(("a", 1, number), num_decodes=1, step_id=number))
    writer.close()
    kept = [*read(Path(f"{path}.1")), *read(path)]
    assert steps_in(kept) == list(range(200 - len(steps_in(kept)), 200))
    assert {file.name for file in tmp_path.iterdir()} == {"trace.json", "trace.json.1"}
    assert max_bytes / 2 < Path(f"{path}.1").stat().st_size <= max_bytes + 10
    assert path.stat().st_size <= max_bytes + 10


@pytest.mark.parametrize("name", ["no-such-folder/trace.json", "."])
def test_path_that_cannot_be_opened_is_an_error_at_once_that_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFileError, match=str(tmp_path)):
        TraceWriter(tmp_path / name, max_bytes=PLENTY)


def test_disk_without_any_room_is_an_error_at_once() -> None:
    with pytest.raises(TraceFileError, match="No space left"):
        TraceWriter(Path("/dev/full"), max_bytes=PLENTY)


def test_trace_ends_and_counts_what_is_lost_where_the_file_cannot_be_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the folder is gone when the file is to be begun anew; a full disk in the midst takes the same way."""
    folder = tmp_path / "folder"
    folder.mkdir()
    dropped = itertools.count()
    num_dropped = 0

    def note_dropped() -> None:
        nonlocal num_dropped
        num_dropped = next(dropped) + 1

    writer = TraceWriter(folder / "trace.json", max_bytes=5_000, on_dropped=note_dropped)
    (folder / "trace.json").unlink()
    folder.rmdir()
    for number in range(50):
        writer.add(step_record(step_id=number))
    writer.close()
    assert 0 < num_dropped < 50
    assert [record.message for record in caplog.records] == ["trace ended: its file cannot be written"]


def test_slow_disk_costs_steps_of_the_trace_and_no_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The writing thread is held up by a fifo that nobody reads on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    dropped = threading.Semaphore(0)
    writer = TraceWriter(fifo, max_bytes=PLENTY, on_dropped=dropped.release)
    for number in range(3000):
        writer.add(step_record(step_id=number))
    assert dropped.acquire(blocking=False)
    # again where the thread got on for a moment, but not for every step
    assert {record.message for record in caplog.records} == {"trace is behind: steps are dropped"}
    assert len(caplog.records) < 100
    os.close(reader)  # writing fails from now on: the thread comes free
    writer.close()
