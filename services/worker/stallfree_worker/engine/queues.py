"""The waiting and the running requests.

Owned by the scheduler. Admission and preemption move a request between the two; both, and the removal of any request,
cost the same however many wait.
"""

from __future__ import annotations

from collections.abc import ValuesView

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.order import Order
from stallfree_worker.engine.request import Request
from stallfree_worker.engine.waiting_queue import WaitingQueue


class RequestQueues:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.waiting = WaitingQueue(order)
        """To look at; requests enter and leave it through this class."""
        self._running: dict[RequestId, Request] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._running or request_id in self.waiting

    @property
    def running(self) -> ValuesView[Request]:
        """In the order of their admission."""
        return self._running.values()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def best_priority(self) -> int:
        """The least of all that run, or are the first of their line; 0 where nobody is here."""
        requests = (*self._running.values(), *self.waiting.firsts())
        return min((request.new.priority for request in requests), default=0)

    def is_running(self, request: Request) -> bool:
        return request.request_id in self._running

    def running_by_id(self, request_id: RequestId) -> Request | None:
        return self._running.get(request_id)

    def enqueue(self, request: Request) -> None:
        """Takes a new request."""
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        """Lets a waiting request run."""
        require(self.waiting.remove(request.request_id) is request, f"{request.request_id} does not wait")
        self._running[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """Sends a running request back to the front of those that wait."""
        del self._running[request.request_id]
        request.restart()
        self.waiting.put_first(request)

    def remove(self, request_id: RequestId) -> tuple[Request, bool] | None:
        """Removes a request and tells whether it was running; None for one that is not here."""
        running = self._running.pop(request_id, None)
        if running is not None:
            return running, True
        waiting = self.waiting.remove(request_id)
        return None if waiting is None else (waiting, False)

    def check_integrity(self) -> None:
        """Raises IntegrityError where the waiting contradict themselves, or a request stands in both queues."""
        self.waiting.check_integrity()
        require(not any(request_id in self.waiting for request_id in self._running), "a request runs and waits")
