"""What the API answers, streamed and whole, in memory: the scripted model echoes its prompt."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from stallfree_shared import sse
from stallfree_shared.errors import WorkerLostError
from tests.support.router_under_test import GENERATION_PATHS, RouterUnderTest
from tests.support.scripted import EOS, scripted_tokenizer

Fields = dict[str, object]

_LIBRARY = scripted_tokenizer()


@dataclass
class Result:
    """An answer in a form that does not tell whether it was streamed."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reasons: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[str, int] | None = None
    cached_tokens: int | None = None


def fields_for(path: str, text: str, **more: object) -> Fields:
    chat = {"messages": [{"role": "user", "content": text}]}
    return {"model": "scripted", **(chat if "chat" in path else {"prompt": text, "max_tokens": 1000}), **more}


async def ask(client: httpx.AsyncClient, path: str, fields: Fields, *, stream: bool) -> Result:
    if not stream:
        response = await client.post(path, json=fields)
        assert response.status_code == 200, response.text
        return result_of([response.json()])
    more = {"stream": True, "stream_options": {"include_usage": True}}
    return result_of(chunks_of(await client.post(path, json=fields | more)))


def chunks_of(response: httpx.Response) -> list[dict[str, object]]:
    assert response.status_code == 200, response.text
    *events, done = sse.Decoder().feed(response.content)
    assert done.data == "[DONE]"
    return [json.loads(event.data) for event in events]


def result_of(bodies: list[dict[str, object]]) -> Result:
    result = Result()
    for body in bodies:
        for choice in body["choices"]:  # type: ignore[attr-defined]  # JSON
            content = choice.get("message", choice.get("delta", {})).get("content") or choice.get("text") or ""
            result.texts[choice["index"]] += content
            result.token_ids[choice["index"]] += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                result.finish_reasons[choice["index"]].append(choice["finish_reason"])
        if body.get("usage") is not None:
            assert result.usage is None
            usage: dict[str, Any] = dict(body["usage"])  # type: ignore[call-overload]  # JSON
            result.cached_tokens = usage.pop("prompt_tokens_details")["cached_tokens"]
            result.usage = usage
    return result


async def ask_both_ways(client: httpx.AsyncClient, path: str, fields: Fields) -> Result:
    """The answer, which must be the same streamed and not."""
    whole = await ask(client, path, fields, stream=False)
    assert await ask(client, path, fields, stream=True) == whole
    return whole


@pytest.mark.parametrize("path", GENERATION_PATHS)
async def test_a01_null_is_the_same_as_absent_for_every_field(client: httpx.AsyncClient, path: str) -> None:
    names = (
        "max_tokens", "stop", "seed", "n", "logit_bias", "stream_options", "stream", "temperature", "top_p", "top_k",
        "min_p", "stop_token_ids", "ignore_eos", "return_token_ids", "max_completion_tokens", "tools", "logprobs",
        "response_format", "presence_penalty", "user", "suffix", "echo", "best_of",
    )  # fmt: skip
    fields = fields_for(path, "a text of more than sixteen tokens")
    fields.pop("max_tokens", None)
    absent = await ask(client, path, fields, stream=False)
    for name in names:
        assert await ask(client, path, {**fields, name: None}, stream=False) == absent
    assert absent.finish_reasons[0] == (["length"] if path == "/v1/completions" else ["stop"])
    if path == "/v1/completions":
        assert absent.usage is not None
        assert absent.usage["completion_tokens"] == 16


async def test_a01_completions_default_to_what_is_left_where_that_is_less_than_16(client: httpx.AsyncClient) -> None:
    fields: Fields = {"model": "scripted", "prompt": "x" * 2040}
    answer = await ask(client, "/v1/completions", fields, stream=False)
    assert answer.usage == {"prompt_tokens": 2040, "completion_tokens": 8, "total_tokens": 2048}


@pytest.mark.parametrize("more", [{}, {"max_tokens": None}])
async def test_a02_chat_without_max_tokens_runs_to_its_end(client: httpx.AsyncClient, more: Fields) -> None:
    fields = fields_for("/v1/chat/completions", "x" * 400) | more
    answer = await ask_both_ways(client, "/v1/chat/completions", fields)
    assert answer.finish_reasons == {0: ["stop"]}
    assert answer.usage == {"prompt_tokens": 400, "completion_tokens": 401, "total_tokens": 801}


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "completion_tokens"),
    [
        ("ABCDEFGHIJKLM", ["DEFGHIJ"], "ABC", 5),
        ("x\nUser:y", ["\nUser:"], "x", 3),
        ("gostop!x", "stop", "go", 6),
        ("...", [".."], "", 2),
        ("a🙂b", ["🙂"], "a", 5),
        ("abcd", ["w", "x", "y", "c"], "ab", 3),
        ("abc", ["never", "abcd"], "abc", 4),
    ],
)
async def test_a09_a13_a14_stop_strings_end_the_text_and_never_leak(
    client: httpx.AsyncClient,
    router: RouterUnderTest,
    path: str,
    tokens_per_event: int,
    text: str,
    stop: object,
    expected: str,
    completion_tokens: int,
) -> None:
    router.generator.tokens_per_event = tokens_per_event
    answer = await ask_both_ways(client, path, fields_for(path, text, stop=stop, return_token_ids=True))
    assert (answer.texts, answer.finish_reasons) == ({0: expected}, {0: ["stop"]})
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == completion_tokens == len(answer.token_ids[0])


async def test_a_stop_string_cancels_the_generation_on_its_worker(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    await ask(client, "/v1/completions", fields_for("/v1/completions", "a.b" + "c" * 500, stop="."), stream=False)
    assert router.generator.num_closed_early == 1
    assert router.generator.num_given < 30
    assert router.generator.completed == [2]


@pytest.mark.parametrize("path", GENERATION_PATHS)
async def test_a15_no_half_character_is_ever_sent(client: httpx.AsyncClient, path: str) -> None:
    text = "ďábelské 🔥 👩‍👩‍👧 日本"
    fields = fields_for(path, text, n=2)
    assert (await ask_both_ways(client, path, fields)).texts == {0: text, 1: text}
    response = await client.post(path, json=fields | {"stream": True})
    assert "\ufffd" not in response.text
    assert "\\ufffd" not in response.text


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 2}, {"stop": "c"}])
async def test_a19_usage_comes_once_after_all_finish_chunks(
    client: httpx.AsyncClient, path: str, n: int, more: Fields
) -> None:
    fields = fields_for(path, "abcd", n=n) | more
    response = await client.post(path, json=fields | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = chunks_of(response)
    assert last["choices"] == []
    assert last["usage"] == (await client.post(path, json=fields)).json()["usage"]
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)
    without = chunks_of(await client.post(path, json=fields | {"stream": True}))
    assert all("usage" not in chunk for chunk in without)


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("tokens_per_event", [1, 4])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": "cd"}, {"max_tokens": 5, "n": 2}])
async def test_a21_usage_is_the_same_streamed_and_not(
    client: httpx.AsyncClient, router: RouterUnderTest, path: str, tokens_per_event: int, more: Fields
) -> None:
    router.generator.tokens_per_event = tokens_per_event
    answer = await ask_both_ways(client, path, fields_for(path, "abcdefgh", return_token_ids=True) | more)
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == 8
    assert answer.usage["completion_tokens"] == sum(map(len, answer.token_ids.values()))
    assert answer.usage["total_tokens"] == 8 + answer.usage["completion_tokens"]


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("more", "reason"),
    [({}, "stop"), ({"max_tokens": 7}, "stop"), ({"max_tokens": 6}, "length"), ({"stop": "f"}, "stop")],
)
async def test_a22_every_choice_has_one_finish_reason(
    client: httpx.AsyncClient, path: str, n: int, more: Fields, reason: str
) -> None:
    answer = await ask_both_ways(client, path, fields_for(path, "abcdef", n=n) | more)
    assert answer.finish_reasons == {index: [reason] for index in range(n)}


async def test_a33_choices_are_numbered_by_prompt_and_then_by_answer(client: httpx.AsyncClient) -> None:
    prompts = ["one", "two words", "three short words"]
    answer = await ask_both_ways(
        client, "/v1/completions", {"model": "scripted", "prompt": prompts, "n": 2, "max_tokens": 50}
    )
    assert answer.texts == {index: prompts[index // 2] for index in range(6)}
    num_prompt_tokens = sum(map(len, prompts))
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == num_prompt_tokens
    assert answer.usage["completion_tokens"] == 2 * (num_prompt_tokens + 3)


async def test_a33_64_prompts_give_64_choices(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    prompts = [[40 + index] for index in range(64)]
    answer = await ask_both_ways(
        client, "/v1/completions", {"model": "scripted", "prompt": prompts, "return_token_ids": True}
    )
    assert answer.token_ids == {index: [40 + index, EOS] for index in range(64)}
    assert len({generation.request_id for generation in router.generator.generations}) == 128


@pytest.mark.parametrize("content", [[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "A\nB"])
async def test_a38_text_parts_are_the_same_tokens_as_the_string(
    client: httpx.AsyncClient, router: RouterUnderTest, content: object
) -> None:
    fields: Fields = {"model": "scripted", "messages": [{"role": "user", "content": content}]}
    answer = await ask_both_ways(client, "/v1/chat/completions", fields)
    assert answer.texts == {0: "A\nB"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [({"max_completion_tokens": 5}, 5), ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
     ({"max_tokens": 9, "max_completion_tokens": None}, 9), ({"max_completion_tokens": None}, 21)],
)  # fmt: skip
async def test_a45_max_completion_tokens_is_heeded(client: httpx.AsyncClient, more: Fields, expected: int) -> None:
    fields = fields_for("/v1/chat/completions", "x" * 20) | more
    answer = await ask_both_ways(client, "/v1/chat/completions", fields)
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == expected


async def test_a44_seeds_reach_the_worker(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    async def seeds(seed: int | None, n: int = 3) -> list[int]:
        router.generator.generations.clear()
        await ask(client, "/v1/completions", fields_for("/v1/completions", "x", seed=seed, n=n), stream=False)
        return [generation.sampling.seed for generation in router.generator.generations]

    assert (await seeds(0))[0] == 0
    assert (await seeds(7))[0] == 7
    assert (await seeds(-1))[0] == 2**64 - 1
    assert await seeds(7) == await seeds(7)
    assert len(set(await seeds(7))) == 3
    assert await seeds(None) != await seeds(None)
    assert len(set(await seeds(None))) == 3


async def test_sampling_falls_back_to_the_models_own_defaults(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    defaults = router.card.sampling_defaults.model_copy(update={"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    router.models.card_by_model["scripted"] = router.card.model_copy(update={"sampling_defaults": defaults})
    await ask(client, "/v1/completions", fields_for("/v1/completions", "x"), stream=False)
    more = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0.5, "stop_token_ids": [9], "ignore_eos": True}
    await ask(client, "/v1/completions", fields_for("/v1/completions", "x", **more), stream=False)
    first, second = (generation.sampling for generation in router.generator.generations)
    assert (first.temperature, first.top_k, first.top_p, first.min_p) == (0.6, 20, 0.9, 0)
    assert (second.temperature, second.top_k, second.top_p, second.min_p) == (0, 0, 1, 0.5)
    assert (second.stop_token_ids, second.ignore_eos) == (frozenset({9}), True)


@pytest.mark.parametrize("path", GENERATION_PATHS)
async def test_return_token_ids_gives_all_ids_also_of_tokens_without_text(client: httpx.AsyncClient, path: str) -> None:
    fields = fields_for(path, "a🙂", return_token_ids=True)
    prompt_ids = _LIBRARY.encode("a🙂").ids
    assert (await ask_both_ways(client, path, fields)).token_ids == {0: [*prompt_ids, EOS]}
    chunks = chunks_of(await client.post(path, json=fields | {"stream": True}))
    first = chunks[0] if "chat" in path else chunks[0]["choices"][0]  # type: ignore[index]  # JSON
    assert first["prompt_token_ids"] == prompt_ids
    assert json.dumps(chunks).count("prompt_token_ids") == 1


@pytest.mark.parametrize("path", GENERATION_PATHS)
async def test_a_token_without_text_makes_no_chunk(client: httpx.AsyncClient, path: str) -> None:
    chunks = chunks_of(await client.post(path, json=fields_for(path, "a🙂b", stream=True)))
    num_opening = 1 if "chat" in path else 0
    assert len(chunks) == num_opening + 4  # a, 🙂, b, and the finish reason


async def test_a_chat_stream_opens_with_the_role_of_every_choice(client: httpx.AsyncClient) -> None:
    path = "/v1/chat/completions"
    first, second, *rest = chunks_of(await client.post(path, json=fields_for(path, "hi", n=2, stream=True)))
    for index, chunk in enumerate((first, second)):
        assert chunk["choices"] == [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
    assert not any("role" in json.dumps(chunk) for chunk in rest)


@pytest.mark.parametrize("path", GENERATION_PATHS)
async def test_a48_a_failure_in_mid_stream_is_an_error_event_and_no_clean_end(
    client: httpx.AsyncClient, router: RouterUnderTest, path: str
) -> None:
    router.generator.error, router.generator.error_index = WorkerLostError("the worker is gone"), 5
    response = await client.post(path, json=fields_for(path, "x" * 20, stream=True))
    *chunks, last = [json.loads(event.data) for event in sse.Decoder().feed(response.content)]
    expected = {"message": "the worker is gone", "type": "server_error", "param": None, "code": "worker_lost"}
    assert last == {"error": expected}
    assert result_of(chunks).finish_reasons == {}
    assert result_of(chunks).texts == {0: "xxxxx"}
    assert "[DONE]" not in response.text
    whole = await client.post(path, json=fields_for(path, "x" * 20))
    assert (whole.status_code, whole.json()) == (502, {"error": expected})
    assert router.outcomes() == {"error": 2}


async def test_a48_one_failing_choice_ends_the_whole_call(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    router.generator.error, router.generator.error_index = WorkerLostError("gone"), 3
    fields: Fields = {"model": "scripted", "prompt": ["x" * 20, "yy"], "stream": True}
    response = await client.post("/v1/completions", json=fields)
    assert "worker_lost" in response.text
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_that_tells_nothing_of_the_inside(
    client: httpx.AsyncClient, router: RouterUnderTest, *, stream: bool
) -> None:
    router.generator.error, router.generator.error_index = LookupError("secret detail"), 1
    fields = fields_for("/v1/completions", "xx", stream=stream)
    response = await client.post("/v1/completions", json=fields)
    assert response.status_code == (200 if stream else 500)
    assert '"message":"internal error"' in response.text
    assert "secret" not in response.text
    assert "LookupError" not in response.text
    assert router.outcomes() == {"error": 1}


async def test_d07_ttft_counts_generations_with_output_streamed_or_not(
    client: httpx.AsyncClient, router: RouterUnderTest
) -> None:
    for stream in (False, True):
        await ask(client, "/v1/completions", fields_for("/v1/completions", "abc", n=2), stream=stream)
    router.generator.error = WorkerLostError("gone")
    await client.post("/v1/completions", json=fields_for("/v1/completions", "abc"))
    assert router.value("stallfree_router_time_to_first_token_seconds_count") == 4
    assert router.value("stallfree_router_time_between_tokens_seconds_count") == 4 * 3
    assert router.value("stallfree_router_generated_tokens_total") == 4 * 4
    assert router.value("stallfree_router_prompt_tokens_total") == 3 * 3


async def test_d01_outcomes_add_up_to_all_calls(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    path = "/v1/completions"
    await client.post(path, json=fields_for(path, "abc"))
    await client.post(path, json=fields_for(path, "abc", max_tokens=1))
    await client.post(path, json=fields_for(path, "abc", model="nope"))
    await client.post(path, content=b"nonsense")
    await client.get(path)
    router.generator.error = WorkerLostError("gone")
    await client.post(path, json=fields_for(path, "abc"))
    assert router.outcomes() == {"stop": 1, "length": 1, "rejected": 3, "error": 1}


@pytest.mark.parametrize("sent", ["req-1", "a" * 128, "x:y/z=1+2@host"])
async def test_a53_a_safe_request_id_is_echoed_and_is_not_ours(
    client: httpx.AsyncClient, router: RouterUnderTest, sent: str
) -> None:
    fields = fields_for("/v1/completions", "abc")
    responses = [await client.post("/v1/completions", json=fields, headers={"X-Request-Id": sent}) for _ in range(2)]
    assert [response.headers["x-request-id"] for response in responses] == [sent, sent]
    ids = [response.json()["id"] for response in responses]
    assert len(set(ids)) == 2
    assert [f"cmpl-{generation.request_id}" for generation in router.generator.generations] == ids


@pytest.mark.parametrize("sent", [b"", b"x" * 8000, b"a\tb", "🙂".encode(), b"a b", b'"'])
async def test_a54_an_odd_request_id_is_replaced(client: httpx.AsyncClient, sent: bytes) -> None:
    headers = [(b"X-Request-Id", sent), (b"X-Request-Id", b"second")]
    response = await client.post("/v1/completions", json=fields_for("/v1/completions", "abc"), headers=headers)
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-request-id"].isalnum()


async def test_a58_models_lists_what_can_be_served_now(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    router.models.card_by_model["org/model-b"] = router.card.model_copy(update={"model": "org/model-b"})
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/model-b", "scripted"]
    one = (await client.get("/v1/models/org/model-b")).json()
    assert one == listed["data"][0]
    assert (one["object"], one["owned_by"], type(one["created"])) == ("model", "stallfree", int)
    for path in ("/v1/models/nope", "/v1/models/"):
        assert (await client.get(path)).status_code == 404
    router.models.is_usable = False
    assert (await client.get("/v1/models")).json()["data"] == []


async def test_readiness_follows_the_workers(client: httpx.AsyncClient, router: RouterUnderTest) -> None:
    assert (await client.get("/readyz")).status_code == 200
    router.models.is_usable = False
    response = await client.get("/readyz")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no usable worker")
    assert (await client.get("/livez")).status_code == 200


async def test_metrics_are_in_prometheus_text_format(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "stallfree_router_in_flight_requests 0.0" in response.text
