"""What happens to the worker when its engine dies, hangs, or never comes up, and when it is told to go."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from stallfree_shared.errors import StallfreeError
from stallfree_shared.wire import RequestId
from tests.support.scripted import EOS, EXIT, HANG, RAISE, SLOW
from tests.support.waiting import wait_until, wait_until_sync
from tests.support.wire_client import WireClient, connect, scripted_worker

A, B = 40, 41


async def _assert_lost(client: WireClient, request: RequestId, *, within_seconds: float = 5) -> str:
    error = (await client.end_of(request, timeout_seconds=within_seconds)).error
    assert error is not None
    assert error.code == "worker_lost"
    assert StallfreeError.from_info(error).is_retryable
    return error.message


async def _assert_serves(client: WireClient) -> None:
    request = await client.submit([A, B])
    await client.end_of(request)
    assert client.tokens(request) == [A, B, EOS]


LOST = "the engine of this worker is lost"


async def test_killed_engine_fails_its_requests_at_once_and_comes_back_by_itself() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_SECONDS": "0.5"}) as worker:
        async with connect(worker) as client:
            requests = [await client.submit([SLOW] * 100) for _ in range(3)]
            queued = await client.submit([SLOW] * 5)
            await wait_until(lambda: len(client.tokens(requests[0])) > 0)
            os.kill(worker.engine_pid(), signal.SIGKILL)
            killed_at = time.monotonic()
            for request in (*requests, queued):
                await _assert_lost(client, request, within_seconds=1)
            assert time.monotonic() - killed_at < 1
            assert not client.status.is_ready
            response = worker.get("/readyz")
            assert response.status_code == 503
            assert "engine" in response.json()["reason"]
            assert worker.get("/livez").status_code == 200
            refused = await client.post(client.request([A]))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

            await wait_until(worker.is_ready, what="/readyz again")
            await _assert_serves(client)
            assert worker.metric("engine_restarts_total") == 1
            assert worker.metric("engine_up") == 1
            assert worker.metric("requests_total", outcome="error") == 4


@pytest.mark.parametrize(("fault", "reason"), [(RAISE, "the script says"), (EXIT, "ended with status")])
async def test_b33_step_that_fails_restarts_the_engine_and_no_request_waits_for_ever(fault: int, reason: str) -> None:
    with scripted_worker() as worker:
        async with connect(worker) as client:
            bystander = await client.submit([SLOW] * 50)
            await wait_until(lambda: len(client.tokens(bystander)) > 0)
            request = await client.submit([A, fault])
            assert await _assert_lost(client, request) == LOST  # the reason is for the log, not for clients
            await _assert_lost(client, bystander)
            await wait_until(lambda: reason in worker.log, what="the reason in the log")
            await wait_until(worker.is_ready, what="/readyz again")
            await _assert_serves(client)


async def test_hung_engine_is_killed_by_the_watchdog() -> None:
    with scripted_worker("--step-timeout-seconds=1") as worker:
        async with connect(worker) as client:
            engine_pid = worker.engine_pid()
            request = await client.submit([A, HANG])
            assert await _assert_lost(client, request) == LOST
            await wait_until(lambda: "silent for 1 s" in worker.log, what="the reason in the log")
            await wait_until(worker.is_ready, what="/readyz again")
            assert worker.engine_pid() != engine_pid
            await _assert_serves(client)


async def test_statuses_go_on_while_a_step_takes_long() -> None:
    with scripted_worker() as worker:
        async with connect(worker) as client:
            await client.submit([A, HANG])
            await wait_until(
                lambda: client.status.requests_running + client.status.requests_waiting > 0 or len(client.frames) > 4
            )
            num_frames = len(client.frames)
            await wait_until(lambda: len(client.frames) >= num_frames + 3, 2, what="a status each half second")
            worker.process.kill()


async def test_submits_bigger_than_a_pipe_are_accepted_in_the_midst_of_a_step() -> None:
    """The engine's loop takes no command during its step, here an endless one; neither side's pipe may fill up."""
    with scripted_worker() as worker:
        async with connect(worker) as client:
            await client.submit([HANG])
            for _ in range(40):
                await client.submit([A] * 8000, max_tokens=1)
            assert (await client.http.get("/livez")).status_code == 200
            os.kill(worker.engine_pid(), signal.SIGKILL)
            await wait_until(lambda: worker.metric("requests_total", outcome="error") == 41, 1, what="41 failures")


async def test_c22_engine_that_fails_again_and_again_ends_the_worker_with_an_error_status() -> None:
    with scripted_worker("--max-engine-restarts=1") as worker:
        async with connect(worker) as client:
            for _ in range(2):
                await wait_until(worker.is_ready)
                request = await client.submit([RAISE])
                await _assert_lost(client, request)
            assert worker.process.wait(timeout=10) == 1
        assert "engine given up" in worker.log


def test_c21_worker_is_alive_and_not_ready_while_it_loads_and_serves_statuses() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_SECONDS": "1"}, wait=False) as worker:
        wait_until_sync(lambda: worker.get("/livez").status_code == 200)
        response = worker.get("/readyz")
        assert (response.status_code, response.json()["reason"]) == (503, "the model is loading")
        assert worker.get("/wire/model").status_code == 503
        assert worker.metric("engine_up") == 0
        worker.wait_until_ready()
        assert worker.metric("engine_up") == 1


def test_c21_failed_load_ends_the_worker_with_its_reason_in_the_log() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_ERROR": "half of the weights are missing"}, wait=False) as worker:
        assert worker.process.wait(timeout=10) == 1
        assert "half of the weights are missing" in worker.log


async def test_sigterm_lets_running_streams_end_whole_and_exits_with_success() -> None:
    with scripted_worker() as worker:
        async with connect(worker) as client:
            request = await client.submit([SLOW] * 12)
            await wait_until(lambda: len(client.tokens(request)) > 0)
            worker.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: client.status.is_draining, what="a draining status")
            response = worker.get("/readyz")
            assert (response.status_code, response.json()["reason"]) == (503, "the worker is draining")
            refused = await client.post(client.request([A]))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            last = await client.end_of(request)
            assert client.tokens(request) == [SLOW] * 12 + [EOS]
            assert last.finish_reason == "stop"
            await wait_until(lambda: client.has_ended, what="the end of the stream")
        assert worker.process.wait(timeout=10) == 0


async def test_drain_that_takes_too_long_ends_its_requests_with_a_retryable_error() -> None:
    with scripted_worker("--drain-timeout-seconds=0.5") as worker:
        async with connect(worker) as client:
            request = await client.submit([SLOW] * 400)
            await wait_until(lambda: len(client.tokens(request)) > 0)
            worker.process.send_signal(signal.SIGTERM)
            await _assert_lost(client, request)
            await wait_until(lambda: client.has_ended, what="the end of the stream")
        assert worker.process.wait(timeout=10) == 0


async def test_second_sigterm_ends_the_worker_at_once_and_its_engine_in_mid_step_too() -> None:
    with scripted_worker() as worker:
        async with connect(worker) as client:
            await client.submit([HANG])
            engine = Path(f"/proc/{worker.engine_pid()}")
            worker.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: client.status.is_draining, what="a draining status")
            worker.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: worker.process.poll() is not None, 4, what="the worker's end")
        await wait_until(lambda: not engine.exists(), 4, what="the engine's end")


async def test_engine_that_dies_while_it_loads_anew_is_started_once_more() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_SECONDS": "0.5"}) as worker:
        async with connect(worker) as client:
            os.kill(worker.engine_pid(), signal.SIGKILL)
            await wait_until(lambda: worker.metric("engine_restarts_total") == 1)
            await wait_until(lambda: len(worker.engine_pids()) == 1)
            os.kill(worker.engine_pid(), signal.SIGKILL)
            await wait_until(lambda: worker.metric("engine_restarts_total") == 2)
            await wait_until(worker.is_ready, what="/readyz again")
            await _assert_serves(client)


def test_engine_does_not_outlive_a_killed_worker_even_in_the_midst_of_a_step() -> None:
    with scripted_worker(environment={"SCRIPTED_STEP_SECONDS": "3600"}, wait=False) as worker:
        wait_until_sync(lambda: worker.get("/livez").status_code == 200)
        engine = Path(f"/proc/{worker.engine_pid()}")
        worker.process.kill()
        wait_until_sync(lambda: not engine.exists(), 5, what="the engine's end")


def test_signal_to_the_whole_group_leaves_the_engine_to_the_front() -> None:
    """Ctrl-C in a terminal reaches both processes."""
    with scripted_worker() as worker:
        os.kill(worker.engine_pid(), signal.SIGINT)
        os.kill(worker.engine_pid(), signal.SIGTERM)
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(timeout=10) == 0
        assert "engine lost" not in worker.log


def test_worker_told_to_go_while_it_loads_does_not_wait_for_the_model() -> None:
    with scripted_worker(environment={"SCRIPTED_LOAD_SECONDS": "3600"}, wait=False) as worker:
        wait_until_sync(lambda: worker.get("/livez").status_code == 200)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(timeout=4) == 0
