"""A server on a real socket that sends exactly the pieces of bytes that a test gives it, at the moments it chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Connection:
    """What a script may do with one client."""

    def __init__(self, writer: asyncio.StreamWriter, body: dict[str, object], headers: dict[str, str]) -> None:
        self.writer = writer
        self.body = body
        self.headers = headers

    async def send(self, *pieces: bytes) -> None:
        """Sends each piece as it is, and lets the client read it before the next."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def send_events(self, *events: dict[str, object] | str) -> None:
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            await self.send(chunk(f"data: {data}\n\n".encode()))


Script = Callable[[Connection], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def token_event(text: str, *token_ids: int, finish_reason: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "token_ids": list(token_ids), "finish_reason": finish_reason}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def usage_event(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """Serves `script` to every connection; gives the base URL."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            await script(Connection(writer, body, headers))
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
