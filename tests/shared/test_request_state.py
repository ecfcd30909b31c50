"""The record in real servers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from stallfree_shared.errors import WorkerLostError
from stallfree_shared.request_state import (
    RANK_BY_STATE,
    RecordScript,
    RequestRecord,
    RequestState,
    WriteResult,
    may_follow,
    pack_token_ids,
    read_record,
    record_keys,
    unpack_token_ids,
)
from stallfree_shared.wire import RequestId, SamplingParams, Usage
from tests.support.redis_servers import KINDS, RedisServer, redis_server
from tests.support.waiting import wait_until

STATES: tuple[RequestState, ...] = tuple(RANK_BY_STATE)
RECORD = RequestRecord(
    request_id=RequestId("r1"),
    model="org/model-7B",
    tenant="default",
    prompt_token_ids=(1, 2, 2**32 - 1),
    sampling=SamplingParams(max_tokens=9, seed=2**63, stop_token_ids=frozenset({4})),
    state="streaming",
    attempt=1,
    worker="http://10.0.0.7:8000",
    output_token_ids=(7, 8, 9),
)


@pytest.fixture(params=KINDS, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder: Path = tmp_path_factory.mktemp("redis")
    with redis_server(str(request.param), folder) as running:
        yield running


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        await client.flushall()
        yield client


def script(redis: Redis, *, ttl_seconds: int = 60) -> RecordScript:
    return RecordScript(redis, ttl_seconds=ttl_seconds)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, state="queued", attempt=0, worker=None, output_token_ids=()),
        replace(
            RECORD, state="finished", finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=3), attempt=2
        ),
        replace(RECORD, state="failed", error=WorkerLostError("gone").info),
    ],
)
async def test_what_is_written_is_read(redis: Redis, record: RequestRecord) -> None:
    assert await script(redis).write(record) == WriteResult.APPLIED
    found = await read_record(redis, record.model, record.request_id)
    assert found is not None
    assert replace(found, created_at_microseconds=0, updated_at_microseconds=0) == record
    assert await read_record(redis, "other", record.request_id) is None


async def test_c30_every_key_has_a_ttl_after_every_write_and_both_expire(redis: Redis) -> None:
    keys = record_keys(RECORD.model, RECORD.request_id)
    for ttl_seconds in (50, 1):
        await script(redis, ttl_seconds=ttl_seconds).write(RECORD)
        assert set(await redis.keys("*")) == {key.encode() for key in keys}
        assert [0 < await redis.ttl(key) <= ttl_seconds for key in keys] == [True, True]

    async def is_empty() -> bool:
        return await redis.dbsize() == 0

    await wait_until(is_empty, what="the record expires")


async def test_both_keys_share_the_models_hash_tag(redis: Redis) -> None:
    for key in record_keys("org/model-7B", RequestId("x")):
        assert key.startswith("stallfree:{org/model-7B}:request:x")


async def test_tokens_are_written_by_index_and_twice_is_once(redis: Redis) -> None:
    write = script(redis).write
    await write(RECORD)
    longer = replace(RECORD, output_token_ids=(7, 8, 9, 10, 11))
    for _ in range(2):
        assert await write(longer, num_tokens_written=3, is_whole=False) == WriteResult.APPLIED
    found = await read_record(redis, RECORD.model, RECORD.request_id)
    assert found is not None
    assert found.output_token_ids == (7, 8, 9, 10, 11)


async def test_a_write_that_builds_on_what_is_lost_asks_for_the_whole(redis: Redis) -> None:
    write = script(redis).write
    assert await write(RECORD, num_tokens_written=2, is_whole=False) == WriteResult.INCOMPLETE
    assert await redis.dbsize() == 0
    await write(RECORD)
    longer = replace(RECORD, output_token_ids=(1, 2, 3, 4, 5, 6))
    assert await write(longer, num_tokens_written=5, is_whole=False) == WriteResult.INCOMPLETE


async def test_times_are_the_servers_and_the_first_one_stays(redis: Redis) -> None:
    await script(redis).write(replace(RECORD, state="queued"))
    first = await read_record(redis, RECORD.model, RECORD.request_id)
    await script(redis).write(RECORD)
    second = await read_record(redis, RECORD.model, RECORD.request_id)
    seconds, microseconds = await redis.time()
    assert first is not None
    assert second is not None
    assert first.created_at_microseconds == second.created_at_microseconds
    assert first.updated_at_microseconds < second.updated_at_microseconds <= seconds * 10**6 + microseconds


@pytest.mark.parametrize("seed", range(8))
async def test_the_script_keeps_the_transition_rule(redis: Redis, seed: int) -> None:
    """Random writes, against the rule in plain Python."""
    rng = random.Random(seed)
    write = script(redis).write
    stored: tuple[int, RequestState] | None = None
    for _ in range(30):
        new = rng.randint(0, 3), rng.choice(STATES if rng.random() < 0.2 else STATES[:3])
        expected = stored is None or may_follow(stored, new)
        result = await write(replace(RECORD, attempt=new[0], state=new[1]))
        assert (result == WriteResult.APPLIED) == expected, (seed, stored, new)
        stored = new if expected else stored
        found = await read_record(redis, RECORD.model, RECORD.request_id)
        assert found is not None
        assert (found.attempt, found.state) == stored


@pytest.mark.parametrize("end", ["finished", "failed", "cancelled"])
def test_an_end_is_final(end: RequestState) -> None:
    assert not any(may_follow((1, end), (attempt, state)) for attempt in range(4) for state in STATES)


def test_a_later_attempt_may_begin_again_and_an_older_one_may_not() -> None:
    assert may_follow((1, "streaming"), (2, "dispatched"))
    assert not may_follow((2, "dispatched"), (1, "streaming"))
    assert not may_follow((2, "dispatched"), (1, "finished"))


def test_tokens_are_little_endian_and_four_bytes() -> None:
    assert pack_token_ids((1, 2**32 - 1)) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert unpack_token_ids(pack_token_ids((1, 2, 3))) == (1, 2, 3)
