"""The waiting and the running requests, both in order of arrival.

Owned by the scheduler. Every running request arrived before every waiting one: admission takes the first that waits,
preemption returns the last that runs. So both moves, and the removal of any request, cost the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ValuesView

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.request import Request


class RequestQueues:
    def __init__(self) -> None:
        self._waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self._running: dict[RequestId, Request] = {}
        self.num_waiting_tokens = 0
        """Tokens to compute before the waiting requests can draw: prompts, and outputs that a preemption lost."""
        self.num_waiting_expected_output_tokens = 0

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._running or request_id in self._waiting

    @property
    def running(self) -> ValuesView[Request]:
        """Oldest first."""
        return self._running.values()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def first_waiting(self) -> Request | None:
        return next(iter(self._waiting.values()), None)

    def is_running(self, request: Request) -> bool:
        return request.request_id in self._running

    def enqueue(self, request: Request) -> None:
        """Puts a new request behind all others."""
        self._waiting[request.request_id] = request
        self._count_waiting(request, 1)

    def admit_first(self) -> Request:
        """Lets the first waiting request run."""
        request_id, request = self._waiting.popitem(last=False)
        self._count_waiting(request, -1)
        self._running[request_id] = request
        return request

    def preempt_last(self) -> Request:
        """Sends the running request that arrived last back to the front of those that wait."""
        request_id, request = self._running.popitem()
        request.restart()
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        self._count_waiting(request, 1)
        return request

    def remove(self, request_id: RequestId) -> tuple[Request, bool] | None:
        """Removes a request and tells whether it was running; None for one that is not here."""
        running = self._running.pop(request_id, None)
        if running is not None:
            return running, True
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        self._count_waiting(waiting, -1)
        return waiting, False

    def check_integrity(self) -> None:
        """Raises IntegrityError where an order or a sum is wrong, or a request stands in both queues."""
        waiting = list(self._waiting.values())
        numbers = [request.arrival_number for request in [*self._running.values(), *waiting]]
        require(numbers == sorted(set(numbers)), "requests are not in order of arrival")
        require(all(request.num_computed_tokens == 0 for request in waiting), "a waiting request holds computed tokens")
        num_tokens = sum(request.num_tokens for request in waiting)
        require(self.num_waiting_tokens == num_tokens, "the sum of waiting tokens is wrong")
        num_expected = sum(request.expected_output_tokens_left for request in waiting)
        require(self.num_waiting_expected_output_tokens == num_expected, "the sum of expected tokens is wrong")

    def _count_waiting(self, request: Request, sign: int) -> None:
        self.num_waiting_tokens += sign * request.num_tokens
        self.num_waiting_expected_output_tokens += sign * request.expected_output_tokens_left
