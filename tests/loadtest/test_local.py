"""`stallfree-local` as people run it: a process with signals, standard output and standard error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loadtest.test_cluster import DOUBLE, exists
from tests.support.waiting import wait_until_sync

NO_STORE = ("--redis-url", "redis://127.0.0.1:1/0")


def command(*arguments: str, worker: tuple[str, ...] = (), router: tuple[str, ...] = ()) -> list[str]:
    parts = [f"--worker-command={word}" for word in (*DOUBLE, *worker)]
    parts += [f"--router-command={word}" for word in (*DOUBLE, *router)]
    return [sys.executable, "-m", "stallfree_loadtest.local", "--model", "m", "--port", "0", *parts, *arguments]


@contextlib.contextmanager
def running(words: list[str], log_dir: Path) -> Iterator[subprocess.Popen[str]]:
    with (log_dir / "local.err").open("w") as errors:
        process = subprocess.Popen(
            [*words, "--log-dir", str(log_dir)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def errors_of(log_dir: Path) -> str:
    return (log_dir / "local.err").read_text()


def pids_of(description: dict[str, object]) -> list[int]:
    parts = [description["store"], *description["workers"], *description["routers"]]  # type: ignore[misc]  # JSON
    return [part["pid"] for part in parts if part["pid"] is not None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_with_status_0(tmp_path: Path, number: signal.Signals) -> None:
    with running(command("--json"), tmp_path) as process:
        pids = pids_of(json.loads(first_line(process)))
        assert len(pids) == 4
        assert all(exists(pid) for pid in pids)
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
    assert not any(exists(pid) for pid in pids)


def test_one_ready_line_a_router_and_nothing_else_on_standard_output(tmp_path: Path) -> None:
    with running(command("--routers", "2", *NO_STORE), tmp_path) as process:
        lines = [first_line(process), first_line(process)]
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=10)
    assert all(line.startswith("ready http://127.0.0.1:") for line in lines)
    assert lines[0] != lines[1]
    assert rest == ""


def test_kill_9_leaves_no_child(tmp_path: Path) -> None:
    with running(command("--json"), tmp_path) as process:
        pids = pids_of(json.loads(first_line(process)))
        process.kill()
        process.wait(timeout=10)
        wait_until_sync(lambda: not any(exists(pid) for pid in pids), what="the end of every part")


def test_a_signal_during_the_start_stops_everything(tmp_path: Path) -> None:
    with running(command(*NO_STORE, worker=("never-ready",)), tmp_path) as process:
        log = tmp_path / "worker-1.log"
        wait_until_sync(lambda: log.exists() and "listening" in log.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0


def test_a_failed_start_is_status_1_with_the_tail_of_the_log(tmp_path: Path) -> None:
    with running(command(*NO_STORE, worker=("dies-at-start",)), tmp_path) as process:
        assert process.wait(timeout=20) == 1
        assert first_line(process) == ""
    errors = errors_of(tmp_path)
    assert "exited with status 3" in errors
    assert "the disk is full" in errors
    assert "Traceback" not in errors


def test_a_death_is_reported_and_the_rest_stays(tmp_path: Path) -> None:
    with running(command("--json", *NO_STORE), tmp_path) as process:
        pids = pids_of(json.loads(first_line(process)))
        os.kill(pids[0], signal.SIGKILL)
        wait_until_sync(lambda: "worker-1 (pid" in errors_of(tmp_path), what="the report")
        assert "was ended by SIGKILL" in errors_of(tmp_path)
        assert process.poll() is None
        assert all(exists(pid) for pid in pids[1:])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    assert errors_of(tmp_path).count("was ended by SIGKILL") == 1


def test_with_restart_a_dead_part_comes_back(tmp_path: Path) -> None:
    with running(command("--json", "--restart", *NO_STORE), tmp_path) as process:
        pids = pids_of(json.loads(first_line(process)))
        os.kill(pids[0], signal.SIGKILL)
        wait_until_sync(lambda: "worker-1 is started again as pid" in errors_of(tmp_path), what="the restart")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    "wrong", [("--workers", "0"), ("--port", "x"), ("--port", "65536"), ("--dtype", "int8"), ("--modl", "m")]
)
def test_a_wrong_option_is_status_2_and_names_it(wrong: tuple[str, ...]) -> None:
    done = subprocess.run(command(*wrong), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert wrong[0] in done.stderr
