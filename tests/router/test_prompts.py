"""Bodies to token ids: beginning-of-sequence tokens, bounds, and what counts as empty."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import pytest
from tokenizers.processors import TemplateProcessing

from stallfree_router.text.prompts import tokenize_prompts
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError
from stallfree_shared.openai_api import ChatCompletionRequest, CompletionRequest
from stallfree_shared.wire import ModelCard
from tests.support.scripted import BOS, scripted_card, scripted_tokenizer


def tokenizer_json(*, adds_bos: bool) -> bytes:
    library = scripted_tokenizer()
    if adds_bos:
        library.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return library.to_str().encode()


class Prompts:
    """A registry and a card, and the prompts that they make."""

    def __init__(self, registry: TokenizerRegistry, card: ModelCard) -> None:
        self.registry = registry
        self.card = card

    async def complete(self, prompt: object) -> list[tuple[int, ...]]:
        body = CompletionRequest.model_validate({"model": "scripted", "prompt": prompt})
        return await tokenize_prompts(body, self.card, self.registry)

    async def chat(self, content: str) -> list[tuple[int, ...]]:
        message = {"role": "user", "content": content}
        body = ChatCompletionRequest.model_validate({"model": "scripted", "messages": [message]})
        return await tokenize_prompts(body, self.card, self.registry)


@pytest.fixture
async def prompts(request: pytest.FixtureRequest) -> AsyncIterator[Prompts]:
    content = tokenizer_json(adds_bos=getattr(request, "param", False))
    sha256 = hashlib.sha256(content).hexdigest()
    card = scripted_card(max_model_len=100).model_copy(
        update={"tokenizer_sha256": sha256, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    )
    registry = TokenizerRegistry(num_threads=1)

    async def fetch() -> bytes:
        return content

    await registry.add(card.tokenizer_sha256, fetch)
    yield Prompts(registry, card)
    registry.close()


@pytest.mark.parametrize("prompts", [True], indirect=True)
async def test_a32_with_a_beginning_token_an_empty_text_is_a_prompt(prompts: Prompts) -> None:
    assert await prompts.complete(["", "AB"]) == [(BOS,), (BOS, *scripted_tokenizer().encode("AB").ids)]


async def test_a32_without_one_it_is_not_and_the_whole_call_is_refused(prompts: Prompts) -> None:
    empty: tuple[object, ...] = ("", ["a", ""], [[]], [[5], []])
    for prompt in empty:
        with pytest.raises(InvalidRequestError, match="empty"):
            await prompts.complete(prompt)


@pytest.mark.parametrize("prompts", [True], indirect=True)
async def test_a_chat_has_the_beginning_token_of_its_template_and_no_second_one(prompts: Prompts) -> None:
    ((first, *rest),) = await prompts.chat("hi")
    assert first == BOS
    assert BOS not in rest


@pytest.mark.parametrize("prompts", [True], indirect=True)
async def test_token_ids_are_taken_as_they_are(prompts: Prompts) -> None:
    assert await prompts.complete([[9, 8], [7]]) == [(9, 8), (7,)]


@pytest.mark.parametrize("token_id", [-1, 277, 10**18])
async def test_a31_an_id_outside_the_vocabulary_is_named(prompts: Prompts, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{token_id}; this model's ids are 0 to 276"):
        await prompts.complete([1, token_id])


async def test_c23_the_bound_before_tokenizing_never_refuses_what_could_fit(prompts: Prompts) -> None:
    longest = "<|assistant|>"
    assert len((await prompts.complete(longest * 100))[0]) == 100
    with pytest.raises(ContextLengthExceededError, match="at least 101 tokens"):
        await prompts.complete(longest * 101)
    with pytest.raises(ContextLengthExceededError, match="at least 101 tokens"):
        await prompts.chat(longest * 101)
