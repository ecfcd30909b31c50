"""Records against real servers that die, freeze and come back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from stallfree_router import records as records_module
from stallfree_router.metrics import RouterMetrics
from stallfree_router.records import RequestRecords
from stallfree_shared.errors import WorkerLostError
from stallfree_shared.request_state import RequestRecord, read_record
from stallfree_shared.settings import RedisSettings
from stallfree_shared.wire import MAX_DEFINITION_BYTES, RequestId, SamplingParams, StructuredOutput, Usage
from tests.router.fake_worker import MODEL, FakeWorker
from tests.router.routing import collect, generation, routing
from tests.support.redis_servers import KINDS, RedisServer, redis_server
from tests.support.waiting import wait_until


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(str(request.param), tmp_path) as running:
        yield running


def settings(server: RedisServer, *, ttl_seconds: int = 60) -> RedisSettings:
    return RedisSettings(redis_url=server.url, record_ttl_seconds=ttl_seconds, redis_timeout_seconds=0.2)


@contextlib.asynccontextmanager
async def keeping(redis_settings: RedisSettings) -> AsyncIterator[tuple[RequestRecords, RouterMetrics]]:
    metrics = RouterMetrics()
    records = RequestRecords(redis_settings, metrics)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(records.run())
        yield records, metrics
        task.cancel()


async def stored(server: RedisServer, name: str = "r1") -> RequestRecord | None:
    async with Redis.from_url(server.url) as redis:
        return await read_record(redis, MODEL, RequestId(name))


async def wait_for(server: RedisServer, state: str, *, name: str = "r1", num_tokens: int = 0) -> RequestRecord:
    found: list[RequestRecord] = []

    async def holds() -> bool:
        record = await stored(server, name)
        if record is None or record.state != state or len(record.output_token_ids) < num_tokens:
            return False
        found.append(record)
        return True

    await wait_until(holds, 8, what=f"record {name} is {state}")
    return found[0]


async def all_keys_have_a_ttl(server: RedisServer) -> bool:
    async with Redis.from_url(server.url) as redis:
        return all([await redis.ttl(key) > 0 for key in await redis.keys("*")])


def degraded(metrics: RouterMetrics) -> float | None:
    return metrics.registry.get_sample_value("stallfree_router_redis_degraded")


def away_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.message for line in caplog.records if line.name == records_module.__name__]


async def test_a_record_appears_moves_and_expires(server: RedisServer) -> None:
    async with keeping(settings(server, ttl_seconds=1)) as (records, metrics):
        live = records.open(generation())
        record = await wait_for(server, "queued")
        assert record.prompt_token_ids == (1, 2, 3)
        live.dispatch(attempt=1, worker="http://w:1")
        assert (await wait_for(server, "dispatched")).worker == "http://w:1"
        live.add_tokens((5, 6))
        live.add_tokens((7,))
        assert (await wait_for(server, "streaming", num_tokens=3)).output_token_ids == (5, 6, 7)
        live.finish("length", Usage(prompt_tokens=3, completion_tokens=3))
        live.close()
        record = await wait_for(server, "finished")
        assert record.finish_reason == "length"
        assert record.usage == Usage(prompt_tokens=3, completion_tokens=3)
        assert await all_keys_have_a_ttl(server)
        assert degraded(metrics) == 0
        await wait_until(lambda: records.num_held == records.num_waiting == 0)

        async def is_gone() -> bool:
            return await stored(server) is None

        await wait_until(is_gone, what="the record expires")


async def test_one_that_is_closed_without_an_end_was_cancelled(server: RedisServer) -> None:
    async with keeping(settings(server)) as (records, _):
        cancelled, failed = records.open(generation("r1")), records.open(generation("r2"))
        cancelled.close()
        failed.fail(WorkerLostError("gone").info)
        failed.close()
        await wait_for(server, "cancelled", name="r1")
        assert (await wait_for(server, "failed", name="r2")).error == WorkerLostError("gone").info


async def test_the_last_moments_are_written_on_the_way_out(server: RedisServer) -> None:
    async with keeping(settings(server)) as (records, metrics):
        await wait_until(lambda: degraded(metrics) == 0)
        records.open(generation()).close()
    record = await stored(server)
    assert record is not None
    assert record.state == "cancelled"


@contextlib.asynccontextmanager
async def slow_way_to(server: RedisServer, delay_seconds: float) -> AsyncIterator[str]:
    """A URL under which every answer of `server` takes `delay_seconds` longer."""

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(2**16):
                await asyncio.sleep(delay)
                target.write(data)
                await target.drain()
        target.close()

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(carry(reader, redis_writer, 0.0), carry(redis_reader, writer, delay_seconds))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/0"
    finally:
        proxy.close()
        await proxy.wait_closed()
        await asyncio.wait([task for task in serving if task is not None], timeout=5)


async def test_c29_a_slow_redis_does_not_hold_up_a_router_that_leaves(server: RedisServer) -> None:
    async with slow_way_to(server, 0.2) as url:
        slow = settings(server).model_copy(update={"redis_url": url, "redis_timeout_seconds": 5.0})
        async with keeping(slow) as (records, metrics):
            await wait_until(lambda: degraded(metrics) == 0)
            for number in range(20 * records_module.MAX_RECORDS_PER_CALL):
                records.open(generation(f"r{number}")).close()
            started_at = time.monotonic()
        assert time.monotonic() - started_at < records_module.LAST_WRITE_SECONDS + 1


async def test_c42_redis_killed_and_back_empty_has_the_live_records_whole_again(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with keeping(settings(server)) as (records, metrics):
        live = records.open(generation())
        live.dispatch(attempt=1, worker="http://w:1")
        live.add_tokens(tuple(range(50)))
        await wait_for(server, "streaming", num_tokens=50)
        server.kill()
        live.add_tokens((50, 51))
        await wait_until(lambda: degraded(metrics) == 1, what="degraded")
        live.add_tokens((52,))
        server.start()
        record = await wait_for(server, "streaming", num_tokens=53)
        assert record.output_token_ids == tuple(range(53))
        assert record.prompt_token_ids == (1, 2, 3)
        await wait_until(lambda: degraded(metrics) == 0)
        assert await all_keys_have_a_ttl(server)
        live.close()
    assert len(away_lines(caplog)) == 3  # there, away, there: C29


async def test_c42_a_record_that_does_not_change_is_back_with_redis_too(server: RedisServer) -> None:
    async with keeping(settings(server)) as (records, metrics):
        live = records.open(generation())
        live.add_tokens((1, 2, 3))
        await wait_for(server, "streaming", num_tokens=3)
        await wait_until(lambda: records.num_waiting == 0)
        server.kill()
        await wait_until(lambda: degraded(metrics) == 1, what="degraded")
        server.start()
        assert (await wait_for(server, "streaming", num_tokens=3)).output_token_ids == (1, 2, 3)
        live.close()


async def test_what_changes_while_it_is_being_written_is_written_again(server: RedisServer) -> None:
    patient = settings(server).model_copy(update={"redis_timeout_seconds": 5.0})
    async with keeping(patient) as (records, _):
        live = records.open(generation())
        live.add_tokens((1,))
        await wait_for(server, "streaming", num_tokens=1)
        await wait_until(lambda: records.num_waiting == 0)
        server.send_signal(signal.SIGSTOP)
        live.add_tokens((2,))
        await wait_until(lambda: time.monotonic() > live.due_at + 3 * records_module.TICK_SECONDS)
        live.add_tokens((3,))
        server.send_signal(signal.SIGCONT)
        assert (await wait_for(server, "streaming", num_tokens=3)).output_token_ids == (1, 2, 3)
        live.close()


async def test_a_flushed_redis_gets_the_record_whole_though_no_call_failed(server: RedisServer) -> None:
    async with keeping(settings(server)) as (records, _):
        live = records.open(generation())
        live.add_tokens((1, 2, 3))
        await wait_for(server, "streaming", num_tokens=3)
        async with Redis.from_url(server.url) as redis:
            await redis.flushall()
        live.add_tokens((4,))
        assert (await wait_for(server, "streaming", num_tokens=4)).output_token_ids == (1, 2, 3, 4)
        live.close()


async def test_c26_c29_a_frozen_redis_blocks_nobody_and_is_said_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=records_module.__name__)
    worker = FakeWorker()
    async with worker.serving() as url, routing(url, redis=settings(server)) as router:
        await router.usable()
        await collect(router.dispatcher.generate(generation("before")))
        await wait_for(server, "finished", name="before")
        server.send_signal(signal.SIGSTOP)
        number, slowest = 0, 0.0
        while degraded(router.metrics) != 1 or number < 50:
            started_at = time.monotonic()
            await collect(router.dispatcher.generate(generation(f"r{number}")))
            slowest, number = max(slowest, time.monotonic() - started_at), number + 1
        assert slowest < 1
        server.send_signal(signal.SIGCONT)
        await wait_until(lambda: degraded(router.metrics) == 0, what="it recovers")
        await collect(router.dispatcher.generate(generation("after")))
        for name in ("r0", f"r{number - 1}", "after"):
            assert len((await wait_for(server, "finished", name=name)).output_token_ids) == 5
        assert await all_keys_have_a_ttl(server)
        await router.idle()
    assert len(away_lines(caplog)) == 3


async def test_c27_redis_that_comes_later_is_joined(server: RedisServer) -> None:
    server.kill()
    async with keeping(settings(server)) as (records, metrics):
        live = records.open(generation())
        await wait_until(lambda: degraded(metrics) == 1)
        server.start()
        await wait_for(server, "queued")
        await wait_until(lambda: degraded(metrics) == 0)
        live.close()


async def test_c27_a_wrong_password_is_loud_and_serving_goes_on(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Redis.from_url(server.url) as redis:
        await redis.config_set("requirepass", "secret")
    wrong = settings(server).model_copy(update={"redis_url": server.url.replace("//", "//:not-it@")})
    worker = FakeWorker()
    async with worker.serving() as url, routing(url, redis=wrong) as router:
        await router.usable()
        assert len(await collect(router.dispatcher.generate(generation()))) == 5
        await wait_until(lambda: bool(away_lines(caplog)))
        assert degraded(router.metrics) == 1
    (line,) = (line for line in caplog.records if line.name == records_module.__name__)
    assert line.levelno == logging.ERROR
    assert "password" in str(line.__dict__["reason"]).lower()
    assert "not-it" not in str(line.__dict__)


async def test_without_a_url_nothing_is_kept_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=records_module.__name__)
    async with keeping(RedisSettings()) as (records, metrics):
        for number in range(3):
            live = records.open(generation(f"r{number}"))
            live.add_tokens((1,))
            live.close()
        assert records.num_held == records.num_waiting == 0
        assert degraded(metrics) == 0
        await wait_until(lambda: bool(away_lines(caplog)))
    assert len(away_lines(caplog)) == 1


async def test_c34_ended_records_that_cannot_be_written_are_bounded_and_counted() -> None:
    nowhere = RedisSettings(redis_url="redis://127.0.0.1:1", redis_timeout_seconds=0.1)
    async with keeping(nowhere) as (records, metrics):
        num_tokens = records_module.MAX_ENDED_SIZE // 4
        for number in range(6):
            records.open(generation(f"r{number}", num_prompt_tokens=num_tokens)).close()
        assert records.num_held == 4
        assert metrics.registry.get_sample_value("stallfree_router_records_dropped_total") == 2


async def test_c34_what_a_client_sends_besides_a_prompt_counts_for_that_bound() -> None:
    nowhere = RedisSettings(redis_url="redis://127.0.0.1:1", redis_timeout_seconds=0.1)
    definition = StructuredOutput(kind="regex", definition="a" * MAX_DEFINITION_BYTES)
    asked = SamplingParams(max_tokens=1, structured_output=definition, logit_bias=dict.fromkeys(range(1024), 1.0))
    async with keeping(nowhere) as (records, _):
        for number in range(200):
            records.open(replace(generation(f"r{number}"), sampling=asked)).close()
        assert 100 < records.num_held < 130


async def test_a_stop_string_is_an_end_and_no_cancellation(server: RedisServer) -> None:
    worker = FakeWorker()
    worker.hold_at = 4
    async with worker.serving() as url, routing(url, redis=settings(server)) as router:
        await router.usable()
        async with contextlib.aclosing(router.dispatcher.generate(generation(max_tokens=100))) as outputs:
            while (await anext(outputs)).index < 3:
                pass
            outputs.complete(num_tokens=3)
        record = await wait_for(server, "finished")
        assert record.finish_reason == "stop"
        assert record.usage == Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1)
        await wait_until(lambda: worker.cancels == [(RequestId("r1"), 1)], what="the cancel")
        assert router.sample("predicted_output_tokens_error_ratio_count", model=MODEL) == 1
        await router.idle()


async def test_outputs_that_nobody_reads_leave_no_record_behind(server: RedisServer) -> None:
    worker = FakeWorker()
    async with worker.serving() as url, routing(url, redis=settings(server)) as router:
        await router.usable()
        await router.dispatcher.generate(generation()).aclose()
        assert (await wait_for(server, "cancelled")).attempt == 0
        assert worker.submits == []
        await router.idle()
