"""Server-sent events: encode, and decode incrementally. Bytes in, events out; no I/O.

The rules are those of the HTML standard, section "Server-sent events": lines end with CR, LF or CRLF; a line that
begins with a colon is a comment; `data` lines of one event are joined by LF; an empty line ends the event, and an
event without data is dropped. The router writes with this, load tests and tests read with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = "[DONE]"
"""Data of the last event of a whole OpenAI stream."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_BYTE_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    data: str
    event: str = "message"
    id: str = ""
    """The last id that the stream has set, in this event or before."""


def encode_event(data: str, *, event: str | None = None, id: str | None = None) -> bytes:  # noqa: A002 - the field
    """One event. Line ends inside `data` arrive as LF. `event` and `id` must be single lines."""
    lines = [f"data: {line}" for line in _LINE_END.split(data)]
    for name, value in (("id", id), ("event", event)):
        if value is not None:
            if _LINE_END.search(value):
                raise ValueError(f"{name} of a server-sent event must be one line")
            lines.insert(0, f"{name}: {value}")
    return ("\n".join(lines) + "\n\n").encode()


def encode_comment(text: str) -> bytes:
    """A comment, which readers skip: it keeps a quiet stream open."""
    return (f": {_LINE_END.sub(' ', text)}\n\n").encode()


class Decoder:
    """Turns the bytes of one stream into events, however they were cut into pieces."""

    def __init__(self) -> None:
        self._pending = b""
        self._is_at_start = True
        self._ended_with_cr = False
        self._data: list[str] = []
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes. An event cut off by the end of the stream never appears."""
        events = []
        for line in self._lines(chunk):
            event = self._take(line.decode("utf-8", errors="replace"))
            if event is not None:
                events.append(event)
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        if self._ended_with_cr and chunk:
            self._ended_with_cr = False
            chunk = chunk.removeprefix(b"\n")
        self._pending += chunk
        if self._is_at_start:
            if len(self._pending) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(self._pending):
                return []
            self._is_at_start = False
            self._pending = self._pending.removeprefix(_BYTE_ORDER_MARK)
        if not _BYTE_LINE_END.search(chunk):
            return []
        self._ended_with_cr = self._pending.endswith(b"\r")
        *lines, self._pending = _BYTE_LINE_END.split(self._pending)
        return lines

    def _take(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case _:  # a comment, `retry`, or a field that nobody knows
                pass
        return None

    def _dispatch(self) -> Event | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        if not data:
            return None
        return Event(data="\n".join(data), event=event or "message", id=self._id)
