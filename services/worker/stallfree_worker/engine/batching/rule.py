"""What a batching rule is: the order in which requests are given to a step. The scheduler asks it once per step."""

from __future__ import annotations

from typing import Protocol

from stallfree_worker.engine.batching.batch import Batch


class BatchingRule(Protocol):
    def compose(self, batch: Batch) -> None:
        """Fills `batch`. If any request runs or waits, at least one token must be in it afterwards."""
        ...
