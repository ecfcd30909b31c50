"""Stall-free batching: Sarathi-Serve (arXiv 2403.02310), §4.2, algorithm 3, with prefills in order of their urgency."""

from __future__ import annotations

import heapq
from collections import Counter

from stallfree_worker.engine.batching.batch import Batch
from stallfree_worker.engine.order import RankKey
from stallfree_worker.engine.request import Line, Request

_MAX_PASSED = 8
"""Requests of one line that may be passed by others in one step, so that a step costs the same however many wait."""


class SarathiRule:
    """Every running decode, then prefills, begun and new ones, by urgency (`order.UrgencyOrder`), within one budget.

    Decodes that outnumber the budget all go, and no prefill joins that step. The oldest begun prefill has a share of
    every step. A waiting request that memory cannot take yet is passed by others until it is overdue; then nobody else
    is admitted before it. It fits at the latest when nothing else runs. One whose next tokens a running request is
    computing now is passed too, until it can share them.
    """

    is_by_arrival = False
    takes_whole_prompts = False

    def compose(self, batch: Batch) -> None:
        _displace(batch)
        for request in batch.decoding():
            batch.add_decode(request)
        begun, num_lines = batch.prefilling(), len(batch.waiting())
        if not begun and num_lines == 0:
            return
        oldest = min(begun, key=lambda request: request.arrival_number, default=None)
        if oldest is not None and len(begun) + num_lines > 1:
            batch.reserve_share(oldest)
        _add_prefills(batch, _Candidates(batch, begun))
        if oldest is not None and oldest not in batch.requests:
            batch.add_prefill(oldest)


def _displace(batch: Batch) -> None:
    """Lets waiting requests of better priority run in place of running ones, where they cannot run otherwise. Nobody
    gives way to one whose line is closed: it would hold the room and not compute."""
    waiting = batch.waiting()
    if not waiting:
        return
    worst = max((request.new.priority for request in batch.running), default=None)
    better = [request for request in waiting if worst is not None and request.new.priority < worst]
    if not better:
        return
    closed = {request.line for request in batch.prefilling()}
    best = min(request.new.priority for request in better)
    worse = [other for other in batch.running if other.new.priority > best]
    may_displace = batch.ranking.may_displace
    pressing = [
        request
        for request in better
        if request.line not in closed and any(may_displace(request, other) for other in worse)
    ]
    for request in sorted(pressing, key=batch.ranking.key):
        if batch.is_being_spared(request):
            continue
        if batch.can_admit(request):
            return  # it will be, in its turn
        batch.admit_by_displacing(request)


def _add_prefills(batch: Batch, candidates: _Candidates) -> None:
    while candidates and batch.has_room_for_prefill and (request := candidates.pop()) is not None:
        if not batch.is_running(request):
            if not batch.has_room_for(request):
                continue
            if batch.is_being_spared(request):
                candidates.pass_by(request)
                continue
            if not batch.can_admit(request):
                candidates.refuse(request)
                continue
            batch.admit(request)
        if batch.add_prefill(request):
            candidates.open_line_of(request)


class _Candidates:
    """The begun prefills and the first of every waiting line, least key first. A line opens when nobody of it is half
    computed any more."""

    def __init__(self, batch: Batch, begun: list[Request]) -> None:
        self._batch = batch
        self._num_begun = Counter(request.line for request in begun)
        self._num_passed: Counter[Line] = Counter()
        self._is_admitting = True
        firsts = batch.waiting() if batch.has_place else []
        waiting = [request for request in firsts if request.line not in self._num_begun]
        self._heap = [self._entry(request) for request in (*begun, *waiting)]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def pop(self) -> Request | None:
        """The next that may compute, running or waiting."""
        while self._heap:
            request = heapq.heappop(self._heap)[-1]
            if (self._is_admitting and self._batch.has_place) or self._batch.is_running(request):
                return request
        return None

    def pass_by(self, request: Request) -> None:
        """The waiting request is better off later, and keeps its place; the next of its line may come."""
        self._num_passed[request.line] += 1
        self._push_next_of(request.line)

    def refuse(self, request: Request) -> None:
        """The waiting request does not fit. Its line stays closed, and once it is overdue so do all."""
        self._is_admitting = not self._batch.ranking.is_overdue(request)

    def open_line_of(self, request: Request) -> None:
        """All that the request has to compute is in the step: the next of its line may come."""
        self._num_begun[request.line] = max(0, self._num_begun[request.line] - 1)
        if self._num_begun[request.line] == 0:
            self._push_next_of(request.line)

    def _push_next_of(self, line: Line) -> None:
        num_passed = self._num_passed[line]
        following = self._batch.waiting_in(line, num_passed) if num_passed <= _MAX_PASSED else None
        if following is not None:
            heapq.heappush(self._heap, self._entry(following))

    def _entry(self, request: Request) -> tuple[RankKey, int, Request]:
        return self._batch.ranking.key(request), request.arrival_number, request
