"""Sole owner of what is known about workers: who they are, what they serve, how loaded they are, whether they may be
used. Runs one `WorkerConnection` per address that discovery names; `dispatch` reserves a place here and reads views
through `policy`. Never touches a request's tokens.

A request is counted once: by its reservation while the worker's status is older than its acceptance, by the status
afterwards (`SubmitAccepted.status_sequence`). What a lost worker had told is forgotten, besides the model that it
serves: while it is away its model is unavailable, not unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet

from stallfree_router import policy
from stallfree_router.breaker import Breaker
from stallfree_router.discovery import Discovery
from stallfree_router.metrics import RouterMetrics
from stallfree_router.policy import Demand, WorkerView
from stallfree_router.settings import DispatchSettings
from stallfree_router.worker_connection import FetchTokenizer, WorkerConnection
from stallfree_shared.errors import (
    DrainingError,
    InvalidRequestError,
    OverloadedError,
    StallfreeError,
    StepFailedError,
    UnavailableError,
)
from stallfree_shared.load import Work, with_work
from stallfree_shared.wire import ModelCard, SubmitAccepted
from stallfree_shared.worker_status import WorkerStatus

MIN_RETRY_AFTER_SECONDS = 1.0
MAX_RETRY_AFTER_SECONDS = 30.0
"""However long a worker or a proxy asks for, it is looked at again after this (C11)."""

_logger = logging.getLogger(__name__)

AddTokenizer = Callable[[str, FetchTokenizer], Awaitable[None]]


class Reservation:
    """One request's place on one worker."""

    def __init__(self, url: str, connection: WorkerConnection, *, work: Work, num_losses: int, is_trial: bool) -> None:
        self.url = url
        self.connection = connection
        self.work = work
        self.num_losses = num_losses
        """How often the worker had been lost when this was made; it stands for that life of the worker only."""
        self.is_trial = is_trial
        """It decides whether a half-open breaker closes; until then no other request is let through."""
        self.status_sequence: int | None = None
        """Statuses above this include the request; None until the worker has accepted it."""

    def is_counted_by(self, status: WorkerStatus) -> bool:
        return self.status_sequence is not None and status.sequence > self.status_sequence


class _Worker:
    """What is known about one address."""

    def __init__(self, connection: WorkerConnection) -> None:
        self.connection = connection
        self.task: asyncio.Task[None] | None = None
        self.is_listed = True
        """Discovery names it. One that it names no longer gets no new request, and stays until its last has ended."""
        self.card: ModelCard | None = None
        self.status: WorkerStatus | None = None
        """None while it is away."""
        self.num_losses = 0
        self.breaker = Breaker()
        self.usable_since = 0.0
        self.was_usable = False
        """As it was last shown."""
        self.held: set[Reservation] = set()
        self.uncounted: set[Reservation] = set()
        """Those of `held` that the status does not hold yet."""

    def view(self, now: float) -> WorkerView | None:
        """As the policy sees it; None while it is away or leaving."""
        if not self.is_listed or self.card is None or self.status is None:
            return None
        return WorkerView(
            url=self.connection.url,
            model=self.card.model,
            max_model_len=self.card.max_model_len,
            status=with_work(self.status, (reservation.work for reservation in self.uncounted)),
            is_allowed=self.breaker.allows(now),
            is_full=self.breaker.is_full(now),
            age_seconds=now - self.usable_since,
        )

    def is_usable(self, now: float) -> bool:
        view = self.view(now)
        return view is not None and policy.is_usable(view, view.model)


class Workers:
    """Run `run` for as long as workers are used."""

    def __init__(
        self,
        *,
        discovery: Discovery,
        settings: DispatchSettings,
        metrics: RouterMetrics,
        add_tokenizer: AddTokenizer,
        rng: random.Random | None = None,
    ) -> None:
        self._discovery = discovery
        self._settings = settings
        self._metrics = metrics
        self._add_tokenizer = add_tokenizer
        self._rng = rng or random.Random()
        self._worker_by_url: dict[str, _Worker] = {}
        self._changed = asyncio.Event()
        self._models_shown: set[str] = set()
        self._has_ended = False

    async def run(self) -> None:
        """Follows discovery and keeps a connection to each worker; ends by cancellation, with nothing left running."""
        try:
            async with asyncio.TaskGroup() as tasks, contextlib.aclosing(self._discovery.watch()) as watch:
                async for urls in watch:
                    self._set_urls(urls, tasks)
        finally:
            self._has_ended = True
            self._worker_by_url.clear()
            self._tell_change()

    def models(self) -> Mapping[str, ModelCard]:
        """The card of each model that some known worker serves, even where all of them are away just now. Of several
        that differ the one that takes the longest prompts: the policy finds a worker for each."""
        cards = [worker.card for worker in self._worker_by_url.values() if worker.is_listed and worker.card is not None]
        return {card.model: card for card in sorted(cards, key=lambda card: card.max_model_len)}

    def usable(self, model: str) -> bool:
        """Whether some worker can take a request for `model` now."""
        return self._num_usable(model) > 0

    def views(self) -> list[WorkerView]:
        """Every connected worker as the policy sees it now."""
        now = time.monotonic()
        views = (worker.view(now) for worker in self._worker_by_url.values())
        return [view for view in views if view is not None]

    @contextlib.asynccontextmanager
    async def reserved(self, demand: Demand, *, tried: AbstractSet[str]) -> AsyncIterator[Reservation]:
        """A place on the worker that the policy picks, waited for where none can take the request now. Learns from
        how the block ends; the place is free again when it does.

        Raises:
            ContextLengthExceededError: no worker of the model takes so many tokens.
            OverloadedError: all of them are full.
            UnavailableError: none was usable for `no_worker_timeout_seconds`, or `run` has ended.
        """
        reservation = await self._reserve(demand, tried)
        try:
            yield reservation
        except StallfreeError as error:
            self._learn(reservation, error)
            raise
        finally:
            self._release(reservation)

    def mark_accepted(self, reservation: Reservation, accepted: SubmitAccepted) -> None:
        """The worker has taken the request: from its next status on, that counts it."""
        reservation.status_sequence = accepted.status_sequence
        worker = self._holder(reservation)
        if worker is not None and worker.status is not None and reservation.is_counted_by(worker.status):
            worker.uncounted.discard(reservation)

    def mark_output(self, reservation: Reservation) -> None:
        """The worker has given output: it works."""
        worker = self._holder(reservation)
        if worker is not None:
            reservation.is_trial = False
            self._set_breaker(worker, worker.breaker.after_success())

    async def on_tokenizer(self, sha256: str, fetch: FetchTokenizer) -> None:
        await self._add_tokenizer(sha256, fetch)

    def on_card(self, connection: WorkerConnection, card: ModelCard) -> None:
        worker = self._worker_of(connection)
        if worker is not None:
            worker.card = card
            self._tell_change()

    def on_status(self, connection: WorkerConnection, status: WorkerStatus) -> None:
        worker = self._worker_of(connection)
        if worker is None:
            return
        now = time.monotonic()
        if worker.status is None or not worker.status.is_ready:
            worker.usable_since = now
        worker.status = status
        worker.uncounted = {each for each in worker.uncounted if not each.is_counted_by(status)}
        if worker.is_usable(now) != worker.was_usable:
            self._tell_change()

    def on_lost(self, connection: WorkerConnection, *, was_connected: bool) -> None:
        worker = self._worker_of(connection)
        if worker is None:
            return
        if was_connected and worker.status is not None and not worker.status.is_draining:
            worker.breaker = worker.breaker.after_failure(time.monotonic())
        worker.status = None
        worker.uncounted.clear()
        worker.num_losses += 1
        self._tell_change()

    def check_integrity(self, *, is_idle: bool = False) -> None:
        """Raises AssertionError where the tables disagree, or, with `is_idle`, where anything is left of a request."""
        for url, worker in self._worker_by_url.items():
            num_attempts = worker.connection.num_attempts
            facts = {
                "uncounted is a part of held": worker.uncounted <= worker.held,
                "reservations name their worker": all(each.url == url for each in worker.held),
                "an attempt holds a reservation": num_attempts <= len(worker.held),
                "a status needs a card": worker.status is None or worker.card is not None,
                "idle: nothing held": not is_idle or not worker.held,
                "idle: no attempt": not is_idle or num_attempts == 0,
                "idle: no trial": not is_idle or not worker.breaker.has_trial,
            }
            broken = [fact for fact, holds in facts.items() if not holds]
            if broken:
                raise AssertionError(f"{url}: {broken}")

    async def _reserve(self, demand: Demand, tried: AbstractSet[str]) -> Reservation:
        deadline = time.monotonic() + self._settings.no_worker_timeout_seconds
        while not self._has_ended:
            changed = self._changed
            now = time.monotonic()
            views = self.views()
            view = policy.pick(views, demand, tried=tried, rng=self._rng)
            self._metrics.decision_seconds.observe(time.monotonic() - now)
            if view is not None:
                return self._hold(view.url, demand)
            wait_seconds = self._seconds_to_change(now)
            error = policy.refusal(views, demand, retry_after_seconds=max(MIN_RETRY_AFTER_SECONDS, wait_seconds))
            if error is not None:
                raise error
            if now >= deadline:
                raise UnavailableError(
                    f"no worker can serve the model {demand.model!r} now",
                    retry_after_seconds=max(MIN_RETRY_AFTER_SECONDS, self._settings.no_worker_timeout_seconds),
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(deadline - now, wait_seconds or deadline - now)):
                    await changed.wait()
        raise DrainingError("this router is leaving", retry_after_seconds=MIN_RETRY_AFTER_SECONDS)

    def _hold(self, url: str, demand: Demand) -> Reservation:
        worker = self._worker_by_url[url]
        reservation = Reservation(
            url,
            worker.connection,
            work=demand.work_at(url),
            num_losses=worker.num_losses,
            is_trial=worker.breaker.open_until is not None,
        )
        worker.held.add(reservation)
        worker.uncounted.add(reservation)
        worker.breaker = worker.breaker.after_dispatch()
        return reservation

    def _release(self, reservation: Reservation) -> None:
        """Idempotent, and no harm where the worker has left meanwhile."""
        worker = self._worker_of(reservation.connection)
        if worker is None or reservation not in worker.held:
            return
        worker.held.discard(reservation)
        worker.uncounted.discard(reservation)
        if reservation.is_trial:
            self._set_breaker(worker, worker.breaker.after_abandon())
        self._drop_if_done(worker)

    def _learn(self, reservation: Reservation, error: StallfreeError) -> None:
        worker = self._holder(reservation)
        if worker is None or isinstance(error, DrainingError):
            return
        now = time.monotonic()
        if isinstance(error, OverloadedError):
            wait_seconds = min(error.retry_after_seconds or MIN_RETRY_AFTER_SECONDS, MAX_RETRY_AFTER_SECONDS)
            breaker = worker.breaker.after_full(now, wait_seconds)
        elif isinstance(error, InvalidRequestError | StepFailedError):
            breaker = worker.breaker.after_success()
        else:
            breaker = worker.breaker.after_failure(now)
        self._set_breaker(worker, breaker)

    def _holder(self, reservation: Reservation) -> _Worker | None:
        """The worker of a reservation; None where it was lost since, which has been counted once for all of them."""
        worker = self._worker_of(reservation.connection)
        return worker if worker is not None and worker.num_losses == reservation.num_losses else None

    def _worker_of(self, connection: WorkerConnection) -> _Worker | None:
        """None where discovery has dropped it, even if its address is back as another one."""
        worker = self._worker_by_url.get(connection.url)
        return worker if worker is not None and worker.connection is connection else None

    def _set_breaker(self, worker: _Worker, breaker: Breaker) -> None:
        if breaker != worker.breaker:
            worker.breaker = breaker
            self._tell_change()

    def _seconds_to_change(self, now: float) -> float:
        """Until time alone may make another worker usable; 0 where only news can."""
        waits = (worker.breaker.blocked_until(now) - now for worker in self._worker_by_url.values())
        return min((wait for wait in waits if wait > 0), default=0.0)

    def _set_urls(self, urls: frozenset[str], tasks: asyncio.TaskGroup) -> None:
        for url, worker in tuple(self._worker_by_url.items()):
            worker.is_listed = url in urls
            self._drop_if_done(worker)
        for url in urls - self._worker_by_url.keys():
            connection = WorkerConnection(url, settings=self._settings, listener=self)
            worker = self._worker_by_url[url] = _Worker(connection)
            worker.task = tasks.create_task(connection.run())
        self._tell_change()

    def _drop_if_done(self, worker: _Worker) -> None:
        if worker.is_listed or worker.held or worker.task is None:
            return
        self._worker_by_url.pop(worker.connection.url, None)
        worker.task.cancel()
        _logger.info("worker left", extra={"worker": worker.connection.url})

    def _tell_change(self) -> None:
        """Wakes all that wait for a worker, and shows the new numbers."""
        self._changed.set()
        self._changed = asyncio.Event()
        now = time.monotonic()
        for worker in self._worker_by_url.values():
            worker.was_usable = worker.is_usable(now)
        models = set(self.models())
        for model in models:
            self._metrics.usable_workers.labels(model).set(self._num_usable(model))
        for model in self._models_shown - models:
            self._metrics.usable_workers.remove(model)
        self._models_shown = models

    def _num_usable(self, model: str) -> int:
        now, workers = time.monotonic(), self._worker_by_url.values()
        return sum(
            worker.card is not None and worker.card.model == model and worker.is_usable(now) for worker in workers
        )
