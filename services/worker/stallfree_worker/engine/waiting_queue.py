"""The waiting requests, in lines: within a line in order of arrival, preempted ones at the front.

Owned by `RequestQueues`. Every move and every removal costs the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.order import Order
from stallfree_worker.engine.request import Line, Request


class WaitingQueue:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._request_by_id: dict[RequestId, Request] = {}
        self._lines: dict[Line, OrderedDict[RequestId, Request]] = {}
        self.num_tokens = 0
        """Tokens to compute before the waiting requests can draw: prompts, and outputs that a preemption lost."""
        self.num_expected_output_tokens = 0

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._request_by_id

    def __len__(self) -> int:
        return len(self._request_by_id)

    def firsts(self) -> Iterator[Request]:
        """The first of every line."""
        return (next(iter(requests.values())) for requests in self._lines.values())

    def at(self, line: Line, place: int) -> Request | None:
        """Who is at this place of the line, from 0. Costs the more the farther behind."""
        return next(islice(self._lines.get(line, {}).values(), place, None), None)

    def longest_waiting(self) -> Iterator[Request]:
        """All preempted requests, and of each line the new one that waits longest. Costs nothing for the others."""
        for requests in self._lines.values():
            for request in requests.values():
                yield request
                if not request.was_preempted:
                    break

    def append(self, request: Request) -> None:
        """Puts a new request behind all others of its line."""
        request.line = self._order.line_of(request)
        self._request_by_id[request.request_id] = request
        self._lines.setdefault(request.line, OrderedDict())[request.request_id] = request
        self._count(request, 1)

    def put_first(self, request: Request) -> None:
        """Puts a preempted request before all others of its line."""
        self.append(request)
        self._lines[request.line].move_to_end(request.request_id, last=False)

    def remove(self, request_id: RequestId) -> Request | None:
        """Removes a request; None for one that does not wait."""
        request = self._request_by_id.pop(request_id, None)
        if request is None:
            return None
        requests = self._lines[request.line]
        del requests[request_id]
        if not requests:
            del self._lines[request.line]
        self._count(request, -1)
        return request

    def check_integrity(self) -> None:
        """Raises IntegrityError where a line, an order or a sum is wrong."""
        waiting = [request for requests in self._lines.values() for request in requests.values()]
        require(all(self._lines.values()), "a line without requests is kept")
        by_id = {request.request_id: request for request in waiting}
        require(by_id == self._request_by_id and len(by_id) == len(waiting), "a request is in no line, or in two")
        require(
            all(request.request_id in self._lines[self._order.line_of(request)] for request in waiting), "a wrong line"
        )
        for requests in self._lines.values():
            new = [request for request in requests.values() if not request.was_preempted]
            numbers = [request.arrival_number for request in new]
            require(numbers == sorted(numbers), "new requests of a line are not in order of arrival")
            require(new == list(requests.values())[len(requests) - len(new) :], "a preempted request is not in front")
        require(all(request.num_computed_tokens == 0 for request in waiting), "a waiting request holds computed tokens")
        require(self.num_tokens == sum(request.num_tokens for request in waiting), "the sum of waiting tokens is wrong")
        num_expected = sum(request.expected_output_tokens_left for request in waiting)
        require(self.num_expected_output_tokens == num_expected, "the sum of expected tokens is wrong")

    def _count(self, request: Request, sign: int) -> None:
        self.num_tokens += sign * request.num_tokens
        self.num_expected_output_tokens += sign * request.expected_output_tokens_left
