"""The router's API side, real but for its workers: a generator that echoes stands where the dispatcher would.

`EchoGenerator` answers a prompt with the prompt's own tokens and then end-of-sequence, as `ScriptedRunner` does, so a
test writes the wanted output into the prompt; log-probabilities are those of `scripted_logprobs`. `RouterUnderTest` has
the application, and speaks to it in memory (`client`) or over real sockets (`served`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from stallfree_router.app import assemble
from stallfree_router.messages import Generation, OutputTokens
from stallfree_router.metrics import RouterMetrics
from stallfree_router.settings import RouterSettings
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_shared.drain import Drain
from stallfree_shared.errors import StallfreeError
from stallfree_shared.wire import ModelCard, TokenLogprobs, Usage
from tests.support.scripted import EOS, scripted_card, scripted_logprobs, scripted_tokenizer

TBT_TARGET_SECONDS = 0.2
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")


class EchoOutputs:
    """The `Outputs` of one generation."""

    def __init__(self, generator: EchoGenerator, outputs: AsyncGenerator[OutputTokens, None]) -> None:
        self._generator = generator
        self._outputs = outputs

    def __aiter__(self) -> AsyncIterator[OutputTokens]:
        return self

    async def __anext__(self) -> OutputTokens:
        return await anext(self._outputs)

    def complete(self, *, num_tokens: int) -> None:
        self._generator.completed.append(num_tokens)

    async def aclose(self) -> None:
        await self._outputs.aclose()


class EchoGenerator:
    """A `Generator` without workers. `budget` None gives all tokens at once; else each token needs one `release`."""

    def __init__(self) -> None:
        self.tokens_per_event = 1
        self.cached_tokens: list[int] = []
        """Of the next generations; 0 where none is left."""
        self.generations: list[Generation] = []
        self.running = 0
        self.num_closed_early = 0
        self.num_given = 0
        self.completed: list[int] = []
        """Tokens of each generation that its text has ended early."""
        self.error: StallfreeError | Exception | None = None
        """Raised in place of output token `error_index` of every generation."""
        self.error_index = 0
        self._budget: asyncio.Semaphore | None = None

    def hold(self) -> None:
        """From now on every event needs a `release`."""
        self._budget = asyncio.Semaphore(0)

    def release(self, num_events: int = 1) -> None:
        assert self._budget is not None
        for _ in range(num_events):
            self._budget.release()

    def generate(self, generation: Generation) -> EchoOutputs:
        return EchoOutputs(self, self._give(generation))

    async def _give(self, generation: Generation) -> AsyncGenerator[OutputTokens, None]:
        self.generations.append(generation)
        self.running += 1
        has_ended = False
        try:
            for output in self._outputs(generation):
                if self._budget is not None:
                    await self._budget.acquire()
                if self.error is not None and output.index + len(output.token_ids) > self.error_index:
                    has_ended = True
                    raise self.error
                self.num_given += len(output.token_ids)
                has_ended = output.finish_reason is not None
                yield output
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            self.num_closed_early += not has_ended

    def _outputs(self, generation: Generation) -> Iterator[OutputTokens]:
        script, sampling = [*generation.prompt_token_ids, EOS], generation.sampling
        if sampling.ignore_eos:
            script += [EOS] * sampling.max_tokens
        token_ids = script[: sampling.max_tokens]
        usage = Usage(
            prompt_tokens=len(generation.prompt_token_ids),
            completion_tokens=len(token_ids),
            cached_tokens=self.cached_tokens.pop(0) if self.cached_tokens else 0,
        )
        is_stop = token_ids[-1] == EOS and not sampling.ignore_eos
        for start in range(0, len(token_ids), self.tokens_per_event):
            piece = tuple(token_ids[start : start + self.tokens_per_event])
            is_last = start + len(piece) == len(token_ids)
            yield OutputTokens(
                index=start,
                token_ids=piece,
                logprobs=_logprobs(piece, sampling.logprobs),
                prompt_logprobs=_logprobs(generation.prompt_token_ids[1:], sampling.prompt_logprobs)
                if start == 0
                else None,
                received_at=time.monotonic(),
                tbt_target_seconds=TBT_TARGET_SECONDS,
                finish_reason=("stop" if is_stop else "length") if is_last else None,
                usage=usage if is_last or start == 0 else None,
            )


def _logprobs(token_ids: tuple[int, ...], num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    return None if num_top is None else tuple(scripted_logprobs(token_id, num_top) for token_id in token_ids)


class FakeModels:
    """`ServedModels` as the test says."""

    def __init__(self, *cards: ModelCard) -> None:
        self.card_by_model = {card.model: card for card in cards}
        self.is_usable = True

    def models(self) -> Mapping[str, ModelCard]:
        return self.card_by_model

    def usable(self, model: str) -> bool:
        return self.is_usable and model in self.card_by_model


class RouterUnderTest:
    def __init__(self, settings: RouterSettings, card: ModelCard) -> None:
        self.settings = settings
        self.card = card
        self.drain = Drain()
        self.metrics = RouterMetrics()
        self.generator = EchoGenerator()
        self.models = FakeModels(card)
        self.tokenizers = TokenizerRegistry(num_threads=1)
        self.num_calls = 0
        self.app: FastAPI = assemble(
            settings,
            drain=self.drain,
            metrics=self.metrics,
            tokenizers=self.tokenizers,
            served_models=self.models,
            generator=self.generator,
        )

    @property
    def registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels among theirs."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def outcomes(self) -> Counter[str]:
        """Calls counted so far, by outcome."""
        counts: Counter[str] = Counter()
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == "stallfree_router_requests_total":
                    counts[sample.labels["outcome"]] += int(sample.value)
        return counts

    def assert_idle(self) -> None:
        """Nothing is left of any call, and every call was counted once."""
        assert self.generator.running == 0
        assert self.drain.in_flight == 0
        assert self.value("stallfree_router_in_flight_requests") == 0
        assert self.outcomes().total() == self.value("stallfree_router_request_seconds_count")

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """Serves on a free loopback port, which it gives."""
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none", lifespan="on"
        )
        server = _Server(config)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            await asyncio.wait({serving, tasks.create_task(server.has_started.wait())}, return_when="FIRST_COMPLETED")
            try:
                yield server.servers[0].sockets[0].getsockname()[1]
            finally:
                server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        self.has_started.set()


@contextlib.asynccontextmanager
async def router_under_test(*, max_model_len: int = 2048, **settings: object) -> AsyncIterator[RouterUnderTest]:
    """A router with the scripted model. Checks at the end that nothing is left."""
    card = scripted_card(max_model_len=max_model_len)
    router = RouterUnderTest(RouterSettings.model_validate(settings), card)

    async def fetch() -> bytes:
        return scripted_tokenizer().to_str().encode()

    await router.tokenizers.add(card.tokenizer_sha256, fetch)
    try:
        yield router
        router.assert_idle()
    finally:
        router.tokenizers.close()
