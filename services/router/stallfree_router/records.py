"""Keeps the records of this router's requests in Redis, and never on a request's path: a request changes its
`LiveRecord` in memory and goes on. One task writes what has changed, many records in one call; only the present state
of a record matters, so what changed several times is written once.

Redis away, frozen, slow or with another password changes nothing for requests. The task says so once, shows it in a
gauge, tries again with growing pauses, and writes every record whole when Redis is back (C26, C27, C29, C42).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from stallfree_router.messages import Generation
from stallfree_router.metrics import RouterMetrics
from stallfree_shared.errors import ErrorInfo
from stallfree_shared.request_state import RecordScript, RequestRecord, WriteResult
from stallfree_shared.settings import RedisSettings
from stallfree_shared.wire import FinishReason, RequestId, Usage

TICK_SECONDS = 0.05
TOKENS_DELAY_SECONDS = 0.25
PROBE_SECONDS = 1.0
"""Between calls while nothing changes, so that the gauge tells the truth."""
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
FAILURES_TO_DEGRADE = 2
"""In a row: one late answer is no outage."""
MAX_RECORDS_PER_CALL = 64
LAST_WRITE_SECONDS = 2.0
"""For what is not written yet when the router leaves; a slow Redis holds nobody up."""
MAX_ENDED_SIZE = 2_000_000
"""Of all ended requests that wait to be written."""
_CHARACTERS_PER_TOKEN = 8
"""Of a definition that take as much memory as a token id."""

_AnswerT = TypeVar("_AnswerT")

_logger = logging.getLogger(__name__)


class LiveRecord:
    """One request's record while this router works on it. Changed by the request, read by the writer."""

    def __init__(self, record: RequestRecord, records: RequestRecords) -> None:
        self._record = record
        self._records = records
        self._output_token_ids: list[int] = []
        self.num_tokens_written = 0
        self.is_whole_due = True
        """Redis may lack all of it."""
        self.due_at = 0.0
        self.num_changes = 0

    @property
    def request_id(self) -> RequestId:
        return self._record.request_id

    @property
    def has_ended(self) -> bool:
        return self._record.has_ended

    @property
    def size(self) -> int:
        """In tokens: those of prompt and output, and what else a client may make as large as it likes."""
        sampling = self._record.sampling
        definition = "" if sampling.structured_output is None else sampling.structured_output.definition
        num_tokens = len(self._record.prompt_token_ids) + len(self._output_token_ids)
        return num_tokens + len(definition) // _CHARACTERS_PER_TOKEN + len(sampling.logit_bias)

    def snapshot(self) -> RequestRecord:
        return replace(self._record, output_token_ids=tuple(self._output_token_ids))

    def demand_whole(self) -> None:
        """Redis may have lost what was written before."""
        self.is_whole_due, self.num_tokens_written, self.due_at = True, 0, 0.0

    def dispatch(self, *, attempt: int, worker: str) -> None:
        self._change(replace(self._record, state="dispatched", attempt=attempt, worker=worker))

    def add_tokens(self, token_ids: tuple[int, ...]) -> None:
        self._output_token_ids += token_ids
        if self._record.state == "streaming":
            self._records.mark(self, delay_seconds=TOKENS_DELAY_SECONDS)
        else:
            self._change(replace(self._record, state="streaming"))

    def finish(self, finish_reason: FinishReason, usage: Usage | None) -> None:
        self._change(replace(self._record, state="finished", finish_reason=finish_reason, usage=usage))

    def fail(self, error: ErrorInfo) -> None:
        self._change(replace(self._record, state="failed", error=error))

    def close(self) -> None:
        """The request is over; one that has no end yet was cancelled by its client. Idempotent."""
        self._change(replace(self._record, state="cancelled"))

    def _change(self, record: RequestRecord) -> None:
        if not self.has_ended:
            self._record = record
            self._records.mark(self, delay_seconds=TICK_SECONDS)


class RequestRecords:
    """Owns the records that have not ended, or are not written to their end. Run `run` while requests are served."""

    def __init__(self, settings: RedisSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._is_degraded: bool | None = None
        """None: not known yet."""
        self._num_failures = 0
        """In a row."""
        self._live_by_id: dict[RequestId, LiveRecord] = {}
        self._ended_by_id: OrderedDict[RequestId, LiveRecord] = OrderedDict()
        self._ended_size = 0
        self._dirty: set[LiveRecord] = set()
        self._woken = asyncio.Event()
        metrics.redis_degraded.set(0 if settings.redis_url is None else 1)

    @property
    def num_waiting(self) -> int:
        """Records with changes that are not written yet."""
        return len(self._dirty)

    @property
    def num_held(self) -> int:
        return len(self._live_by_id) + len(self._ended_by_id)

    def open(self, generation: Generation) -> LiveRecord:
        """The record of a request that begins. The request closes it, whatever happens."""
        record = RequestRecord(
            request_id=generation.request_id,
            model=generation.model,
            tenant=generation.tenant,
            prompt_token_ids=generation.prompt_token_ids,
            sampling=generation.sampling,
        )
        live = LiveRecord(record, self)
        if self._settings.redis_url is not None:
            self._live_by_id[live.request_id] = live
            self.mark(live, delay_seconds=TICK_SECONDS)
        return live

    def mark(self, live: LiveRecord, *, delay_seconds: float) -> None:
        """`live` has changed and is to be written within `delay_seconds`."""
        if self._settings.redis_url is None:
            return
        due_at = time.monotonic() + delay_seconds
        live.due_at = min(live.due_at, due_at) if live in self._dirty else due_at
        live.num_changes += 1
        self._dirty.add(live)
        self._woken.set()
        if live.has_ended and self._live_by_id.pop(live.request_id, None) is not None:
            self._ended_by_id[live.request_id] = live
            self._ended_size += live.size
            while self._ended_size > MAX_ENDED_SIZE:
                self._forget(next(iter(self._ended_by_id.values())))
                self._metrics.records_dropped.inc()

    async def run(self) -> None:
        """Writes until it is cancelled; then once more, for the records of the last moments."""
        if self._settings.redis_url is None:
            _logger.info("request state is not kept: no redis_url")
            return
        async with contextlib.aclosing(self._connect(self._settings.redis_url)) as redis:
            script = RecordScript(redis, ttl_seconds=self._settings.record_ttl_seconds)
            try:
                await self._keep_writing(redis, script)
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WRITE_SECONDS):
                        await self._write_due(redis, script, until=float("inf"))

    async def _keep_writing(self, redis: Redis, script: RecordScript) -> None:
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while True:
            if await self._write_due(redis, script, until=time.monotonic()):
                backoff_seconds = FIRST_BACKOFF_SECONDS
                await self._wait_for_work()
            else:
                await asyncio.sleep(backoff_seconds * random.uniform(0.5, 1.0))
                backoff_seconds = min(MAX_BACKOFF_SECONDS, 2 * backoff_seconds)

    async def _wait_for_work(self) -> None:
        """Until something is due, or until it is time to see whether Redis is still there."""
        self._woken.clear()
        if not self._dirty:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._woken.wait()
        await asyncio.sleep(TICK_SECONDS)

    async def _write_due(self, redis: Redis, script: RecordScript, *, until: float) -> bool:
        """Writes what is due by `until`, or only asks whether Redis is there. Returns whether it answered."""
        due = [live for live in self._dirty if live.due_at <= until]
        try:
            if not self._dirty or self._is_degraded is not False:
                await self._call(redis.ping)
            for start in range(0, len(due), MAX_RECORDS_PER_CALL):
                await self._write(redis, script, due[start : start + MAX_RECORDS_PER_CALL])
        except Exception as error:  # noqa: BLE001 - top-level: whatever is wrong here is shown, and requests go on
            await self._degrade(redis, error)
            return False
        self._recover()
        return True

    async def _write(self, redis: Redis, script: RecordScript, batch: list[LiveRecord]) -> None:
        written = [(live, live.num_changes, live.snapshot()) for live in batch]
        async with redis.pipeline(transaction=False) as pipeline:
            for live, _, record in written:
                await script.write(
                    record,
                    num_tokens_written=live.num_tokens_written,
                    is_whole=live.is_whole_due,
                    client=pipeline,
                )
            results = await self._call(pipeline.execute)
        for (live, num_changes, record), result in zip(written, results, strict=True):
            if result == WriteResult.INCOMPLETE:
                live.demand_whole()
                continue
            live.is_whole_due = False
            live.num_tokens_written = len(record.output_token_ids)
            if record.has_ended:
                self._forget(live)
            elif live.num_changes == num_changes:
                self._dirty.discard(live)

    async def _call(self, call: Callable[[], Awaitable[_AnswerT]]) -> _AnswerT:
        started_at, result = time.monotonic(), "error"
        try:
            async with asyncio.timeout(self._settings.redis_timeout_seconds):
                answer = await call()
            result = "ok"
            return answer
        finally:
            self._metrics.redis_seconds.labels(result).observe(time.monotonic() - started_at)

    def _forget(self, live: LiveRecord) -> None:
        self._dirty.discard(live)
        if self._ended_by_id.pop(live.request_id, None) is not None:
            self._ended_size -= live.size

    async def _degrade(self, redis: Redis, error: Exception) -> None:
        """Nothing that was written before is taken for granted when Redis is back."""
        for live in (*self._live_by_id.values(), *self._ended_by_id.values()):
            live.demand_whole()
            self._dirty.add(live)
        self._num_failures += 1
        if self._num_failures >= FAILURES_TO_DEGRADE and not self._is_degraded:
            reason = f"{type(error).__name__}: {error}"
            _logger.error("redis is away: request state is not kept", extra={"reason": reason})
            self._is_degraded = True
            self._metrics.redis_degraded.set(1)
        with contextlib.suppress(RedisError, OSError):
            await redis.connection_pool.disconnect()

    def _recover(self) -> None:
        if self._is_degraded is not False:
            _logger.info("redis is there: request state is kept")
        self._is_degraded = False
        self._num_failures = 0
        self._metrics.redis_degraded.set(0)

    def _connect(self, url: str) -> Redis:
        """A client that never waits longer than it may, and leaves trying again to its caller."""
        timeout_seconds = self._settings.redis_timeout_seconds
        return Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
            max_connections=2,
        )
