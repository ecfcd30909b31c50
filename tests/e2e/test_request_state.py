"""Records in a real store while a real cluster serves: they appear, move through their states, expire; and a store
that dies and comes back costs no request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from stallfree_shared.request_state import RANK_BY_STATE, RequestRecord, read_record
from stallfree_shared.wire import RequestId
from tests.support.clusters import SCRIPTED, router_samples, script, scripted_cluster, stream, wait_idle
from tests.support.redis_servers import KINDS, RedisServer, redis_server
from tests.support.waiting import wait_until

TEXT = "the harbour is quiet and the nets are dry "


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with redis_server(request.param, tmp_path) as server:
        yield server


@asynccontextmanager
async def _connected(store: RedisServer) -> AsyncIterator[Redis]:
    client: Redis = Redis.from_url(store.url)
    try:
        yield client
    finally:
        await client.aclose()


async def _records(client: Redis) -> list[RequestRecord]:
    keys = [key.decode() async for key in client.scan_iter("stallfree:*:request:*") if not key.endswith(b":tokens")]
    found = [await read_record(client, SCRIPTED, RequestId(key.rsplit(":", 1)[1])) for key in keys]
    return [record for record in found if record is not None]


async def test_a_record_appears_moves_through_its_states_and_expires(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.05")
    prompt = script(TEXT)
    async with (
        scripted_cluster(
            num_workers=1,
            redis_url=store.url,
            worker_args=("--token-budget=4",),
            router_args=("--record-ttl-seconds=2",),
        ) as cluster,
        _connected(store) as client,
    ):
        seen: list[tuple[str, int]] = []

        async def watch() -> None:
            while not seen or RANK_BY_STATE[seen[-1][0]] < 3:  # type: ignore[index]  # the state is one of the keys
                for record in await _records(client):
                    now = (record.state, len(record.output_token_ids))
                    if not seen or seen[-1] != now:
                        seen.append(now)
                for key in await client.keys("stallfree:*"):
                    assert await client.ttl(key) != -1
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            running = tasks.create_task(stream(cluster, prompt).run())
        trace = running.result()
        states = [state for state, _ in seen]
        assert list(dict.fromkeys(states)) == ["dispatched", "streaming", "finished"] or states[0] == "queued"
        assert [count for _, count in seen] == sorted(count for _, count in seen)
        assert len({count for state, count in seen if state == "streaming"}) > 2  # checkpoints on the way
        (record,) = await _records(client)
        assert record.state == "finished"
        assert record.finish_reason == trace.finish_reason == "stop"
        assert record.prompt_token_ids == prompt
        assert record.output_token_ids[:-1] == prompt
        assert record.usage is not None
        assert record.usage.completion_tokens == trace.completion_tokens == len(record.output_token_ids)
        assert record.worker == cluster.workers[0].url
        await wait_until(lambda: _is_empty(client), what="the record has expired")


async def _is_empty(client: Redis) -> bool:
    return not await client.keys("stallfree:*")


async def test_c26_a_store_killed_and_brought_back_during_a_load_costs_no_request(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.01")
    async with scripted_cluster(redis_url=store.url) as cluster, _connected(store) as client:

        async def is_degraded(value: int) -> bool:
            return (await router_samples(cluster)).total("stallfree_router_redis_degraded") == value

        async def load() -> list[str | None]:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(stream(cluster, script(TEXT * 2)).run()) for _ in range(20)]
            return [task.result().error for task in running]

        async with asyncio.timeout(90):
            assert set(await load()) == {None}
            await wait_until(lambda: is_degraded(0))
            long = asyncio.ensure_future(stream(cluster, script(TEXT * 12)).run())
            during = asyncio.ensure_future(load())
            store.kill()
            await wait_until(lambda: is_degraded(1), what="degraded mode is on")
            assert set(await during) == {None}
            assert set(await load()) == {None}
            store.start()
            await wait_until(lambda: is_degraded(0), what="degraded mode is off")
            trace = await long
            assert (trace.error, trace.text) == (None, TEXT * 12)
            assert set(await load()) == {None}
            await wait_until(lambda: _has_ended_records(client, least=20), what="records are kept again")
        await wait_idle(cluster)


async def _has_ended_records(client: Redis, *, least: int) -> bool:
    return sum(record.state == "finished" for record in await _records(client)) >= least
