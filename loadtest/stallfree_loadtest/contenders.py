"""What experiments measure side by side: clusters of ours and other servers, each started for its turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from stallfree_loadtest.client import Server
from stallfree_loadtest.fleet import Configuration, Fleet


class Contender(Protocol):
    """A server that can be started to be measured."""

    @property
    def name(self) -> str: ...

    @property
    def configuration(self) -> Configuration | None:
        """How it is told to batch, where it is ours; None of other servers."""
        ...

    def serving(self) -> AbstractAsyncContextManager[Server]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster:
    """A router and a worker of ours."""

    name: str
    fleet: Fleet
    configuration: Configuration

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        async with self.fleet.serving(self.configuration) as serving:
            yield serving.server
