"""Log-probabilities and echoes as clients get them, streamed and whole: the scripted model echoes its prompt, and says
how likely each token is by its id alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.router.test_api_answers import chunks_of
from tests.router.test_structured_output import HEAVY
from tests.support.router_under_test import RouterUnderTest
from tests.support.scripted import EOS, scripted_logprobs, scripted_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_LIBRARY = scripted_tokenizer()


def ids(text: str) -> list[int]:
    return list(_LIBRARY.encode(text).ids)


def logprob(token_id: int) -> float:
    return scripted_logprobs(token_id, 0).logprob


async def completion(client: httpx.AsyncClient, prompt: object, **fields: object) -> dict[str, Any]:
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 100, **fields}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed_completion(client: httpx.AsyncClient, prompt: object, **fields: object) -> list[dict[str, Any]]:
    """The choice of each chunk."""
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 100, "stream": True, **fields}
    chunks: list[dict[str, Any]] = chunks_of(await client.post(COMPLETIONS, json=body))
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def chat(client: httpx.AsyncClient, text: str, **fields: object) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_completions_tell_four_lists_of_one_length(client: httpx.AsyncClient) -> None:
    (choice,) = (await completion(client, "ABCx", logprobs=2))["choices"]
    abc, x = ids("ABCx")
    assert choice["text"] == "ABCx"
    assert choice["logprobs"] == {
        "tokens": ["ABC", "x", "<eos>"],
        "token_logprobs": [logprob(abc), logprob(x), logprob(EOS)],
        "top_logprobs": [
            {
                _LIBRARY.id_to_token(each): pytest.approx(logprob(token_id) - rank)
                for rank, each in enumerate((token_id, token_id + 1))
            }
            for token_id in (abc, x, EOS)
        ],
        "text_offset": [0, 3, 4],
    }


async def test_a28_an_echo_tells_the_prompt_first_and_every_token_once(client: httpx.AsyncClient) -> None:
    """As harnesses that score answers read it: the prompt's tokens, then as many as were generated."""
    (choice,) = (answer := await completion(client, "ABCx yz", max_tokens=1, echo=True, logprobs=1))["choices"]
    prompt = ids("ABCx yz")
    told = choice["logprobs"]
    assert choice["text"] == "ABCx yz" + "ABC"
    assert told["tokens"] == ["ABC", "x", " ", "y", "z", "ABC"]
    assert told["token_logprobs"] == [None, *map(logprob, prompt[1:]), logprob(prompt[0])]
    assert told["top_logprobs"][0] is None
    assert [max(top, key=top.get) for top in told["top_logprobs"][1:]] == told["tokens"][1:]
    assert told["text_offset"] == [0, 3, 4, 5, 6, 7]
    assert answer["usage"]["completion_tokens"] == 1


async def test_a03_an_echo_with_no_new_token_scores_the_prompt_alone(client: httpx.AsyncClient) -> None:
    answer = await completion(client, "Your answer: Yes", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    prompt = ids("Your answer: Yes")
    assert (choice["text"], choice["finish_reason"]) == ("Your answer: Yes", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *map(logprob, prompt[1:])]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = await streamed_completion(client, "Your answer: Yes", max_tokens=0, echo=True, logprobs=1)
    assert chunks == [choice]


async def test_a_prompt_of_token_ids_is_echoed_as_text(client: httpx.AsyncClient) -> None:
    answer = await completion(client, [ids("é!"), ids("ab")], echo=True, n=2, max_tokens=1, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == ["é!\ufffd"] * 2 + ["aba"] * 2
    assert answer["choices"][0]["logprobs"]["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", "!", r"bytes:\xc3"]
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert answer["choices"][3]["logprobs"]["top_logprobs"] == [
        None,
        {"b": logprob(ids("b")[0])},
        {"a": logprob(ids("a")[0])},
    ]


async def test_an_echo_without_logprobs_is_text_only(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    (choice,) = (await completion(client, "ab", echo=True))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abab", None)
    assert router.generator.generations[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("tokens_per_event", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"echo": True}, {"stop": ["DEFGHIJKL"]}, {"stop": ["GHI", "x"]}, {"stop": ["\U0001f525 b"], "echo": True},
        {"stop": "\U0001f525"}, {"max_tokens": 3}, {"max_tokens": 6, "n": 2, "echo": True},
    ],
)  # fmt: skip
async def test_completions_of_all_chunks_are_those_of_the_whole_answer(
    client: httpx.AsyncClient, router: RouterUnderTest, tokens_per_event: int, fields: dict[str, object]
) -> None:
    whole = (await completion(client, "ABCDEFGHIJKLM🔥 and", logprobs=1, **fields))["choices"]
    router.generator.tokens_per_event = tokens_per_event
    chunks = await streamed_completion(client, "ABCDEFGHIJKLM🔥 and", logprobs=1, **fields)
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][name]] == values
        shown = 0
        for chunk in own:
            offsets = [*chunk["logprobs"]["text_offset"]]
            is_last = chunk["finish_reason"] is not None
            assert all(shown <= offset < shown + len(chunk["text"]) + is_last for offset in offsets)
            shown += len(chunk["text"])


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize("fields", [{}, {"stop": ["DEFGHIJKL"]}, {"stop": ["HI", "x"]}, {"max_tokens": 3}, {"n": 2}])
async def test_chat_chunks_tell_what_the_whole_answer_does(
    client: httpx.AsyncClient, router: RouterUnderTest, tokens_per_event: int, fields: dict[str, object]
) -> None:
    text = "ABCDEFGHIJKLM🔥"
    asked = {"logprobs": True, "top_logprobs": 2, **fields}
    whole = (await chat(client, text, **asked))["choices"]
    router.generator.tokens_per_event = tokens_per_event
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], "stream": True, **asked}
    chunks: list[dict[str, Any]] = chunks_of(await client.post(CHAT, json=body))
    for choice in whole:
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        told = [entry for each in own if each["logprobs"] is not None for entry in each["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == choice["message"]["content"]


async def test_chats_tell_tokens_with_their_bytes_and_no_end_token(client: httpx.AsyncClient) -> None:
    (choice,) = (await chat(client, "x🔥", logprobs=True, top_logprobs=1))["choices"]
    x, *fire = ids("x🔥")
    assert choice["logprobs"]["refusal"] is None
    assert choice["logprobs"]["content"][0] == {
        "token": "x", "bytes": [ord("x")], "logprob": logprob(x),
        "top_logprobs": [{"token": "x", "bytes": [ord("x")], "logprob": logprob(x)}],
    }  # fmt: skip
    assert [entry["token"] for entry in choice["logprobs"]["content"][1:]] == ["\ufffd"] * 4
    assert [entry["bytes"] for entry in choice["logprobs"]["content"][1:]] == [[byte] for byte in "🔥".encode()]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"][1:]] == list(map(logprob, fire))


async def test_a_likely_token_without_text_is_named_and_has_no_bytes(client: httpx.AsyncClient) -> None:
    answer = await completion(client, [1, 2], max_tokens=1, logprobs=2)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<bos>"]
    (choice,) = (await chat(client, "x", logprobs=True, top_logprobs=20))["choices"]
    assert all(entry["token"] for entry in choice["logprobs"]["content"][0]["top_logprobs"])


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}])
async def test_nothing_is_told_unless_it_is_asked_for(client: httpx.AsyncClient, fields: dict[str, object]) -> None:
    assert (await chat(client, "x", **fields))["choices"][0]["logprobs"] is None
    assert (await completion(client, "x"))["choices"][0]["logprobs"] is None
    assert "prompt_logprobs" not in (await completion(client, "x"))["choices"][0]


async def test_prompt_logprobs_are_vllms_and_count_ranks(client: httpx.AsyncClient) -> None:
    (choice,) = (await completion(client, "xyz", prompt_logprobs=1))["choices"]
    answer = await chat(client, "xyz", prompt_logprobs=0)
    x, y, z = ids("xyz")
    entry = {"decoded_token": "y", "logprob": logprob(y), "rank": 1}
    assert choice["prompt_logprobs"][:2] == [None, {str(y): entry}]
    assert answer["prompt_logprobs"] == [
        None,
        {str(y): {**entry, "rank": None}},
        {str(z): {"decoded_token": "z", "logprob": logprob(z), "rank": None}},
    ]
    assert choice["logprobs"] is None
    assert x not in map(int, choice["prompt_logprobs"][1])


async def test_cached_tokens_are_summed_over_prompts_and_not_over_choices(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    router.generator.cached_tokens = [0, 2, 5, 3]
    answer = await completion(client, ["abcd", "efghij"], n=2, stop="c")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 + 3}


async def test_the_answer_tells_the_tier_that_served_it(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    assert (await chat(client, "x", service_tier="auto"))["service_tier"] == "default"
    assert (await completion(client, "x", service_tier="flex"))["service_tier"] == "flex"
    assert "service_tier" not in await chat(client, "x")
    default, flex, _ = router.generator.generations
    assert (flex.priority > default.priority, flex.tbt_target_seconds) == (True, 1.0)


async def test_b22_calls_share_prefixes_only_with_the_same_salt(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
        await completion(client, "x", **fields)
    first, again, with_a, with_b, again_a = [each.cache_salt for each in router.generator.generations]
    assert (first, with_a) == (again, again_a)
    assert len({first, with_a, with_b}) == 3


async def test_a_structured_output_reaches_the_sampler_and_a_bad_one_is_refused(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await chat(client, "x", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    structured = router.generator.generations[0].sampling.structured_output
    assert structured is not None
    assert structured.kind == "json_schema"
    body = {"model": "scripted", "prompt": "x", "guided_regex": "("}
    response = await client.post(COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


async def test_checks_of_heavy_definitions_hold_up_no_other_call(client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as tasks:
        heavy = [tasks.create_task(completion(client, "x", guided_json=HEAVY)) for _ in range(3)]
        for _ in range(20):
            await completion(client, "x")
        assert not any(task.done() for task in heavy)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_other_streams_move_while_a_long_answer_with_logprobs_is_written(
    client: httpx.AsyncClient, router: RouterUnderTest, path: str
) -> None:
    router.generator.tokens_per_event = 2000
    asked = {"prompt": "x", "logprobs": 20} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "scripted", "messages": messages, "max_tokens": 2000, "ignore_eos": True, **asked}
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(client.post(path, json=body))
        num_turns = 0
        while not call.done():
            await asyncio.sleep(0.001)
            num_turns += router.generator.num_given == 2000
    assert call.result().status_code == 200
    assert num_turns > 4, "three where the event loop writes it"
