"""One attempt's events on their way from the frame reader to the request: a bounded queue with an end.

The reader puts and never waits; the request takes. A request whose client reads too slowly overflows its own queue
and fails alone.
"""

from __future__ import annotations

import asyncio
from collections import deque

from stallfree_shared.errors import SlowClientError, StallfreeError
from stallfree_shared.wire import RequestId, SubmitAccepted, TokenEvent

MAX_EVENTS_BEHIND = 1024

AttemptKey = tuple[RequestId, int]


class Attempt:
    """Owns the events of one attempt that were received and not yet taken."""

    def __init__(self, request_id: RequestId, number: int) -> None:
        self.request_id = request_id
        self.number = number
        self.has_ended = False
        """The worker knows this attempt no longer: it needs no cancel."""
        self.failed: asyncio.Future[StallfreeError] = asyncio.get_running_loop().create_future()
        """Set at once when the worker is lost. Events received before it are still delivered first."""
        self.answer: asyncio.Future[SubmitAccepted | StallfreeError] = asyncio.get_running_loop().create_future()
        """To the submit; never set where the worker is lost before it answers."""
        self._events: deque[tuple[TokenEvent, float]] = deque()
        self._arrived = asyncio.Event()

    @property
    def key(self) -> AttemptKey:
        return self.request_id, self.number

    def take(self, event: TokenEvent, received_at: float) -> bool:
        """Takes an event in; False where the queue is full: the attempt has failed and is to be cancelled."""
        if len(self._events) >= MAX_EVENTS_BEHIND:
            self._set_failed(SlowClientError("the client reads its answer too slowly"))
            return False
        self.has_ended = self.has_ended or event.is_last
        self._events.append((event, received_at))
        self._arrived.set()
        return True

    def fail(self, error: StallfreeError) -> None:
        """The worker is lost: nothing comes any more."""
        self.has_ended = True
        if not self.failed.done():
            self._set_failed(error)

    async def next_event(self) -> tuple[TokenEvent, float]:
        """The next event and the instant at which it was received.

        Raises:
            StallfreeError: the attempt has failed and all events before that are taken.
        """
        while not self._events:
            if self.failed.done():
                raise self.failed.result()
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()

    def _set_failed(self, error: StallfreeError) -> None:
        self.failed.set_result(error)
        self._arrived.set()
