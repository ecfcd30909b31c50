"""HTTP by hand over a socket, for tests of what a client library hides: bytes, order, and leaving early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator


def request_bytes(path: str, body: object, *, version: str = "1.1", headers: str = "") -> bytes:
    """A POST, ready to be written."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: router\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


class RawConnection:
    """One connection to a loopback port. Every read has an end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator[RawConnection]:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield connection
        finally:
            await connection.close()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read_until(self, end: bytes) -> bytes:
        async with asyncio.timeout(10):
            return await self._reader.readuntil(end)

    async def read_response(self) -> tuple[bytes, bytes]:
        """Head and body of one response, chunked or of declared length, or else all that comes."""
        head = await self.read_until(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        if b"transfer-encoding: chunked" in lines:
            return head, await self._read_chunks()
        for line in lines:
            if line.startswith(b"content-length:"):
                async with asyncio.timeout(10):
                    return head, await self._reader.readexactly(int(line.split(b":")[1]))
        async with asyncio.timeout(10):
            return head, await self._reader.read()

    async def read_chunk(self) -> bytes:
        """One piece of a chunked body; empty at its end."""
        size = int((await self.read_until(b"\r\n")).strip(), 16)
        async with asyncio.timeout(10):
            return (await self._reader.readexactly(size + 2))[:size]

    async def _read_chunks(self) -> bytes:
        body = b""
        while chunk := await self.read_chunk():
            body += chunk
        return body

    async def close(self, *, with_reset: bool = False) -> None:
        """Leaves: with FIN, or with RST as a killed client may."""
        if with_reset:
            connection: socket.socket = self._writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
