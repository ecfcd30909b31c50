"""What a batching rule is: the order in which requests are given to a step. The scheduler asks it once per step."""

from __future__ import annotations

from typing import Protocol

from stallfree_worker.engine.batching.batch import Batch


class BatchingRule(Protocol):
    @property
    def is_by_arrival(self) -> bool:
        """Whether requests are served in order of arrival (`order.ArrivalOrder`), rather than by urgency."""
        ...

    @property
    def takes_whole_prompts(self) -> bool:
        """Whether a prefill is always one chunk, so that a window and a whole prompt must fit memory at once."""
        ...

    def compose(self, batch: Batch) -> None:
        """Fills `batch`. If any request runs or waits, at least one token must be in it afterwards."""
        ...
