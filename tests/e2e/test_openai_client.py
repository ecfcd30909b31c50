"""The official client, pointed at the router. Streamed and not are twins, and both are what the engine gave."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from stallfree_loadtest.cluster import LocalCluster
from stallfree_shared.wire import MAX_DEFINITION_BYTES
from tests.support.clusters import SCRIPTED, script, scripted_cluster, wait_idle
from tests.support.scripted import scripted_logprobs

TEXT = "Grüße aus Plzeň: ďábelské 🔥 日本, and the rest."
ENDINGS: list[tuple[dict[str, Any], str, str]] = [
    ({}, TEXT, "stop"),
    ({"max_tokens": 10}, "", "length"),
    ({"stop": ["🔥 日"]}, TEXT.split("🔥 日")[0], "stop"),
    ({"stop": [", and", "never"]}, TEXT.split(", and")[0], "stop"),
]


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with scripted_cluster() as running:
        yield running
        await wait_idle(running)


def _client(cluster: LocalCluster) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.router_urls[0]}/v1", api_key="-", max_retries=0, timeout=30)


async def test_completions_and_chat_streamed_and_not_are_twins(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        for options, expected, finish_reason in ENDINGS:
            arguments: dict[str, Any] = {"max_tokens": 200, **options}
            whole = await _whole_completion(client, arguments)
            assert await _streamed_completion(client, arguments) == whole
            chat = await _whole_chat(client, arguments)
            assert await _streamed_chat(client, arguments) == chat
            text, finish, usage = whole
            assert (chat[0], chat[1], chat[2].total_tokens) == (text, finish, usage.total_tokens)
            assert finish == finish_reason
            if expected:
                assert text == expected
            assert usage.prompt_tokens == len(script(TEXT))
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert "\ufffd" not in text


async def _whole_completion(client: AsyncOpenAI, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    answer = await client.completions.create(model=SCRIPTED, prompt=TEXT, **arguments)
    return answer.choices[0].text, answer.choices[0].finish_reason, _counts(answer.usage)


async def _streamed_completion(client: AsyncOpenAI, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model=SCRIPTED, prompt=TEXT, stream=True, stream_options={"include_usage": True}, **arguments
        )
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len(finishes) == 1
    assert chunks[-1].choices == []
    return text, finishes[0], _counts(chunks[-1].usage)


async def _whole_chat(client: AsyncOpenAI, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    answer = await client.chat.completions.create(model=SCRIPTED, messages=_messages(), **arguments)
    assert answer.choices[0].message.role == "assistant"
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason, _counts(answer.usage)


async def _streamed_chat(client: AsyncOpenAI, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    text, finishes, usage = "", [], None
    async for chunk in await client.chat.completions.create(
        model=SCRIPTED, messages=_messages(), stream=True, stream_options={"include_usage": True}, **arguments
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert len(finishes) == 1
    return text, finishes[0], _counts(usage)


def _counts(usage: CompletionUsage | None) -> CompletionUsage:
    """Without what was cached: the second of two calls finds more than the first."""
    assert usage is not None
    return usage.model_copy(update={"prompt_tokens_details": None})


def _messages() -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": TEXT}]


async def test_the_clients_exceptions_are_the_right_ones(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        with pytest.raises(openai.NotFoundError, match="nope"):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError, match="8192") as too_long:
            await client.completions.create(model=SCRIPTED, prompt="x" * 9000, max_tokens=5)
        assert "9000" in str(too_long.value)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=SCRIPTED, prompt="x", temperature=3)
        models = await client.models.list()
        assert [model.id for model in models.data] == [SCRIPTED]


async def test_lists_of_prompts_and_n_keep_their_order(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        answer = await client.completions.create(
            model=SCRIPTED, prompt=["one", "two words", "three short words"], n=2, max_tokens=50
        )
    texts = ["one", "one", "two words", "two words", "three short words", "three short words"]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("one") + len("two words") + len("three short words")


async def test_logprobs_of_chats_are_the_clients_own_types_streamed_and_not(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        whole = await client.chat.completions.create(
            model=SCRIPTED, messages=_messages(), logprobs=True, top_logprobs=3, stop=["🔥 日"]
        )
        assert whole.choices[0].logprobs is not None
        content = whole.choices[0].logprobs.content or []
        assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == TEXT.split("🔥 日")[0]
        told = [scripted_logprobs(token_id, 3) for token_id in script(TEXT)[: len(content)]]
        assert [entry.logprob for entry in content] == [each.logprob for each in told]
        assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [
            [logprob for _, logprob in each.top] for each in told
        ]
        streamed = [
            entry
            async for chunk in await client.chat.completions.create(
                model=SCRIPTED, messages=_messages(), logprobs=True, top_logprobs=3, stop=["🔥 日"], stream=True
            )
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or []
        ]
        assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in content]


async def test_a28_an_echo_scores_every_prompt_token_across_chunks_and_workers_stay_whole() -> None:
    prompt = script("x" * 64 + "yz")
    async with scripted_cluster(num_workers=1, worker_args=("--token-budget", "64")) as cluster:
        async with _client(cluster) as client:
            for max_tokens in (1, 0):
                answer = await client.completions.create(
                    model=SCRIPTED, prompt=list(prompt), echo=True, logprobs=1, max_tokens=max_tokens
                )
                told = answer.choices[0].logprobs
                assert told is not None
                scored = [*prompt[1:], *prompt[:max_tokens]]
                assert told.token_logprobs == [None, *(scripted_logprobs(each, 0).logprob for each in scored)]
                assert len(told.tokens or ()) == len(told.text_offset or ()) == len(prompt) + max_tokens
                assert answer.choices[0].text == "x" * 64 + "yz" + "x" * max_tokens
            for num_before in range(2):
                answer = await client.completions.create(model=SCRIPTED, prompt="z" * 64, stop="zzz")
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                assert details is not None
                assert (details.cached_tokens or 0) >= 48 * num_before, "an answer that a stop string ends tells it too"
        await wait_idle(cluster)


async def test_tiers_and_cached_tokens_are_told(cluster: LocalCluster) -> None:
    async with _client(cluster) as client:
        flex = await client.chat.completions.create(model=SCRIPTED, messages=_messages(), service_tier="flex")
        assert flex.service_tier == "flex"
        assert flex.usage is not None
        assert flex.usage.prompt_tokens_details is not None
        assert flex.usage.prompt_tokens_details.cached_tokens is not None
        assert flex.usage.prompt_tokens_details.cached_tokens <= flex.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="priority") as refused:
            await client.chat.completions.create(model=SCRIPTED, messages=_messages(), extra_body={"priority": -1})
        assert refused.value.param == "priority"


async def test_the_largest_definition_that_a_router_lets_in_reaches_the_worker(cluster: LocalCluster) -> None:
    bare = len(json.dumps({"type": "object", "description": ""}, separators=(",", ":")))
    quotes = '"' * ((MAX_DEFINITION_BYTES - bare) // 2)  # each is two bytes in JSON, and four in JSON within JSON
    async with _client(cluster) as client:
        answer = await client.completions.create(
            model=SCRIPTED, prompt="abc", extra_body={"guided_json": {"type": "object", "description": quotes}}
        )
        assert answer.choices[0].text == "abc", "the scripted model keeps to no definition"
