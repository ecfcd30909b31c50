"""A dispatching side of a router for tests, wired to workers that are real processes or real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from stallfree_router.discovery import Discovery, UrlDiscovery
from stallfree_router.dispatch import Dispatcher
from stallfree_router.messages import Generation, Outputs
from stallfree_router.metrics import RouterMetrics
from stallfree_router.predictor import Predictor
from stallfree_router.records import RequestRecords
from stallfree_router.settings import DiscoverySettings, DispatchSettings
from stallfree_router.worker_connection import FetchTokenizer
from stallfree_router.workers import Workers
from stallfree_shared.settings import RedisSettings
from stallfree_shared.wire import RequestId, SamplingParams
from tests.router.fake_worker import MODEL
from tests.support.waiting import wait_until

SETTINGS = DispatchSettings(
    connect_timeout_seconds=1.0,
    submit_timeout_seconds=2.0,
    silence_timeout_seconds=1.0,
    max_attempts=3,
    no_worker_timeout_seconds=2.0,
)


class ListDiscovery:
    """Says what the test tells it to."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.set(urls)

    def set(self, urls: Sequence[str]) -> None:
        self._urls.put_nowait(frozenset(urls))

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        while True:
            yield await self._urls.get()


@dataclass
class Routing:
    workers: Workers
    dispatcher: Dispatcher
    metrics: RouterMetrics
    tokenizers: dict[str, bytes] = field(default_factory=dict)

    async def usable(self, num_workers: int = 1, *, model: str = MODEL) -> None:
        def holds() -> bool:
            return self.sample("usable_workers", model=model) == num_workers

        await wait_until(holds, what=f"{num_workers} usable workers")

    async def idle(self) -> None:
        """Nothing of any request is left."""

        def holds() -> bool:
            try:
                self.workers.check_integrity(is_idle=True)
            except AssertionError:
                return False
            return True

        await wait_until(holds, 3, what="the idle invariant")

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"stallfree_router_{name}", labels)


@contextlib.asynccontextmanager
async def routing(
    *urls: str,
    settings: DispatchSettings = SETTINGS,
    discovery: Discovery | None = None,
    redis: RedisSettings | None = None,
) -> AsyncIterator[Routing]:
    metrics = RouterMetrics()
    records = RequestRecords(redis or RedisSettings(), metrics)
    tokenizers: dict[str, bytes] = {}

    async def add_tokenizer(sha256: str, fetch: FetchTokenizer) -> None:
        tokenizers[sha256] = await fetch()

    workers = Workers(
        discovery=discovery or UrlDiscovery(DiscoverySettings(worker_urls=urls)),
        settings=settings,
        metrics=metrics,
        add_tokenizer=add_tokenizer,
        rng=random.Random(7),
    )
    dispatcher = Dispatcher(
        workers=workers, predictor=Predictor(metrics), records=records, metrics=metrics, settings=settings
    )
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(workers.run()), tasks.create_task(records.run())]
        yield Routing(workers=workers, dispatcher=dispatcher, metrics=metrics, tokenizers=tokenizers)
        for task in running:
            task.cancel()


def generation(
    name: str = "r1", *, max_tokens: int = 5, num_prompt_tokens: int = 3, model: str = MODEL, ignore_eos: bool = False
) -> Generation:
    return Generation(
        request_id=RequestId(name),
        model=model,
        prompt_token_ids=tuple(range(1, num_prompt_tokens + 1)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        arrived_at=time.monotonic(),
    )


async def collect(outputs: Outputs, into: list[int] | None = None) -> list[int]:
    """All token ids; those that came before an error are in `into`."""
    token_ids = [] if into is None else into
    async with contextlib.aclosing(outputs) as each:
        async for output in each:
            token_ids += output.token_ids
    return token_ids
