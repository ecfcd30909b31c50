"""What can be seen of a real worker from outside: its last steps, the trace, where requests' time goes, the alarm."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.samples import Samples
from tests.support.scripted import EOS, HANG, SLOW
from tests.support.waiting import wait_until
from tests.support.wire_client import ROOT, WorkerProcess, connect, scripted_worker

A, B = 40, 41


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with scripted_worker("--token-budget=64", "--max-num-seqs=4") as worker:
        yield worker


def _steps(worker: WorkerProcess, query: str = "") -> list[dict[str, Any]]:
    response = worker.get(f"/debug/steps{query}")
    assert response.status_code == 200
    steps: list[dict[str, Any]] = response.json()["steps"]
    return steps


def _samples(worker: WorkerProcess) -> Samples:
    return Samples(worker.get("/metrics").text)


async def test_last_steps_tell_every_chunk_of_a_request_by_the_routers_id(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([A] * 150, max_tokens=5, request_id="seen#1/x")
        await client.end_of(request)
    mine = [
        (chunk["num_tokens"], chunk["context_tokens"])
        for step in _steps(worker)
        for chunk in step["chunks"]
        if chunk["request_id"] == "seen#1/x"
    ]
    assert mine == [(64, 0), (64, 64), (22, 128), (1, 150), (1, 151), (1, 152), (1, 153)]
    text = worker.get("/debug/steps").text
    assert "token_id" not in text, "never the tokens"


async def test_last_steps_are_bounded_in_order_and_consistent(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        request = await client.submit([A] * 30, max_tokens=30)
        await client.end_of(request)
    assert len(_steps(worker, "?limit=7")) == 7
    steps = _steps(worker)
    assert [step["step_id"] for step in steps] == list(range(steps[0]["step_id"], steps[-1]["step_id"] + 1))
    for step in steps:
        parts = step["schedule_seconds"] + step["execute_seconds"] + step["apply_seconds"]
        assert step["seconds"] == pytest.approx(parts)
        assert step["decode_tokens"] + step["prefill_tokens"] == sum(chunk["num_tokens"] for chunk in step["chunks"])
    for before, after in itertools.pairwise(steps):
        assert after["started_at"] >= before["started_at"] + before["seconds"] - 1e-9
    for wrong in ("?limit=0", "?limit=100000", "?limit=x"):
        assert worker.get(f"/debug/steps{wrong}").status_code == 400


async def test_d10_queueing_is_in_the_scheduling_delay_and_in_ttft() -> None:
    """One runs at a time, and each takes five steps of 0.1 s: the queue is what the later ones wait for."""
    with scripted_worker("--max-num-seqs=1", "--token-budget=64") as worker:
        async with connect(worker) as client:
            requests = [await client.submit([SLOW] * 5, max_tokens=5) for _ in range(4)]
            for request in requests:
                await client.end_of(request)
        samples = _samples(worker)
        name = "stallfree_worker_scheduling_delay_seconds"
        assert samples.total(f"{name}_count") == 4
        assert samples.total(f"{name}_sum") == pytest.approx(0.5 * (0 + 1 + 2 + 3), rel=0.3)
        assert samples.quantile_bounds(name, 0.99)[0] > 1.2
        ttft = samples.total("stallfree_worker_time_to_first_token_seconds_sum")
        assert ttft == pytest.approx(samples.total(f"{name}_sum") + 4 * 0.1, abs=0.3)
        execution = samples.total("stallfree_worker_request_execution_seconds_sum")
        assert execution == pytest.approx(4 * 5 * 0.1, rel=0.2)
        assert samples.total("stallfree_worker_request_restarts_count") == 4
        assert samples.total("stallfree_worker_request_preemption_seconds_count") == 0, "no sample of 0 seconds"


async def test_preemptions_show_as_restarts_and_lost_time_of_the_requests_that_had_them() -> None:
    """Nine blocks; two requests run at a time, and would need ten before they end."""
    arguments = ("--kv-cache-memory=144KiB", "--token-budget=64", "--no-prefix-caching")
    with scripted_worker(*arguments, environment={"SCRIPTED_STEP_SECONDS": "0.005"}) as worker:
        async with connect(worker) as client:
            requests = [await client.submit([A] * 40, max_tokens=40) for _ in range(4)]
            for request in requests:
                await client.end_of(request)
                assert client.tokens(request) == [A] * 40
        samples = _samples(worker)
        preemptions = samples.total("stallfree_worker_preemptions_total")
        assert preemptions > 0, "the case was not provoked"
        assert samples.total("stallfree_worker_request_restarts_sum") == preemptions
        assert samples.total("stallfree_worker_request_restarts_count") == 4
        lost = "stallfree_worker_request_preemption_seconds"
        assert 1 <= samples.total(f"{lost}_count") <= 3, "the oldest is never preempted"
        assert samples.total(f"{lost}_sum") > 0
        assert samples.total("stallfree_worker_kv_cache_tokens") == 144
        assert samples.total("stallfree_worker_kv_cache_blocks") == 9
        assert samples.total("stallfree_worker_kv_cache_bytes") == 144 * 1024


async def test_batch_composition_and_the_parts_of_steps_add_up() -> None:
    with scripted_worker("--token-budget=64") as worker:
        async with connect(worker) as client:
            requests = [await client.submit([SLOW] * 10, max_tokens=10) for _ in range(3)]
            for request in requests:
                await client.end_of(request)
        samples = _samples(worker)
        steps = samples.total("stallfree_worker_step_seconds_count")
        assert samples.total("stallfree_worker_step_requests_sum", kind="decode") == 3 * 9
        assert samples.total("stallfree_worker_step_requests_sum", kind="prefill") == 3
        assert samples.total("stallfree_worker_step_requests_count", kind="prefill") == steps
        parts = samples.total("stallfree_worker_step_phase_seconds_total")
        assert parts == pytest.approx(samples.total("stallfree_worker_step_seconds_sum"))
        assert samples.total("stallfree_worker_step_phase_seconds_total", phase="execute") > 0.9 * parts
        assert samples.total("stallfree_worker_step_idle_seconds_count") == steps - 1
        assert samples.total("stallfree_worker_step_idle_seconds_sum") < 0.2 * parts
        error = "stallfree_worker_step_prediction_error_ratio"
        assert samples.total(f"{error}_count") == steps
        assert samples.total(f"{error}_sum") > 0


async def test_refusals_are_counted_by_reason_and_are_the_rejected(worker: WorkerProcess) -> None:
    async with connect(worker) as client:
        before = _samples(worker)
        await client.end_of(await client.submit([A] * 10, max_tokens=100_000))
        assert (await client.post(client.request([-1]))).status_code == 400
        after = _samples(worker)

    def new(name: str, **labels: str) -> float:
        name = f"stallfree_worker_{name}"
        return after.total(name, **labels) - before.total(name, **labels)

    assert new("refusals_total", reason="context_length_exceeded") == 1
    assert new("refusals_total", reason="invalid_request") == 1
    assert new("refusals_total") == new("requests_total", outcome="rejected") == 2
    assert new("scheduling_delay_seconds_count") == 0


async def test_prefix_cache_counters_tell_what_was_looked_up_found_and_so_not_computed(worker: WorkerProcess) -> None:
    counters = ("prefix_cache_queries_tokens_total", "prefix_cache_hits_tokens_total", "step_tokens_sum")
    prompt = [50 + number % 40 for number in range(100)]

    def now() -> list[float]:
        samples = _samples(worker)
        labels: tuple[dict[str, str], ...] = ({}, {}, {"kind": "prefill"})
        return [samples.total(f"stallfree_worker_{name}", **has) for name, has in zip(counters, labels, strict=True)]

    async with connect(worker) as client:
        told = [now()]
        cached: list[int] = []
        for _ in range(2):
            last = await client.end_of(await client.submit(prompt, max_tokens=2))
            assert last.usage is not None
            cached.append(last.usage.cached_tokens)
            told.append(now())
    first, second = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(told))
    assert cached[0] == 0
    assert cached[1] >= 80
    assert first == [100, 0, 100]
    assert second == [100, cached[1], 100 - cached[1]]


async def test_gauges_of_a_lost_engine_do_not_keep_their_last_values() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_SECONDS": "1"}) as worker:
        gauges = (
            "longest_decode_wait_seconds",
            "step_time_error_ratio",
            "kv_cache_blocks",
            "kv_cache_tokens",
            "kv_cache_bytes",
        )
        async with connect(worker) as client:
            await client.submit([SLOW] * 500)
            await wait_until(lambda: all(worker.metric(name) > 0 for name in gauges), what="busy gauges")
            os.kill(worker.engine_pid(), signal.SIGKILL)
            await wait_until(lambda: all(worker.metric(name) == 0 for name in gauges), 0.9, what="empty gauges")
            await wait_until(lambda: worker.metric("kv_cache_blocks") > 0, what="the next engine's cache")


async def test_trace_is_written_while_serving_and_whole_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with scripted_worker(f"--trace={path}", "--token-budget=64") as worker:
        async with connect(worker) as client:
            await client.end_of(await client.submit([A] * 150, max_tokens=20))
        seen = [step["step_id"] for step in _steps(worker)]

        def steps_on_disk() -> list[int]:
            events = json.loads(path.read_text() + "]")
            return [event["args"]["step_id"] for event in events if event["name"].startswith("step:")]

        await wait_until(lambda: steps_on_disk() == seen, what="every step on disk")
        assert worker.metric("trace_dropped_steps_total") == 0
        worker.process.terminate()
        assert worker.process.wait(timeout=10) == 0
    json.loads(path.read_text())


async def test_trace_of_a_killed_worker_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with scripted_worker(f"--trace={path}") as worker:
        async with connect(worker) as client:
            request = await client.submit([A] * 2000, max_tokens=2000)
            await wait_until(lambda: len(client.tokens(request)) > 50)
            worker.process.kill()
            worker.process.wait(timeout=10)
    assert len(json.loads(path.read_text() + "]")) > 50


def test_trace_that_cannot_be_opened_stops_the_start_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.scripted_worker", "--port=0", "--model=scripted"]
    path = tmp_path / "no-such-folder" / "trace.json"
    ended = subprocess.run(
        [*command, f"--trace={path}"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    assert (
        ended.stderr == f"stallfree-worker: --trace (STALLFREE_TRACE): cannot write {path}: No such file or directory\n"
    )


async def test_disk_that_fills_up_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with scripted_worker(f"--trace={path}") as worker:
        # a limit on file sizes makes the next write fail, as a full disk does
        resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
        async with connect(worker) as client:
            request = await client.submit([A] * 500, max_tokens=500)
            await client.end_of(request)
            assert client.tokens(request) == [A] * 500
            await wait_until(lambda: worker.metric("trace_dropped_steps_total") > 0, what="dropped steps")
            assert "trace ended: its file cannot be written" in worker.log
            assert len(json.loads(path.read_text() + "]")) > 50, "the last write was cut in the midst of an event"
            again = await client.submit([A, B])
            await client.end_of(again)
            assert client.tokens(again) == [A, B, EOS]
            assert len(_steps(worker)) > 200


async def test_b34_work_that_does_not_move_raises_the_alarm_and_fails_liveness_in_the_end() -> None:
    arguments = ("--max-num-seqs=1", "--no-progress-warning-seconds=0.5", "--no-progress-liveness-seconds=1.5")
    with scripted_worker(*arguments) as worker:
        async with connect(worker) as client:
            await client.submit([HANG])
            await client.submit([A] * 300, request_id="the-head")
            await wait_until(lambda: worker.metric("no_progress_seconds") > 0.5, what="the metric")
            await wait_until(lambda: "no progress" in worker.log, what="the line in the log")
            assert worker.get("/livez").status_code == 200
            await wait_until(lambda: worker.get("/livez").status_code == 503, 5, what="liveness off")
            assert "without a step" in worker.get("/livez").json()["reason"]
            worker.process.kill()  # it would be asked to end, with a step that never does
        alarms = [json.loads(line) for line in worker.log.splitlines() if "no progress" in line]
        assert len(alarms) == 1, "one line for each standstill"
        assert {"needed_tokens", "kv_free_tokens", "requests_waiting", "request_id"} <= alarms[0].keys()


async def test_b34_worker_that_is_idle_or_slow_is_never_taken_for_stuck() -> None:
    arguments = ("--no-progress-warning-seconds=0.5", "--no-progress-liveness-seconds=0.8")
    with scripted_worker(*arguments) as worker:
        async with connect(worker) as client:
            started_at = time.monotonic()
            request = await client.submit([SLOW] * 12)
            await client.end_of(request)
            assert time.monotonic() - started_at > 1.0, "longer than the alarm, with a step each 0.1 s"
            await wait_until(lambda: time.monotonic() - started_at > 2.5, what="a while without work")
        assert worker.get("/livez").status_code == 200
        assert worker.metric("no_progress_seconds") == 0
        assert "no progress" not in worker.log
