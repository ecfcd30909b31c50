"""One router's frame stream on this side: encoded frames that wait to be written. Filled by `connections.Connections`,
emptied by the route that writes it. Never holds more than `max_frames_behind` frames."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from stallfree_shared.wire import ConnectionId, Frame, RequestId


class FrameStream:
    def __init__(self, connection_id: ConnectionId, *, max_frames_behind: int) -> None:
        self.connection_id = connection_id
        self.engine_ids: set[RequestId] = set()
        """Requests whose events travel here."""
        self.cut = asyncio.Event()
        """Set where the router reads too slowly: whoever writes stops at once."""
        self._max_frames_behind = max_frames_behind
        self._frames: deque[bytes] = deque()
        self._is_ended = False
        self._changed = asyncio.Event()

    def push(self, frame: Frame) -> bool:
        """Encodes and queues `frame`. False: there is no room left, and the stream is cut."""
        if len(self._frames) >= self._max_frames_behind:
            self._frames.clear()
            self.cut.set()
            return False
        self._frames.append(frame.model_dump_json(exclude_defaults=True).encode() + b"\n")
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
                chunk = b"".join(self._frames)
                self._frames.clear()
                yield chunk
            elif self._is_ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
