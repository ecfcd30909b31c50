"""Cases of awkward input and failure, each through real processes: client, router, workers with a scripted model.

One cluster serves them all, one after another. After every case nothing of it may be left on any part, and a plain
request must work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import pytest_asyncio

from stallfree_loadtest.cluster import LocalCluster
from stallfree_shared import sse
from tests.support.clusters import SCRIPTED, router_samples, script, scripted_cluster, wait_idle
from tests.support.raw_http import RawConnection, request_bytes
from tests.support.samples import scrape
from tests.support.scripted import FAIL_ROW, SLOW

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = PATHS = ("/v1/completions", "/v1/chat/completions")
CONTEXT_TOKENS = 2048

Fields = dict[str, object]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SCRIPTED_STEP_SECONDS", "0.001")
        environment.setenv("SCRIPTED_SLOW_SECONDS", "0.5")
        async with scripted_cluster(
            worker_args=(f"--max-model-len={CONTEXT_TOKENS}",), router_args=("--keepalive-seconds=0.1",)
        ) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.router_urls[0], trust_env=False, timeout=30) as client:
        yield client
        await wait_idle(cluster)
        assert await both_ways(client, COMPLETIONS, "hello") == Answer({0: "hello"}, {0: "stop"}, usage(5, 6))


@dataclass
class Answer:
    """An answer in a form that does not tell whether it was streamed."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] | None = None

    def add(self, body: dict[str, Any]) -> None:
        for choice in body["choices"]:
            content = choice.get("message", choice.get("delta", choice))
            self.texts[choice["index"]] += content.get("content") or content.get("text") or ""
            if choice["finish_reason"] is not None:
                assert choice["index"] not in self.finish_reasons
                self.finish_reasons[choice["index"]] = choice["finish_reason"]
        if body.get("usage"):
            self.usage = {name: count for name, count in body["usage"].items() if name != "prompt_tokens_details"}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total_tokens = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total_tokens}


def fields_for(path: str, prompt: object, **more: object) -> Fields:
    """A call that has the scripted model answer with its prompt, whole unless `more` says otherwise."""
    chat: Fields = {"messages": [{"role": "user", "content": prompt}]}
    return {"model": SCRIPTED, **(chat if path == CHAT else {"prompt": prompt, "max_tokens": 500}), **more}


async def whole(client: httpx.AsyncClient, path: str, fields: Fields) -> Answer:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    answer = Answer()
    answer.add(response.json())
    return answer


async def streamed(client: httpx.AsyncClient, path: str, fields: Fields) -> Answer:
    response = await client.post(path, json=fields | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    assert "\ufffd" not in response.text
    assert "\\ufffd" not in response.text
    *events, done = sse.Decoder().feed(response.content)
    assert done.data == sse.DONE
    bodies = [json.loads(event.data) for event in events]
    assert all(body["choices"] and "usage" not in body for body in bodies[:-1])
    assert bodies[-1]["choices"] == []
    answer = Answer()
    for body in bodies:
        answer.add(body)
    return answer


async def both_ways(client: httpx.AsyncClient, path: str, prompt: object, **more: object) -> Answer:
    """The answer, which must be the same streamed and not."""
    fields = fields_for(path, prompt, **more)
    one, other = await asyncio.gather(whole(client, path, fields), streamed(client, path, fields))
    assert one == other
    return one


async def refusal(client: httpx.AsyncClient, path: str, fields: Fields, *, status: int = 400) -> dict[str, str]:
    """The error object of a call that must be refused."""
    response = await client.post(path, json=fields)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    error: dict[str, str] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def outcomes(cluster: LocalCluster) -> dict[str, float]:
    """Calls that the router has counted so far."""
    samples = await router_samples(cluster)
    names = ("stop", "length", "abort", "error", "rejected")
    return {name: samples.total("stallfree_router_requests_total", outcome=name) for name in names}


async def workers_total(cluster: LocalCluster, name: str, **labels: str) -> float:
    pages = await asyncio.gather(*(scrape(worker.url) for worker in cluster.workers))
    return sum(page.total(f"stallfree_worker_{name}", **labels) for page in pages)


def new(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


def port_of(cluster: LocalCluster) -> int:
    port = urlsplit(cluster.router_urls[0]).port
    assert port is not None
    return port


@pytest.mark.parametrize("path", PATHS)
async def test_a01_null_is_the_same_as_absent(client: httpx.AsyncClient, path: str) -> None:
    names = ("max_tokens", "stop", "seed", "n", "logit_bias", "stream_options")
    text = "more than sixteen tokens of text"
    absent = fields_for(path, text, temperature=0)
    absent.pop("max_tokens", None)
    expected = await whole(client, path, absent)
    assert await whole(client, path, absent | dict.fromkeys(names)) == expected
    num_tokens = 16 if path == COMPLETIONS else len(text) + 1
    assert (expected.texts[0], expected.usage) == (text[:num_tokens], usage(len(text), num_tokens))


@pytest.mark.parametrize("more", [{}, {"max_tokens": None}])
async def test_a02_chat_without_max_tokens_is_not_cut(client: httpx.AsyncClient, more: Fields) -> None:
    answer = await both_ways(client, CHAT, "x" * 400, **more)
    assert (answer.finish_reasons, answer.usage) == ({0: "stop"}, usage(400, 401))


@pytest.mark.parametrize("path", PATHS)
async def test_a04_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    client: httpx.AsyncClient, path: str
) -> None:
    without = fields_for(path, "x" * 2100)
    without.pop("max_tokens", None)
    errors = [await refusal(client, path, without | more) for more in ({}, {"max_tokens": None}, {"max_tokens": 10})]
    assert errors[0] == errors[1] == errors[2]
    assert (errors[0]["code"], errors[0]["param"]) == (
        "context_length_exceeded",
        "messages" if path == CHAT else "prompt",
    )
    assert "2048" in errors[0]["message"]
    assert "2100" in errors[0]["message"]
    assert "-" not in errors[0]["message"]


async def test_a05_the_border_of_the_context_is_exact(client: httpx.AsyncClient) -> None:
    for num_prompt, num_output in ((2047, 1), (2000, 48)):
        answer = await both_ways(client, COMPLETIONS, "x" * num_prompt, max_tokens=num_output)
        assert (answer.finish_reasons, answer.usage) == ({0: "length"}, usage(num_prompt, num_output))
    for num_prompt, max_tokens, total in ((2048, 1, 2048), (2000, 49, 2049), (2048, None, 2048)):
        fields = fields_for(COMPLETIONS, "x" * num_prompt, max_tokens=max_tokens)
        message = (await refusal(client, COMPLETIONS, fields))["message"]
        assert all(str(number) in message for number in (CONTEXT_TOKENS, num_prompt, total))


@pytest.mark.parametrize("path", PATHS)
async def test_a09_a13_a14_stop_strings_end_the_text_and_never_leak(client: httpx.AsyncClient, path: str) -> None:
    for text, stop, expected, num_tokens in (
        ("ABCDEFGHIJKLM", ["DEFGHIJ"], "ABC", 5),
        ("\nUser:", ["\nUser:"], "", 2),
        ("gostop!x", ["stop"], "go", 6),
        ("a é 🙂 b", ["🙂"], "a é ", 9),
        ("abcd", ["w", "x", "y", "c"], "ab", 3),
    ):
        answer = await both_ways(client, path, text, stop=stop)
        assert (answer.texts, answer.finish_reasons) == ({0: expected}, {0: "stop"})
        assert answer.usage == usage(len(script(text)), num_tokens)


async def test_a15_no_half_character_is_sent_however_many_run_together(client: httpx.AsyncClient) -> None:
    texts = [f"{number} ďábelské 🔥 👩‍👩‍👧 日本" for number in range(8)]
    answers = await asyncio.gather(*(both_ways(client, COMPLETIONS, text, n=2) for text in texts))
    assert [answer.texts for answer in answers] == [{0: text, 1: text} for text in texts]


async def test_a19_a21_a22_a33_choices_usage_and_finish_reasons_of_lists_of_prompts(client: httpx.AsyncClient) -> None:
    prompts = ["one", "two words", "three short words"]
    answer = await both_ways(client, COMPLETIONS, prompts, n=2, max_tokens=10)
    assert answer.texts == {index: prompts[index // 2][:10] for index in range(6)}
    assert answer.finish_reasons == {index: "stop" if index < 4 else "length" for index in range(6)}
    assert answer.usage == usage(len("".join(prompts)), 2 * (4 + 10 + 10))


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [-1], [10**18], [[1], "a"], [True]])
async def test_a31_a32_no_prompt_harms_a_worker(client: httpx.AsyncClient, prompt: object) -> None:
    assert (await refusal(client, COMPLETIONS, fields_for(COMPLETIONS, prompt)))["param"] == "prompt"


async def test_a32_an_empty_chat_is_refused(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, CHAT, fields_for(CHAT, "")))["param"] == "messages"
    assert (await refusal(client, CHAT, fields_for(CHAT, "") | {"messages": []}))["param"] == "messages"


@pytest.mark.parametrize("path", PATHS)
async def test_a47_unknown_fields_are_ignored_and_wrong_types_refused(client: httpx.AsyncClient, path: str) -> None:
    unused = {"user": "x", "metadata": {}, "store": True, "service_tier": "auto", "parallel_tool_calls": True}
    accepted: list[Fields] = [{"temprature": 0}, {"top_k": 5, "min_p": 0.1}, {**unused}]
    for more in accepted:
        assert (await both_ways(client, path, "abc", **more)).texts == {0: "abc"}
    refused: list[Fields] = [{"stream": "true"}, {"n": "2"}]
    for more in refused:
        assert (await refusal(client, path, fields_for(path, "abc", **more)))["param"] in more


@pytest.mark.parametrize("path", PATHS)
async def test_a48_a_failure_in_mid_stream_is_no_clean_end(
    cluster: LocalCluster, client: httpx.AsyncClient, path: str
) -> None:
    before = await outcomes(cluster)
    fields = fields_for(path, "abcde<fail_row>fghij")
    assert (await refusal(client, path, fields, status=500))["code"] == "step_failed"
    response = await client.post(path, json=fields | {"stream": True})
    *chunks, last = [json.loads(event.data) for event in sse.Decoder().feed(response.content)]
    assert last["error"]["code"] == "step_failed"
    answer = Answer()
    for chunk in chunks:
        answer.add(chunk)
    assert (answer.texts, answer.finish_reasons) == ({0: "abcde"}, {})
    assert new(before, await outcomes(cluster)) == {"error": 2}


async def test_a48_openais_client_raises_on_a_failure_in_mid_stream(
    cluster: LocalCluster, client: httpx.AsyncClient
) -> None:
    texts: list[str] = []
    url = f"{cluster.router_urls[0]}/v1"
    prompt = [*script("abcde"), FAIL_ROW, *script("fghij")]

    async def read(official: openai.AsyncOpenAI) -> None:
        async for chunk in await official.completions.create(model=SCRIPTED, prompt=prompt, max_tokens=20, stream=True):
            texts.extend(choice.text for choice in chunk.choices)

    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as official:
        with pytest.raises(openai.APIError, match="not finite"):
            await read(official)
    assert "".join(texts) == "abcde"


async def test_a49_c17_the_bytes_of_a_stream_with_a_quiet_prefill(
    cluster: LocalCluster, client: httpx.AsyncClient
) -> None:
    text = "a\nb\r\nc\rd\u2028e data: [DONE]\n\n: no comment\n"
    fields = fields_for(COMPLETIONS, [SLOW, *script(text)], stream=True)
    async with RawConnection.open(port_of(cluster)) as connection:
        await connection.send(request_bytes(COMPLETIONS, fields))
        head, body = await connection.read_response()
    assert b"content-type: text/event-stream; charset=utf-8" in head.lower()
    *parts, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    events = [part for part in parts if part != b": keepalive"]
    assert parts[0] == b": keepalive"
    assert len(parts) - len(events) >= 3
    assert all(event.startswith(b"data: {") and not {b"\n"[0], b"\r"[0]} & set(event) for event in events)
    answer = Answer()
    for event in events:
        answer.add(json.loads(event.removeprefix(b"data: ")))
    assert answer.texts == {0: text}


@pytest.mark.parametrize("with_reset", [False, True])
async def test_a50_leaving_a_stream_fifty_times_frees_all_within_a_second(
    cluster: LocalCluster, client: httpx.AsyncClient, *, with_reset: bool
) -> None:
    before, aborted_before = await outcomes(cluster), await workers_total(cluster, "requests_total", outcome="abort")
    fields = fields_for(COMPLETIONS, "x" * 1000, stream=True, max_tokens=1000)
    for _ in range(50):
        async with RawConnection.open(port_of(cluster)) as connection:
            await connection.send(request_bytes(COMPLETIONS, fields))
            await connection.read_until(b"data: ")
            await connection.close(with_reset=with_reset)
    async with asyncio.timeout(1):
        await wait_idle(cluster)
    assert new(before, await outcomes(cluster)) == {"abort": 50}
    assert await workers_total(cluster, "requests_total", outcome="abort") == aborted_before + 50


async def test_a51_leaving_a_plain_call_frees_all_within_two_seconds(
    cluster: LocalCluster, client: httpx.AsyncClient
) -> None:
    before = await outcomes(cluster)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(COMPLETIONS, json=fields_for(COMPLETIONS, "x" * 1000, max_tokens=1000), timeout=0.3)
    async with asyncio.timeout(2):
        await wait_idle(cluster)
    assert new(before, await outcomes(cluster)) == {"abort": 1}


async def test_a53_calls_under_one_request_id_do_not_touch_each_other(
    cluster: LocalCluster, client: httpx.AsyncClient
) -> None:
    same = {"X-Request-Id": "same"}

    async def call(text: str, **more: object) -> Answer:
        response = await client.post(COMPLETIONS, json=fields_for(COMPLETIONS, text, **more), headers=same)
        assert response.headers["x-request-id"] == "same"
        answer = Answer()
        answer.add(response.json())
        return answer

    async with RawConnection.open(port_of(cluster)) as leaving:
        fields = fields_for(COMPLETIONS, "left " * 90, stream=True)
        await leaving.send(request_bytes(COMPLETIONS, fields, headers="X-Request-Id: same\r\n"))
        await leaving.read_until(b"data: ")
        calls = [asyncio.create_task(call(text * 40, n=2)) for text in ("first ", "second ")]
        await leaving.close(with_reset=True)
        assert (await call("again")).texts == {0: "again"}
    assert [(await task).texts[1] for task in calls] == ["first " * 40, "second " * 40]


async def test_a53_fifty_clients_with_ten_ids_get_their_own_text(client: httpx.AsyncClient) -> None:
    async def call(number: int) -> str:
        headers = {"X-Request-Id": f"req-{number % 10}"}
        fields = fields_for(COMPLETIONS, f"text of {number}")
        response = await client.post(COMPLETIONS, json=fields, headers=headers)
        return str(response.json()["choices"][0]["text"])

    assert await asyncio.gather(*map(call, range(50))) == [f"text of {number}" for number in range(50)]


async def test_d01_the_outcomes_of_all_calls_add_up(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
    before = await outcomes(cluster)
    plain = fields_for(COMPLETIONS, "x" * 600, max_tokens=600)
    for _ in range(5):
        async with RawConnection.open(port_of(cluster)) as connection:
            await connection.send(request_bytes(COMPLETIONS, plain | {"stream": True}))
            await connection.read_until(b"data: ")
    for _ in range(3):
        with contextlib.suppress(httpx.ReadTimeout):
            await client.post(COMPLETIONS, json=plain, timeout=0.2)
    await client.post(COMPLETIONS, json=plain)
    await client.post(COMPLETIONS, json=plain | {"prompt": "x" * 10})
    await client.post(COMPLETIONS, json=plain | {"model": "nope"})
    await client.post(COMPLETIONS, json=plain | {"prompt": [FAIL_ROW]})
    await wait_idle(cluster)
    assert new(before, await outcomes(cluster)) == {"abort": 8, "length": 1, "stop": 1, "rejected": 1, "error": 1}
