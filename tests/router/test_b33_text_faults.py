"""B33 in the router: a fault while one call's text is read or written fails that call alone, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from stallfree_router.app import assemble
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.wire import ModelCard
from tests.support.router_under_test import RouterUnderTest, router_under_test
from tests.support.scripted import scripted_tokenizer

PATH = "/v1/completions"
UNREADABLE = "Q"
"""A text with it cannot be tokenized."""
UNWRITABLE = "Z"
"""A token that stands for it cannot be turned into text."""


class _FaultyTokenizer(Tokenizer):
    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if UNREADABLE in text:
            raise RuntimeError("secret: the tokenizer fails")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if self.token_name(token_id) == UNWRITABLE:
            raise RuntimeError("secret: the detokenizer fails")
        return super().token_bytes(token_id)


class _FaultyTokenizers(TokenizerRegistry):
    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self._faulty = _FaultyTokenizer(scripted_tokenizer().to_str().encode())

    def tokenizer(self, card: ModelCard) -> Tokenizer:
        return self._faulty


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with router_under_test() as router:
        with contextlib.closing(_FaultyTokenizers()) as tokenizers:
            router.app = assemble(
                router.settings,
                drain=router.drain,
                metrics=router.metrics,
                tokenizers=tokenizers,
                served_models=router.models,
                generator=router.generator,
            )
            yield router


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [f"ab{UNREADABLE}", f"ab{UNWRITABLE}cd"], ids=["reading", "writing"])
async def test_b33_a_fault_with_one_calls_text_fails_that_call_alone(
    router: RouterUnderTest, text: str, *, stream: bool
) -> None:
    async with router.client() as client:

        async def ask(prompt: str) -> httpx.Response:
            body = {"model": "scripted", "prompt": prompt, "max_tokens": 100, "stream": stream}
            return await client.post(PATH, json=body)

        async with asyncio.timeout(10):
            good, bad, also_good = await asyncio.gather(ask("hello"), ask(text), ask("again"))
        assert "internal error" in bad.text
        assert "secret" not in bad.text
        assert "[DONE]" not in bad.text
        assert bad.status_code == (200 if stream and UNWRITABLE in text else 500)
        for answer in (good, also_good, await ask("afterwards")):
            assert answer.status_code == 200
            assert "error" not in answer.text
            assert ("[DONE]" in answer.text) == stream
    assert router.outcomes() == {"stop": 3, "error": 1}
    router.assert_idle()
