"""The same model served by differently configured workers, one cluster each, to be measured in turn.

A configuration is written `RULE`, `RULE:TOKENS`, `RULE:by-position`, `RULE:auto` or `RULE:auto@TARGET`, such as
`orca`, `sarathi:256` or `sarathi:auto@0.2`. Owns the clusters. Every run has a fresh one, so only one is there at a
time. With `keeps_warm` they stay for the next round: that saves their start, and takes the memory of all of them and
about a hundredth of a core each. Used by the experiments.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from stallfree_loadtest.client import Server
from stallfree_loadtest.cluster import ClusterSettings, LocalCluster
from stallfree_loadtest.pages import served_model, worker_totals

RULES = ("faster_transformer", "orca", "vllm", "chunked_only", "sarathi")
_POLL_SECONDS = 0.1
_IDLE_TIMEOUT_SECONDS = 120.0


class NotIdleError(Exception):
    """A worker has still something to do though every request has ended or left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a worker decides."""

    name: str
    """As it was written; what tables show."""
    rule: str
    budget: str | None = None
    """None for rules that know no token budget."""
    tbt_target_seconds: float | None = None
    """Set where the budget follows a target of its own."""

    @property
    def worker_args(self) -> tuple[str, ...]:
        """Its flags, but for the target."""
        budget = () if self.budget is None else (f"--token-budget={self.budget}",)
        return (f"--batching={self.rule}", *budget)


def configuration(text: str) -> Configuration:
    """`sarathi:auto@0.2` and the like; see the module.

    Raises:
        argparse.ArgumentTypeError: there is no such rule or budget.
    """
    rule, _, rest = text.partition(":")
    budget, has_target, target = rest.partition("@")
    if rule not in RULES:
        raise argparse.ArgumentTypeError(f"{rule!r} is none of {', '.join(RULES)}")
    if budget not in ("", "auto", "by-position") and not (budget.isdecimal() and int(budget) > 0):
        raise argparse.ArgumentTypeError(f"{budget!r} is no token budget: a number, by-position, or auto")
    if has_target and budget != "auto":
        raise argparse.ArgumentTypeError(f"{text!r}: only auto has a target")
    return Configuration(
        name=text, rule=rule, budget=budget or None, tbt_target_seconds=_target(target) if has_target else None
    )


def _target(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no TBT target in seconds")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A cluster that serves and has nothing to do."""

    server: Server
    worker_url: str
    max_model_len: int
    log_dir: Path


class Fleet:
    """`base` is what all configurations share. `tbt_target_seconds` holds for those without a target of their own."""

    def __init__(
        self,
        base: ClusterSettings,
        *,
        tbt_target_seconds: float,
        keeps_warm: bool = False,
        report: Callable[[str], None],
    ) -> None:
        self._base = base
        self._tbt_target_seconds = tbt_target_seconds
        self._keeps_warm = keeps_warm
        self._report = report
        self._running = AsyncExitStack()
        self._warm: dict[str, LocalCluster] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def serving(self, wanted: Configuration) -> AsyncIterator[Serving]:
        """A cluster of that configuration, idle.

        Raises:
            ClusterError: it could not be started.
            NotIdleError, PageError: it is not in a state to be measured.
        """
        if not self._keeps_warm:
            async with self._cluster(wanted) as cluster:
                yield await _idle(cluster)
            return
        if wanted.name not in self._warm:
            self._warm[wanted.name] = await self._running.enter_async_context(self._cluster(wanted))
        yield await _idle(self._warm[wanted.name])

    def _cluster(self, wanted: Configuration) -> LocalCluster:
        self._report(f"starting {wanted.name}")
        target = wanted.tbt_target_seconds or self._tbt_target_seconds
        own = (*wanted.worker_args, f"--tbt-target-seconds={target:g}")
        return LocalCluster(dataclasses.replace(self._base, worker_args=(*self._base.worker_args, *own)))


async def _idle(cluster: LocalCluster) -> Serving:
    worker_url, router_url = cluster.workers[0].url, cluster.router_urls[0]
    try:
        async with asyncio.timeout(_IDLE_TIMEOUT_SECONDS):
            while await _has_requests(worker_url):  # noqa: ASYNC110 - a worker tells nobody that it is idle
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise NotIdleError(f"the worker at {worker_url} is not idle after {_IDLE_TIMEOUT_SECONDS:g} s") from None
    model = await served_model(router_url)
    return Serving(
        server=Server(url=router_url, model=model.name),
        worker_url=worker_url,
        max_model_len=model.max_model_len,
        log_dir=cluster.log_dir,
    )


async def _has_requests(worker_url: str) -> bool:
    totals = await worker_totals(worker_url)
    return totals.get("requests_running", 0) + totals.get("requests_waiting", 0) > 0
