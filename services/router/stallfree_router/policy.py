"""Which worker gets a request. PURE: filter → score → pick over views; randomness is passed in, time is in the views.

Score = seconds until the request's last token there, plus seconds by which it delays those that are there already
(`stallfree_shared.load`). The pick is the better of two random ones among the best few, not the global minimum:
numbers are a little stale and other routers see the same ones (Mitzenmacher, "The Power of Two Choices"; C07).
`workers` makes the views and calls this; nothing here knows of connections.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from stallfree_shared.errors import ContextLengthExceededError, OverloadedError, StallfreeError
from stallfree_shared.load import Work, delay_seconds
from stallfree_shared.worker_status import WorkerStatus

BEST_FEW = 3
MUCH_WORSE = 2.0
"""So many times the best score is too much for a worker that is preferred for what it has cached."""
SLOW_START_SECONDS = 10.0
MIN_WARMTH = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs of the worker that takes it."""

    model: str
    prompt_tokens: int
    max_tokens: int
    expected_output_tokens: float
    prompt_is_at: str | None = None
    """URL of a worker that reads the same prompt for another answer of the call: it will be in its prefix cache."""

    @property
    def work(self) -> Work:
        return Work(prefill_tokens=self.prompt_tokens, output_tokens=self.expected_output_tokens)

    def work_at(self, url: str) -> Work:
        """What is left to do there."""
        return replace(self.work, prefill_tokens=1) if url == self.prompt_is_at else self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the policy sees of one worker at one instant."""

    url: str
    model: str
    max_model_len: int
    status: WorkerStatus
    """With the requests added that this router has sent and the worker's own snapshot does not hold yet."""
    is_allowed: bool
    """The breaker lets a request through."""
    is_full: bool
    """The worker has asked for no more requests for now."""
    age_seconds: float
    """Since it became usable."""


def pick(
    views: Sequence[WorkerView], demand: Demand, *, tried: AbstractSet[str], rng: random.Random
) -> WorkerView | None:
    """The worker for `demand`, or None where no worker can take it now. One of `tried` only where no other is left. The
    one that has the prompt already, unless it is much worse than the best: a prompt that is read twice is work for
    nothing."""
    able = [view for view in views if is_usable(view, demand.model) and _fits(view, demand) and not view.is_full]
    fresh = [view for view in able if view.url not in tried]
    warm = _warm(fresh or able, rng)
    if not warm:
        return None
    rng.shuffle(warm)  # before a stable sort: equal scores are in random order
    scored = sorted(
        (delay_seconds(view.status, demand.work_at(view.url)), place, view) for place, view in enumerate(warm)
    )
    for score, _, view in scored:
        if view.url == demand.prompt_is_at and score <= MUCH_WORSE * scored[0][0]:
            return view
    best = scored[:BEST_FEW]
    return min(rng.sample(best, min(2, len(best))))[2]


def refusal(views: Sequence[WorkerView], demand: Demand, *, retry_after_seconds: float) -> StallfreeError | None:
    """Why waiting for a worker would be in vain, or None where one may come free. One that is only not usable just now
    may still be the one that a long request fits."""
    known = [view for view in views if view.model == demand.model]
    fitting = [view for view in known if _fits(view, demand) and is_usable(view, demand.model)]
    if known and not any(_fits(view, demand) for view in known):
        limit = max(view.max_model_len for view in known)
        return ContextLengthExceededError(
            f"This model's maximum context length is {limit} tokens; the prompt has {demand.prompt_tokens} tokens and "
            f"max_tokens is {demand.max_tokens}, together {demand.prompt_tokens + demand.max_tokens}."
        )
    if fitting and all(view.is_full for view in fitting):
        return OverloadedError("every worker of this model is full", retry_after_seconds=retry_after_seconds)
    return None


def is_usable(view: WorkerView, model: str) -> bool:
    """Whether the worker serves `model` and takes requests, whatever their size."""
    return view.model == model and view.status.is_ready and not view.status.is_draining and view.is_allowed


def _fits(view: WorkerView, demand: Demand) -> bool:
    return demand.prompt_tokens + demand.max_tokens <= view.max_model_len


def _warm(views: Sequence[WorkerView], rng: random.Random) -> list[WorkerView]:
    """Slow start: a worker that has just come joins with a probability that grows with its age, measured against the
    oldest one, so that it is not handed everything at once while its caches are cold (C10)."""
    warmth = [min(1.0, max(MIN_WARMTH, view.age_seconds / SLOW_START_SECONDS)) for view in views]
    warmest = max(warmth, default=1.0)
    return [view for view, value in zip(views, warmth, strict=True) if rng.random() * warmest <= value]
