"""What is known about workers, with workers that are real processes where they must die."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.responses import Response

from stallfree_router.metrics import RouterMetrics
from stallfree_router.policy import Demand
from stallfree_router.routes.errors import error_response
from stallfree_router.worker_connection import KEEPALIVE_SECONDS, FetchTokenizer
from stallfree_router.workers import Workers
from stallfree_shared.errors import DrainingError, StallfreeError, UnavailableError, WorkerLostError, WorkerTimeoutError
from stallfree_shared.wire import SubmitAccepted
from tests.router.fake_worker import FIRST_TOKEN_ID, MODEL, FakeWorker
from tests.router.routing import SETTINGS, ListDiscovery, collect, generation, routing
from tests.support.waiting import wait_until

DEMAND = Demand(model=MODEL, prompt_tokens=10, max_tokens=5, expected_output_tokens=3)
NOBODY: frozenset[str] = frozenset()


@contextlib.asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.router.fake_worker", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        yield process, line.decode().removeprefix("listening ").strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def outcome_of(task: asyncio.Task[list[int]]) -> type[StallfreeError] | int:
    try:
        return len(await task)
    except StallfreeError as error:
        return type(error)


@pytest.mark.parametrize(
    ("number", "error", "limit_seconds"),
    [
        (signal.SIGKILL, WorkerLostError, 1.0),
        (signal.SIGSTOP, WorkerTimeoutError, SETTINGS.silence_timeout_seconds + 1.0),
    ],
)
async def test_c01_a_dead_or_frozen_worker_is_an_error_after_output_and_a_retry_before(
    number: signal.Signals, error: type[StallfreeError], limit_seconds: float
) -> None:
    survivor = FakeWorker()
    survivor.is_draining = True
    held_at_3 = worker_process("--hold-at", "3")
    async with held_at_3 as (process, url), survivor.serving() as other_url, routing(url, other_url) as router:
        await router.usable(1)
        received: list[list[int]] = [[] for _ in range(20)]
        streams = [
            asyncio.create_task(collect(router.dispatcher.generate(generation(f"s{n}", max_tokens=9)), received[n]))
            for n in range(20)
        ]
        await wait_until(lambda: all(len(each) == 3 for each in received))
        survivor.is_draining = False
        await router.usable(2)
        started_at = time.monotonic()
        process.send_signal(number)
        outcomes = [await outcome_of(task) for task in streams]
        assert time.monotonic() - started_at < limit_seconds
        assert set(outcomes) == {error}
        assert received == [[FIRST_TOKEN_ID, FIRST_TOKEN_ID + 1, FIRST_TOKEN_ID + 2]] * 20
        await router.usable(1)
        assert len(await collect(router.dispatcher.generate(generation("after")))) == 5
        await router.idle()


async def test_c01_streams_without_output_move_to_another_worker() -> None:
    survivor = FakeWorker()
    survivor.is_draining = True
    held_at_0 = worker_process("--hold-at", "0")
    async with held_at_0 as (process, url), survivor.serving() as other_url, routing(url, other_url) as router:
        await router.usable(1)
        streams = [asyncio.create_task(collect(router.dispatcher.generate(generation(f"s{n}")))) for n in range(20)]
        await wait_until(lambda: router.sample("attempts_total", reason="first") == 20)
        survivor.is_draining = False
        await router.usable(2)
        process.kill()
        assert [await outcome_of(task) for task in streams] == [5] * 20
        await router.idle()


async def test_c04_a_frozen_worker_slows_nobody_else_and_is_back_when_it_thaws() -> None:
    healthy = FakeWorker()
    async with worker_process() as (process, url), healthy.serving() as other_url, routing(url, other_url) as router:
        await router.usable(2)
        process.send_signal(signal.SIGSTOP)
        tasks = [asyncio.create_task(collect(router.dispatcher.generate(generation(f"f{n}")))) for n in range(30)]
        await router.usable(1)
        assert [await outcome_of(task) for task in tasks] == [5] * 30
        for number in range(30):
            started_at = time.monotonic()
            await collect(router.dispatcher.generate(generation(f"h{number}")))
            assert time.monotonic() - started_at < 0.5
        process.send_signal(signal.SIGCONT)
        await router.usable(2)
        await router.idle()


async def test_a_request_is_counted_once_by_its_reservation_or_by_the_status() -> None:
    worker = FakeWorker()
    worker.hold_at, worker.status_seconds = 0, 0.05
    async with worker.serving() as url, routing(url) as router:
        await router.usable()

        def num_counted() -> int:
            (view,) = router.workers.views()
            return view.status.requests_waiting + view.status.requests_running

        async with router.workers.reserved(DEMAND, tried=NOBODY) as reservation:
            sequence = router.workers.views()[0].status.sequence
            assert num_counted() == 1
            router.workers.mark_accepted(
                reservation, SubmitAccepted(status_sequence=sequence + 2, tbt_target_seconds=0.2)
            )
            await wait_until(lambda: router.workers.views()[0].status.sequence in (sequence + 1, sequence + 2))
            assert num_counted() == 1
            await wait_until(lambda: router.workers.views()[0].status.sequence > sequence + 2)
            assert num_counted() == 0  # this worker knows nothing of it: the status alone is believed now
            router.workers.check_integrity()
        async with router.workers.reserved(DEMAND, tried=NOBODY):
            assert num_counted() == 1
        assert num_counted() == 0
        router.workers.check_integrity(is_idle=True)


async def test_an_acceptance_that_comes_after_its_status_is_not_counted_twice() -> None:
    worker = FakeWorker()
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        async with router.workers.reserved(DEMAND, tried=NOBODY) as reservation:
            assert router.workers.views()[0].status.requests_waiting == 1
            router.workers.mark_accepted(reservation, SubmitAccepted(status_sequence=0, tbt_target_seconds=0.2))
            assert router.workers.views()[0].status.requests_waiting == 0


async def test_c11_load_is_forgotten_with_the_worker_and_never_negative() -> None:
    worker = FakeWorker()
    worker.hold_at = 0
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        tasks = [asyncio.create_task(collect(router.dispatcher.generate(generation(f"r{n}")))) for n in range(10)]
        await wait_until(lambda: len(worker.running) == 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await wait_until(lambda: not worker.running)
        await wait_until(lambda: router.workers.views()[0].status.requests_running == 0)
        worker.cut_frames()
        await router.usable(0)
        await router.usable(1)
        assert router.workers.views()[0].status.requests_waiting == 0
        await router.idle()


async def test_c39_a_loss_counts_once_however_many_streams_it_cost() -> None:
    worker = FakeWorker()
    worker.hold_at = 1
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        received: list[list[int]] = [[] for _ in range(20)]
        streams = [
            asyncio.create_task(collect(router.dispatcher.generate(generation(f"r{n}")), received[n]))
            for n in range(20)
        ]
        await wait_until(lambda: all(received))
        worker.cut_frames()
        assert {await outcome_of(task) for task in streams} == {WorkerLostError}
        worker.hold_at = None
        await router.usable(1)
        assert router.workers._worker_by_url[url].breaker.failures_in_a_row == 1
        assert len(await collect(router.dispatcher.generate(generation("after")))) == 5


async def test_a_model_stays_known_while_its_worker_is_away_and_goes_with_its_address() -> None:
    worker, discovery = FakeWorker(), ListDiscovery([])
    async with routing(discovery=discovery) as router:
        assert router.workers.models() == {}
        async with worker.serving() as url:
            discovery.set([url])
            await router.usable()
        await router.usable(0)
        assert set(router.workers.models()) == {MODEL}
        assert not router.workers.usable(MODEL)
        discovery.set([])
        await wait_until(lambda: not router.workers.models())
        assert router.sample("usable_workers", model=MODEL) is None


async def test_c14_a_worker_that_leaves_discovery_ends_what_it_has_and_gets_nothing_new() -> None:
    leaving, staying = FakeWorker(), FakeWorker()
    leaving.hold_at = 2
    discovery = ListDiscovery([])
    async with leaving.serving() as url, staying.serving() as other_url, routing(discovery=discovery) as router:
        discovery.set([url])
        await router.usable()
        stream = router.dispatcher.generate(generation("old"))
        assert (await anext(stream)).index == 0
        discovery.set([other_url])
        await wait_until(lambda: bool(router.workers.views()) and router.workers.views()[0].url == other_url)
        for number in range(5):
            await collect(router.dispatcher.generate(generation(f"new-{number}")))
        assert len(leaving.submits) == 1
        leaving.hold_at = None
        assert len(await collect(stream)) == 4
        await router.idle()
        await wait_until(lambda: len(router.workers._worker_by_url) == 1)


async def test_an_address_that_leaves_and_is_back_at_once_is_a_new_worker() -> None:
    worker, discovery = FakeWorker(), ListDiscovery([])
    async with worker.serving() as url, routing(discovery=discovery) as router:
        for number in range(5):
            discovery.set([url])
            await router.usable()
            assert len(await collect(router.dispatcher.generate(generation(f"r{number}")))) == 5
            discovery.set([])
        discovery.set([url])
        await router.usable()
        await router.idle()


async def test_c12_another_model_behind_the_same_address_is_noticed() -> None:
    worker = FakeWorker()
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        worker.card = worker.card.model_copy(update={"model": "other"})
        worker.cut_frames()
        await router.usable(1, model="other")
        assert set(router.workers.models()) == {"other"}
        assert router.sample("usable_workers", model=MODEL) is None


async def test_a_worker_is_used_only_after_its_model_was_taken_in() -> None:
    worker = FakeWorker()
    answers = iter([Response(b"<html>", status_code=200), Response(b"no", status_code=503)])
    worker.answer_model = lambda: next(answers, None)
    async with worker.serving() as url, routing(url) as router:
        await router.usable()
        assert set(router.tokenizers) == {worker.card.tokenizer_sha256}


async def test_the_tokenizer_of_a_worker_is_taken_while_its_model_is_still_loading() -> None:
    worker = FakeWorker()
    worker.answer_model = lambda: error_response(UnavailableError("it is loading", retry_after_seconds=1))
    async with worker.serving() as url, routing(url) as router:
        await wait_until(lambda: set(router.tokenizers) == {worker.card.tokenizer_sha256})
        assert router.workers.models() == {}
        worker.answer_model = lambda: None
        await router.usable()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_stops_being_usable_at_the_very_moment_its_connection_ends(number: signal.Signals) -> None:
    async with worker_process("--hold-at", "0") as (process, url), routing(url) as router:
        await router.usable()
        streams = [asyncio.create_task(collect(router.dispatcher.generate(generation(f"s{n}")))) for n in range(20)]
        await wait_until(lambda: router.sample("attempts_total", reason="first") == 20)
        connection = router.workers._worker_by_url[url].connection
        process.send_signal(number)
        while router.workers.usable(MODEL):
            assert connection._life is not None
            await asyncio.sleep(0)
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        await router.idle()


@pytest.mark.parametrize("num_ticks", range(4))
async def test_the_router_ends_even_where_a_worker_is_lost_at_the_same_moment(num_ticks: int) -> None:
    worker = FakeWorker()
    worker.hold_at = 0
    worker.takes_submits.clear()
    async with worker.serving() as url:
        async with asyncio.timeout(5), routing(url) as router:
            await router.usable()
            streams = [asyncio.create_task(collect(router.dispatcher.generate(generation(f"s{n}")))) for n in range(10)]
            await wait_until(lambda: len(worker.submits) == 10)
            worker.cut_frames()
            while router.workers.usable(MODEL):  # noqa: ASYNC110 - the moment counts, to the loop's turn
                await asyncio.sleep(0)
            for _ in range(num_ticks):
                await asyncio.sleep(0)
        worker.takes_submits.set()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {WorkerLostError, UnavailableError, DrainingError}


async def test_of_cards_that_differ_the_one_for_the_longest_prompts_is_told() -> None:
    short, long = FakeWorker(max_model_len=10), FakeWorker(max_model_len=100)
    for first, second in ((short, long), (long, short)):
        discovery = ListDiscovery([])
        async with first.serving() as url, second.serving() as other_url, routing(discovery=discovery) as router:
            for number, urls in enumerate(([url], [url, other_url]), 1):
                discovery.set(urls)
                await router.usable(number)
            assert router.workers.models()[MODEL].max_model_len == 100
            tokens = await collect(router.dispatcher.generate(generation(num_prompt_tokens=50)))
            assert len(tokens) == 5


@pytest.mark.parametrize("is_loading_first", [False, True])
async def test_c29_what_is_wrong_with_a_worker_for_long_is_told_once(
    caplog: pytest.LogCaptureFixture, is_loading_first: bool
) -> None:
    num_refusals = 0

    async def refuse(sha256: str, fetch: FetchTokenizer) -> None:
        nonlocal num_refusals
        num_refusals += 1
        raise ValueError("no tokenizer of ours")

    worker = FakeWorker()
    loading = [error_response(UnavailableError("it is loading", retry_after_seconds=1)) for _ in range(3)]
    worker.answer_model = lambda: loading.pop() if is_loading_first and loading else None
    async with worker.serving() as url:
        workers = Workers(
            discovery=ListDiscovery([url, "http://no host:x"]),
            settings=SETTINGS,
            metrics=RouterMetrics(),
            add_tokenizer=refuse,
        )
        running = asyncio.create_task(workers.run())
        await wait_until(lambda: num_refusals == 4)
        running.cancel()
        await asyncio.wait((running,))
    tracebacks = [line.message for line in caplog.records if line.exc_info]
    assert sorted(tracebacks) == ["model cannot be served", "worker connection failed"]
    assert len(caplog.records) == 4


def test_an_idle_socket_is_closed_before_the_worker_closes_it() -> None:
    assert uvicorn.Config("unused:app", log_config=None).timeout_keep_alive > KEEPALIVE_SECONDS


async def test_everything_ends_with_the_router_while_requests_wait_and_stream() -> None:
    worker = FakeWorker()
    worker.hold_at = 1
    async with worker.serving() as url:
        async with routing(url) as router:
            await router.usable()
            stream = router.dispatcher.generate(generation("streaming"))
            await anext(stream)
            waiting = asyncio.create_task(collect(router.dispatcher.generate(generation("waiting", model="none"))))
        with pytest.raises(WorkerLostError):
            await anext(stream)
        with pytest.raises(UnavailableError):
            await waiting
        await wait_until(lambda: not worker.running, what="the worker frees what a gone router had")
