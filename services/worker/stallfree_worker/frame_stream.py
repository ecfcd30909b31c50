"""One router's frame stream on this side: encoded frames that wait to be written. Filled by `connections.Connections`,
emptied by the route that writes it. Never holds more than `max_frames_behind` frames, and little more than
`MAX_BYTES_BEHIND`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from stallfree_shared.wire import ConnectionId, Frame, RequestId

MAX_BYTES_BEHIND = 64 * 1024 * 1024
"""Log-probabilities make a frame a hundred times as large as its tokens."""


class FrameStream:
    def __init__(self, connection_id: ConnectionId, *, max_frames_behind: int) -> None:
        self.connection_id = connection_id
        self.engine_ids: set[RequestId] = set()
        """Requests whose events travel here."""
        self.cut = asyncio.Event()
        """Set where the router reads too slowly: whoever writes stops at once."""
        self._max_frames_behind = max_frames_behind
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_ended = False
        self._changed = asyncio.Event()

    def push(self, frame: Frame) -> bool:
        """Encodes and queues `frame`. False: there is no room left, and the stream is cut."""
        if len(self._frames) >= self._max_frames_behind or self._num_bytes >= MAX_BYTES_BEHIND:
            self._take_all()
            self.cut.set()
            return False
        line = frame.model_dump_json(exclude_defaults=True).encode() + b"\n"
        self._frames.append(line)
        self._num_bytes += len(line)
        self._changed.set()
        return True

    def end(self) -> None:
        """The stream ends after the frames that wait."""
        self._is_ended = True
        self._changed.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """All frames there are, as one chunk each time there are any, until the end."""
        while True:
            if self._frames:
                yield b"".join(self._take_all())
            elif self._is_ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _take_all(self) -> deque[bytes]:
        """The frames that wait; none waits any more."""
        frames, self._frames, self._num_bytes = self._frames, deque(), 0
        return frames
