"""The API over real sockets: bytes on the wire, clients that leave, several at once, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from stallfree_shared import sse
from stallfree_shared.errors import WorkerLostError
from tests.support.raw_http import RawConnection, request_bytes
from tests.support.router_under_test import GENERATION_PATHS, RouterUnderTest, router_under_test
from tests.support.waiting import wait_until

Fields = dict[str, object]

_TTFT = "stallfree_router_time_to_first_token_seconds"
_ODD_TEXT = "a\nb\r\nc\rd\u2028e data: [DONE]\n\n"


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with router_under_test(keepalive_seconds=0.02, max_body_bytes=1_000_000) as router:
        yield router


@pytest.fixture
async def port(router: RouterUnderTest) -> AsyncIterator[int]:
    async with router.served() as port:
        yield port


def fields_for(path: str, text: str, **more: object) -> Fields:
    chat = {"messages": [{"role": "user", "content": text}]}
    return {"model": "scripted", **(chat if "chat" in path else {"prompt": text, "max_tokens": 1000}), **more}


def text_of(body: bytes) -> str:
    *events, done = sse.Decoder().feed(body)
    assert done.data == sse.DONE
    choices = [choice for event in events for choice in json.loads(event.data)["choices"]]
    return "".join(choice["text"] for choice in choices)


async def test_a49_every_event_is_one_line_of_json_and_one_done_ends_the_stream(port: int) -> None:
    async with RawConnection.open(port) as connection:
        fields = fields_for("/v1/completions", _ODD_TEXT, stream=True)
        await connection.send(request_bytes("/v1/completions", fields))
        head, body = await connection.read_response()
        assert b"content-type: text/event-stream; charset=utf-8" in head.lower()
        assert b"cache-control: no-cache" in head.lower()
        assert b"x-accel-buffering: no" in head.lower()
        *events, done, rest = body.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        assert all(event.startswith(b"data: {") and b"\n" not in event and b"\r" not in event for event in events)
        assert text_of(body) == _ODD_TEXT


async def test_a11_a49_every_token_leaves_at_once(router: RouterUnderTest, port: int) -> None:
    router.generator.hold()
    async with RawConnection.open(port) as connection:
        fields = fields_for("/v1/completions", "abcdef", stream=True, stop="#" * 200)
        await connection.send(request_bytes("/v1/completions", fields))
        await connection.read_until(b"\r\n\r\n")
        for character in "abcdef":
            router.generator.release()
            while (chunk := await connection.read_chunk()).startswith(b": keepalive"):
                pass
            (event,) = sse.Decoder().feed(chunk)
            assert json.loads(event.data)["choices"][0]["text"] == character
        router.generator.release()
        await wait_until(lambda: router.generator.running == 0)


@pytest.mark.parametrize("path", GENERATION_PATHS)
async def test_c17_d09_headers_role_and_comments_come_before_the_first_token_and_end_no_clock(
    router: RouterUnderTest, port: int, path: str
) -> None:
    router.generator.hold()
    async with RawConnection.open(port) as connection:
        await connection.send(request_bytes(path, fields_for(path, "ab", stream=True)))
        await connection.read_until(b"\r\n\r\n")
        if "chat" in path:
            assert b'"role":"assistant"' in await connection.read_chunk()
        for _ in range(2):
            assert await connection.read_chunk() == b": keepalive\n\n"
        assert router.value(f"{_TTFT}_count") == 0
        router.generator.release(3)
        while b"[DONE]" not in await connection.read_chunk():
            pass
        assert router.value(f"{_TTFT}_count") == 1
        assert router.value(f"{_TTFT}_sum") > 0.04
        assert router.value("stallfree_router_time_between_tokens_seconds_count") == 2


@pytest.mark.parametrize("path", GENERATION_PATHS)
@pytest.mark.parametrize("with_reset", [False, True])
@pytest.mark.parametrize("num_tokens_before", [0, 2])
async def test_a50_d01_a_client_that_leaves_a_stream_stops_the_work(
    router: RouterUnderTest, port: int, path: str, *, with_reset: bool, num_tokens_before: int
) -> None:
    router.generator.hold()
    async with RawConnection.open(port) as connection:
        await connection.send(request_bytes(path, fields_for(path, "x" * 200, stream=True, n=2)))
        await connection.read_until(b"\r\n\r\n")
        await wait_until(lambda: router.generator.running == 2)
        router.generator.release(num_tokens_before)
        await wait_until(lambda: router.generator.num_given == num_tokens_before)
        await connection.close(with_reset=with_reset)
        await wait_until(lambda: router.outcomes() == {"abort": 1}, 5.0)
        assert router.generator.num_closed_early == 2
        router.assert_idle()


async def test_a50_leaving_a_hundred_times_leaves_nothing(router: RouterUnderTest, port: int) -> None:
    for _ in range(100):
        async with RawConnection.open(port) as connection:
            fields = fields_for("/v1/completions", "x" * 900, stream=True)
            await connection.send(request_bytes("/v1/completions", fields))
            await connection.read_until(b"\r\n\r\n")
            await connection.read_chunk()
            await connection.close(with_reset=True)
    await wait_until(lambda: router.outcomes().total() == 100 and router.generator.running == 0)
    assert router.outcomes()["error"] == 0


@pytest.mark.parametrize("with_reset", [False, True])
async def test_a51_a_client_that_leaves_a_plain_call_stops_the_work(
    router: RouterUnderTest, port: int, *, with_reset: bool
) -> None:
    router.generator.hold()
    async with RawConnection.open(port) as connection:
        await connection.send(request_bytes("/v1/completions", fields_for("/v1/completions", "x" * 200)))
        await wait_until(lambda: router.generator.running == 1)
        router.generator.release(3)
        await wait_until(lambda: router.generator.num_given == 3)
        await connection.close(with_reset=with_reset)
        await wait_until(lambda: router.outcomes() == {"abort": 1}, 5.0)
        router.assert_idle()


async def test_a51_a_client_that_leaves_while_sending_its_body_is_an_abort(router: RouterUnderTest, port: int) -> None:
    async with RawConnection.open(port) as connection:
        await connection.send(request_bytes("/v1/completions", fields_for("/v1/completions", "x" * 200))[:-5])
        await wait_until(lambda: router.value("stallfree_router_in_flight_requests") == 1)
    await wait_until(lambda: router.outcomes() == {"abort": 1}, 5.0)


async def test_a53_calls_under_one_request_id_do_not_touch_each_other(router: RouterUnderTest, port: int) -> None:
    router.generator.hold()
    texts = ["first", "second", "third"]
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(RawConnection.open(port)) for _ in texts]
        for connection, text in zip(connections, texts, strict=True):
            fields = fields_for("/v1/completions", text, stream=True)
            await connection.send(request_bytes("/v1/completions", fields, headers="X-Request-Id: same\r\n"))
        await wait_until(lambda: router.generator.running == 3)
        await connections[0].close()
        await wait_until(lambda: router.generator.num_closed_early == 1)
        router.generator.release(50)
        for connection, text in zip(connections[1:], texts[1:], strict=True):
            head, body = await connection.read_response()
            assert b"x-request-id: same" in head.lower()
            assert text_of(body) == text
    assert router.outcomes() == {"abort": 1, "stop": 2}


async def test_a53_fifty_clients_at_once_get_their_own_text(router: RouterUnderTest, port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

        async def call(number: int) -> str:
            fields = fields_for("/v1/completions", f"text {number} 🔥", stream=number % 2 == 0)
            headers = {"X-Request-Id": f"req-{number % 10}"}
            response = await client.post("/v1/completions", json=fields, headers=headers)
            if number % 2 == 0:
                return text_of(response.content)
            return str(response.json()["choices"][0]["text"])

        assert await asyncio.gather(*map(call, range(50))) == [f"text {number} 🔥" for number in range(50)]


async def test_a57_pipelined_calls_are_answered_in_order_and_whole(port: int) -> None:
    async with RawConnection.open(port) as connection:
        first = request_bytes("/v1/completions", fields_for("/v1/completions", "first", stream=True))
        second = request_bytes("/v1/completions", fields_for("/v1/completions", "second"))
        await connection.send(first + second)
        assert text_of((await connection.read_response())[1]) == "first"
        assert json.loads((await connection.read_response())[1])["choices"][0]["text"] == "second"


async def test_a57_http_1_0_gets_a_whole_answer_without_chunked_coding(port: int) -> None:
    async with RawConnection.open(port) as connection:
        await connection.send(request_bytes("/v1/completions", fields_for("/v1/completions", "old"), version="1.0"))
        head, body = await connection.read_response()
        assert b"chunked" not in head.lower()
        assert json.loads(body)["choices"][0]["text"] == "old"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/scripted"])
async def test_a57_head_is_get_without_the_body(port: int, path: str) -> None:
    async with RawConnection.open(port) as connection:
        await connection.send(f"HEAD {path} HTTP/1.1\r\nHost: router\r\n\r\n".encode())
        assert (await connection.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await connection.send(b"GET /livez HTTP/1.1\r\nHost: router\r\n\r\n")
        head, body = await connection.read_response()  # so nothing followed the first head
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"ok\n")


async def test_c20_while_draining_every_answer_asks_the_client_to_close_its_connection(
    router: RouterUnderTest, port: int
) -> None:
    settings = router.settings.model_copy(update={"drain_delay_seconds": 60})
    fields = fields_for("/v1/completions", "abc")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        before = await client.post("/v1/completions", json=fields)
        assert "connection" not in before.headers
        leaving = asyncio.create_task(router.drain.run(settings))
        await wait_until(lambda: router.drain.is_draining)
        for more in ({}, {"stream": True}):
            response = await client.post("/v1/completions", json=fields | more)
            assert (response.status_code, response.headers["connection"]) == (200, "close")
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


async def test_a57_expect_100_continue_is_honoured(port: int) -> None:
    async with RawConnection.open(port) as connection:
        data = request_bytes("/v1/completions", fields_for("/v1/completions", "x"), headers="Expect: 100-continue\r\n")
        head, _, body = data.partition(b"\r\n\r\n")
        await connection.send(head + b"\r\n\r\n")
        assert (await connection.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        await connection.send(body)
        assert (await connection.read_response())[0].startswith(b"HTTP/1.1 200")


async def test_a41_a_declared_length_beyond_the_limit_is_refused_before_the_body_comes(port: int) -> None:
    async with RawConnection.open(port) as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: 64000000\r\n\r\n{")
        head, body = await connection.read_response()
        assert head.startswith(b"HTTP/1.1 413")
        assert json.loads(body)["error"]["code"] == "payload_too_large"


async def test_a41_a_chunked_body_is_refused_once_it_is_too_long(port: int) -> None:
    async with RawConnection.open(port) as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            await connection.send(b"186a0\r\n" + b" " * 100_000 + b"\r\n")
        assert (await connection.read_response())[0].startswith(b"HTTP/1.1 413")


async def test_c23_other_calls_are_answered_while_a_long_prompt_is_tokenized() -> None:
    async with (
        router_under_test(max_model_len=100_000) as router,
        router.served() as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        fields = fields_for("/v1/completions", "hello world " * 100_000)  # short enough to be tokenized
        long_call = asyncio.create_task(client.post("/v1/completions", json=fields))
        num_answered = 0
        while not long_call.done():
            assert (await client.get("/livez")).status_code == 200
            num_answered += 1
        assert "1200000 tokens" in (await long_call).json()["error"]["message"]
        assert num_answered > 10


async def test_a36_openais_client_reads_answers_and_streams(port: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
        chat = await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hello"}])
        assert chat.choices[0].message.content == "hello"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (5, 6)
        completion = await client.completions.create(model="scripted", prompt=["a", "bc"], n=2)
        assert [choice.text for choice in completion.choices] == ["a", "a", "bc", "bc"]
        stream = await client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "héllo"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "héllo"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 7
        assert [model.id async for model in client.models.list()] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"


async def test_a36_openais_client_raises_the_matching_exception(router: RouterUnderTest, port: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="scripted", prompt="x" * 3000)
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="x")
        assert missing.value.code == "model_not_found"
        router.generator.error, router.generator.error_index = WorkerLostError("gone"), 2
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="scripted", prompt="abcdef")
        stream = await client.completions.create(model="scripted", prompt="abcdef", stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass


async def test_a36_a_wrong_key_is_an_authentication_error() -> None:
    async with router_under_test(api_key="sesame") as router, router.served() as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
            assert (await client.models.list()).data[0].id == "scripted"
