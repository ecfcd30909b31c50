"""One HTTP/1.1 request and its answer, as bytes with the instant at which each piece was read. No I/O of its own.

h11 speaks the protocol; this only turns its events into pieces of the body. Used by `client`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import h11


class ExchangeError(Exception):
    """The answer is not HTTP, or it broke off."""


class HttpExchange:
    """Owns the state of one exchange: what to send, then the answer's status and body as they come."""

    def __init__(self, url: str, body: Mapping[str, object], *, headers: Mapping[str, str]) -> None:
        self._connection = h11.Connection(h11.CLIENT)
        parts = urlsplit(url)
        data = json.dumps(body).encode()
        fields = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Accept": "text/event-stream",
            "Connection": "close",
            **headers,
        }
        request = h11.Request(method="POST", target=parts.path or "/", headers=list(fields.items()))
        pieces = (request, h11.Data(data=data), h11.EndOfMessage())
        self.request_bytes = b"".join(self._connection.send(piece) or b"" for piece in pieces)
        self.status: int | None = None
        """None until the head of the answer is there."""
        self.is_complete = False
        """The whole answer has been read."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Takes what the socket gave (nothing: the server closed it) and gives the pieces of the body in it.

        Raises:
            ExchangeError: the answer is not HTTP, or it broke off.
        """
        try:
            self._connection.receive_data(data)
            yield from self._pieces()
        except h11.RemoteProtocolError as error:
            raise ExchangeError(str(error)) from None

    def _pieces(self) -> Iterator[bytes]:
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.Response):
                self.status = event.status_code
            elif isinstance(event, h11.EndOfMessage):
                self.is_complete = True
                return
            elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
                return
