"""The client over real sockets: every token is stamped and counted, every bad end is told."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable

import pytest

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.measures import RequestTrace, TokenStamp, gaps
from tests.loadtest.scripted_server import END, HEAD, Connection, Script, chunk, serving, token_event, usage_event

REQUEST = CompletionRequest(request_id="r1", prompt=(1, 2, 3), max_tokens=4, seed=7)


def counting_clock() -> Callable[[], float]:
    """1, 2, 3, …: every reading of the clock is one more."""
    ticks = itertools.count(1)
    return lambda: float(next(ticks))


async def stream(script: Script, *, api_key: str | None = None, silence_timeout_seconds: float = 10.0) -> RequestTrace:
    async with serving(script) as url:
        server = Server(url=url, model="m", api_key=api_key, silence_timeout_seconds=silence_timeout_seconds)
        return await CompletionStream(server, REQUEST).run()


async def test_a_whole_stream_gives_tokens_text_usage_and_finish_reason() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events(
            token_event("Hello", 5), token_event("", 6), token_event(" you", 7, 8, finish_reason="length")
        )
        await connection.send_events(usage_event(3, 4), "[DONE]")
        await connection.send(END)

    trace = await stream(script)
    assert (trace.outcome, trace.error, trace.finish_reason) == ("finished", None, "length")
    assert [stamp.num_tokens for stamp in trace.stamps] == [1, 1, 2]
    assert trace.text == "Hello you"
    assert (trace.prompt_tokens, trace.completion_tokens) == (3, 4)
    assert trace.is_count_confirmed


async def test_the_request_asks_for_token_ids_usage_and_no_early_end() -> None:
    seen: list[Connection] = []

    async def script(connection: Connection) -> None:
        seen.append(connection)
        await connection.send(HEAD)
        await connection.send_events("[DONE]")
        await connection.send(END)

    await stream(script, api_key="key")
    assert seen[0].headers["authorization"] == "Bearer key"
    assert seen[0].body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "seed": 7,
    }


async def test_stamps_are_in_order_and_lie_between_sending_and_end() -> None:
    arrived = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        for token in range(5):
            await connection.send_events(token_event("x", token))
            await arrived.wait()
            arrived.clear()
        await connection.send_events("[DONE]")
        await connection.send(END)

    async with serving(script) as url:
        trace = await CompletionStream(
            Server(url=url, model="m"), REQUEST, clock=counting_clock(), on_token=arrived.set
        ).run()
    instants = [trace.sent_at, *(stamp.at for stamp in trace.stamps), trace.ended_at]
    assert instants == sorted(set(instants))
    assert len(trace.stamps) == 5


async def test_events_that_arrive_in_one_read_share_one_stamp() -> None:
    async def script(connection: Connection) -> None:
        events = (
            b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\ndata: {"choices":[{"text":"b","token_ids":[2]}]}\n\n'
        )
        await connection.send(HEAD + chunk(events) + chunk(b"data: [DONE]\n\n") + END)

    trace = await stream(script)
    assert trace.text == "ab"
    assert [gap.seconds for gap in gaps(trace)] == [0.0]


async def test_events_and_characters_may_be_split_anywhere() -> None:
    async def script(connection: Connection) -> None:
        data = (
            'data: {"choices":[{"text":"größer 🌍","token_ids":[1,2]}]}\r\n\r\n: comment\n\ndata: [DONE]\n\n'.encode()
        )
        await connection.send(HEAD, *(chunk(data[place : place + 1]) for place in range(len(data))), END)

    trace = await stream(script)
    assert trace.text == "größer 🌍"
    assert trace.num_tokens == 2
    assert trace.outcome == "finished"


async def test_a_stream_without_chunked_encoding_is_read_to_its_end() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        await connection.send(b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\ndata: [DONE]\n\n')

    trace = await stream(script)
    assert (trace.outcome, trace.text) == ("finished", "a")


async def test_without_token_ids_an_event_with_text_is_one_token_and_usage_contradicts() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events({"choices": [{"text": "two tokens"}]}, usage_event(3, 2), "[DONE]")
        await connection.send(END)

    trace = await stream(script)
    assert trace.num_tokens == 1
    assert not trace.is_count_confirmed


async def test_an_error_event_is_an_error_and_keeps_what_came_before() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events(
            token_event("a", 1), {"error": {"message": "the worker is gone", "code": "worker_lost"}}
        )
        await connection.send(END)

    trace = await stream(script)
    assert (trace.outcome, trace.num_tokens) == ("error", 1)
    assert trace.error is not None
    assert "worker_lost: the worker is gone" in trace.error


@pytest.mark.parametrize("end", [b"", END])
async def test_a_stream_that_ends_without_done_is_an_error(end: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events(token_event("a", 1))
        await connection.send(end)

    trace = await stream(script)
    assert (trace.outcome, trace.num_tokens) == ("error", 1)
    assert trace.error


async def test_a_reset_connection_is_an_error() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events(token_event("a", 1))
        connection.writer.transport.abort()

    assert (await stream(script)).outcome == "error"


async def test_a_refusal_tells_status_and_message() -> None:
    async def script(connection: Connection) -> None:
        body = b'{"error": {"message": "slow down", "code": "overloaded"}}'
        await connection.send(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    trace = await stream(script)
    assert (trace.outcome, trace.error) == ("error", "HTTP 429: slow down")


async def test_an_answer_that_is_not_http_is_an_error() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    assert (await stream(script)).outcome == "error"


async def test_silence_is_an_error_after_the_timeout() -> None:
    released = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events(token_event("a", 1))
        await released.wait()

    trace = await stream(script, silence_timeout_seconds=0.1)
    released.set()
    assert (trace.outcome, trace.num_tokens) == ("error", 1)
    assert trace.error == "nothing came for 0.1 s"


async def test_nobody_listening_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    trace = await CompletionStream(Server(url=f"http://127.0.0.1:{port}", model="m"), REQUEST).run()
    assert trace.outcome == "error"
    assert trace.stamps == ()


async def test_a_cancelled_request_leaves_the_server_and_keeps_its_stamps() -> None:
    first, left = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.send(HEAD)
        await connection.send_events(token_event("a", 1))
        try:
            while True:
                await connection.send(chunk(b": still here\n\n"))
                await asyncio.sleep(0)
        except ConnectionError:
            left.set()

    async with serving(script) as url:
        request = CompletionStream(Server(url=url, model="m"), REQUEST, on_token=first.set)
        task = asyncio.ensure_future(request.run())
        async with asyncio.timeout(10):
            await first.wait()
            task.cancel()
            await asyncio.wait([task])
            await left.wait()
    trace = request.trace()
    assert (trace.outcome, trace.num_tokens) == ("dropped", 1)
    assert trace.stamps == (TokenStamp(at=trace.stamps[0].at, num_tokens=1),)
