"""Tokenizers: loaded once a hash, off the event loop, and never shortening a prompt."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator

import pytest

from stallfree_router.text.registry import TokenizerRegistry
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.errors import UnavailableError
from tests.support.scripted import scripted_card, scripted_tokenizer

_JSON = scripted_tokenizer().to_str().encode()


@pytest.fixture
async def registry() -> AsyncIterator[TokenizerRegistry]:
    registry = TokenizerRegistry(max_tokenizers=2, num_threads=1)
    yield registry
    registry.close()


class Source:
    """Counts how often a tokenizer is fetched."""

    def __init__(self, content: bytes = _JSON) -> None:
        self.content = content
        self.num_fetches = 0

    async def fetch(self) -> bytes:
        self.num_fetches += 1
        await asyncio.sleep(0)
        return self.content


async def test_workers_of_one_model_share_one_tokenizer(registry: TokenizerRegistry) -> None:
    source = Source()
    card = scripted_card()
    await asyncio.gather(*(registry.add(card.tokenizer_sha256, source.fetch) for _ in range(5)))
    num_fetches = source.num_fetches
    loaded = registry.tokenizer(card)
    await registry.add(card.tokenizer_sha256, source.fetch)
    assert source.num_fetches == num_fetches
    assert registry.tokenizer(card) is loaded
    assert registry.tokenizer(card).encode("ABCDEF", add_special_tokens=True) != ()


async def test_a_worker_that_never_sends_its_tokenizer_holds_up_no_other(registry: TokenizerRegistry) -> None:
    async def freeze() -> bytes:
        await asyncio.Event().wait()
        return b""

    frozen = asyncio.ensure_future(registry.add(scripted_card().tokenizer_sha256, freeze))
    async with asyncio.timeout(5):
        await registry.add(scripted_card().tokenizer_sha256, Source().fetch)
    assert not frozen.done()
    frozen.cancel()
    await asyncio.gather(frozen, return_exceptions=True)


async def test_a_tokenizer_that_is_not_the_cards_is_refused(registry: TokenizerRegistry) -> None:
    card = scripted_card()
    with pytest.raises(ValueError, match="sha256"):
        await registry.add(card.tokenizer_sha256, Source(_JSON + b" ").fetch)
    with pytest.raises(UnavailableError):
        registry.tokenizer(card)


async def test_bytes_that_are_no_tokenizer_are_refused(registry: TokenizerRegistry) -> None:
    card = scripted_card().model_copy(update={"tokenizer_sha256": hashlib.sha256(b"{}").hexdigest()})
    with pytest.raises(ValueError, match="not a tokenizer"):
        await registry.add(card.tokenizer_sha256, Source(b"{}").fetch)


async def test_only_so_many_are_kept_and_the_one_used_last_stays(registry: TokenizerRegistry) -> None:
    sources = [_JSON + b" " * count for count in range(3)]
    cards = [
        scripted_card().model_copy(update={"tokenizer_sha256": hashlib.sha256(source).hexdigest()})
        for source in sources
    ]
    await registry.add(cards[0].tokenizer_sha256, Source(sources[0]).fetch)
    await registry.add(cards[1].tokenizer_sha256, Source(sources[1]).fetch)
    registry.tokenizer(cards[0])
    await registry.add(cards[2].tokenizer_sha256, Source(sources[2]).fetch)
    registry.tokenizer(cards[0])
    registry.tokenizer(cards[2])
    with pytest.raises(UnavailableError):
        registry.tokenizer(cards[1])


async def test_c23_text_work_runs_in_a_thread_of_its_own(registry: TokenizerRegistry) -> None:
    name = await registry.run(lambda: threading.current_thread().name)
    assert name.startswith("text")


async def test_c23_tokenizing_does_not_hold_the_interpreters_lock(registry: TokenizerRegistry) -> None:
    tokenizer = Tokenizer(_JSON)
    encoding = asyncio.ensure_future(
        registry.run(lambda: tokenizer.encode("hello world " * 50_000, add_special_tokens=False))
    )
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await encoding) == 600_000
    assert turns > 100


def test_a08_a_tokenizer_file_cannot_ask_for_truncation_or_padding() -> None:
    library = scripted_tokenizer()
    library.enable_truncation(4)
    library.enable_padding(length=32)
    assert len(Tokenizer(library.to_str().encode()).encode("x" * 10, add_special_tokens=False)) == 10
