"""The record of a request in Redis: its fields, its states, and the one way to write it.

    stallfree:{<model>}:request:<id>           hash      what was asked, where it runs, how it ended
    stallfree:{<model>}:request:<id>:tokens    string    output token ids, 4 bytes each (little endian), by index

Both keys of a record share a hash tag, so they live on one shard. Every write is one call of one script, which
applies the transition rule, the fields, the tokens and the time to live of both keys together: there is never a key
without a TTL, and tokens written twice are written to the same place. Times are the server's, so records of several
routers compare.

    queued → dispatched → streaming → finished | failed | cancelled

(attempt, rank of the state) never goes back, and an end is final: what a router writes late, about an attempt that
another one has taken over, changes nothing.

This module does no retry and keeps no connection; the router's `records` writes, and whoever resumes reads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import FinishReason, RequestId, SamplingParams, Usage

RequestState = Literal["queued", "dispatched", "streaming", "finished", "failed", "cancelled"]
RANK_BY_STATE: Mapping[RequestState, int] = {
    "queued": 0,
    "dispatched": 1,
    "streaming": 2,
    "finished": 3,
    "failed": 3,
    "cancelled": 3,
}
END_RANK = 3
TOKEN_BYTES = 4


class WriteResult(IntEnum):
    """What the script answers."""

    REFUSED = 0
    """The record is further than this write: it has ended, or belongs to a later attempt."""
    APPLIED = 1
    INCOMPLETE = 2
    """The server lacks what this write builds on (it was flushed, or has expired it): write the whole record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """All that is kept of one request."""

    request_id: RequestId
    model: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    state: RequestState = "queued"
    attempt: int = 0
    """0 until the first dispatch."""
    worker: str | None = None
    output_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: ErrorInfo | None = None
    created_at_microseconds: int = 0
    """Redis time of the first write; 0 in a record that was not read from there."""
    updated_at_microseconds: int = 0

    @property
    def has_ended(self) -> bool:
        return RANK_BY_STATE[self.state] == END_RANK


def may_follow(stored: tuple[int, RequestState], new: tuple[int, RequestState]) -> bool:
    """Whether a record in (attempt, state) `stored` takes a write of `new`. The script applies the same rule."""
    stored_rank, new_rank = RANK_BY_STATE[stored[1]], RANK_BY_STATE[new[1]]
    return stored_rank != END_RANK and (new[0], new_rank) >= (stored[0], stored_rank)


def record_keys(model: str, request_id: RequestId) -> tuple[str, str]:
    """The keys of the hash and of the tokens."""
    key = f"stallfree:{{{model}}}:request:{request_id}"
    return key, f"{key}:tokens"


_WRITE = """
local ttl_seconds, attempt, rank = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local is_whole, offset, tokens = ARGV[4] == '1', tonumber(ARGV[5]), ARGV[6]
local stored = redis.call('HMGET', KEYS[1], 'attempt', 'rank')
if stored[1] then
    local stored_attempt, stored_rank = tonumber(stored[1]), tonumber(stored[2])
    if stored_rank == 3 or attempt < stored_attempt or (attempt == stored_attempt and rank < stored_rank) then
        return 0
    end
end
if not is_whole and (not stored[1] or redis.call('STRLEN', KEYS[2]) < offset) then
    return 2
end
local time = redis.call('TIME')
local now = string.format('%d%06d', time[1], time[2])
for i = 7, #ARGV, 2 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('HSETNX', KEYS[1], 'created_at', now)
redis.call('HSET', KEYS[1], 'attempt', attempt, 'rank', rank, 'updated_at', now)
redis.call('EXPIRE', KEYS[1], ttl_seconds)
if #tokens > 0 then
    redis.call('SETRANGE', KEYS[2], offset, tokens)
end
redis.call('EXPIRE', KEYS[2], ttl_seconds)
return 1
"""


class RecordScript:
    """The write, bound to one client."""

    def __init__(self, redis: Redis, *, ttl_seconds: int) -> None:
        self._script: AsyncScript = redis.register_script(_WRITE)
        self._ttl_seconds = ttl_seconds

    async def write(
        self, record: RequestRecord, *, num_tokens_written: int = 0, is_whole: bool = True, client: Redis | None = None
    ) -> object:
        """Writes `record` from output token `num_tokens_written` on; `client` may be a pipeline that collects calls.

        Returns:
            A `WriteResult` as an int, or the pipeline.
        """
        offset = 0 if is_whole else num_tokens_written
        arguments: list[str | bytes | int] = [
            self._ttl_seconds,
            record.attempt,
            RANK_BY_STATE[record.state],
            int(is_whole),
            offset * TOKEN_BYTES,
            pack_token_ids(record.output_token_ids[offset:]),
            *_changing_fields(record),
        ]
        if is_whole:
            arguments += _constant_fields(record)
        return await self._script(keys=record_keys(record.model, record.request_id), args=arguments, client=client)


async def read_record(redis: Redis, model: str, request_id: RequestId) -> RequestRecord | None:
    """The record of a request, or None where there is none (any more). `redis` must not decode responses."""
    key, tokens_key = record_keys(model, request_id)
    async with redis.pipeline(transaction=True) as pipeline:
        pipeline.hgetall(key)
        pipeline.get(tokens_key)
        fields, tokens = await pipeline.execute()
    return _decode(request_id, fields, tokens or b"") if fields else None


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}I", data)


def _constant_fields(record: RequestRecord) -> list[str | bytes | int]:
    return [
        *("model", record.model),
        *("tenant", record.tenant),
        *("sampling", record.sampling.model_dump_json()),
        *("prompt_token_ids", pack_token_ids(record.prompt_token_ids)),
    ]


def _changing_fields(record: RequestRecord) -> list[str | bytes | int]:
    fields: list[str | bytes | int] = ["state", record.state]
    if record.worker is not None:
        fields += ["worker", record.worker]
    if record.finish_reason is not None:
        fields += ["finish_reason", record.finish_reason]
    if record.usage is not None:
        fields += ["usage", record.usage.model_dump_json()]
    if record.error is not None:
        fields += ["error", record.error.model_dump_json()]
    return fields


def _decode(request_id: RequestId, fields: Mapping[bytes, bytes], tokens: bytes) -> RequestRecord:
    worker, finish_reason = fields.get(b"worker"), fields.get(b"finish_reason")
    usage, error = fields.get(b"usage"), fields.get(b"error")
    return RequestRecord(
        request_id=request_id,
        model=fields[b"model"].decode(),
        tenant=fields[b"tenant"].decode(),
        prompt_token_ids=unpack_token_ids(fields[b"prompt_token_ids"]),
        sampling=SamplingParams.model_validate_json(fields[b"sampling"]),
        state=_decode_state(fields[b"state"]),
        attempt=int(fields[b"attempt"]),
        worker=None if worker is None else worker.decode(),
        output_token_ids=unpack_token_ids(tokens),
        finish_reason=None if finish_reason is None else ("stop" if finish_reason == b"stop" else "length"),
        usage=None if usage is None else Usage.model_validate_json(usage),
        error=None if error is None else ErrorInfo.model_validate_json(error),
        created_at_microseconds=int(fields[b"created_at"]),
        updated_at_microseconds=int(fields[b"updated_at"]),
    )


def _decode_state(value: bytes) -> RequestState:
    for state in RANK_BY_STATE:
        if state == value.decode():
            return state
    raise ValueError(f"a record in state {value!r}: written by another version")
