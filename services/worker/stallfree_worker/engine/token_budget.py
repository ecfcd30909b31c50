"""How many prefill tokens may join a step. A `TokenBudget` is asked once per step for a `StepBudget`, and that one for
every chunk while the batch is composed. No clock: the instant is passed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from stallfree_worker.settings import SchedulerSettings

_TYPICAL_GAIN = 0.1
MIN_CHUNK_TOKENS = 16
"""Prefill tokens that every step may carry, however late its decodes are: a prefill always moves."""


class StepBudget(Protocol):
    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int) -> int:
        """Tokens of a chunk that may join a step of `shape`: 0 to `most`. `context_tokens` of its request are computed
        already, and `most` are left."""
        ...


class TokenBudget(Protocol):
    @property
    def typical_tokens(self) -> int:
        """What a step holds now where prefills are waiting: routers reckon with it."""
        ...

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        """The budget of the step that begins at `now`. `token_deadlines` are the instants at which the running decodes'
        next tokens are due by their TBT targets."""
        ...


class FixedTokenBudget:
    """The same number of tokens for every step: τ of Sarathi-Serve (arXiv 2403.02310, §4.3). Decodes count."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    @property
    def typical_tokens(self) -> int:
        return self._max_tokens

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        del token_deadlines, now
        return self

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int) -> int:
        del context_tokens
        # Decodes go whether the budget holds them or not, so a step may be beyond it already.
        return max(0, min(most, self._max_tokens - shape.num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """Chunk sizes by position in the prompt: large ones first, shrinking as the context that they read grows."""

    largest_tokens: int = 2048
    smallest_tokens: int = 128
    num_stages: int = 16
    tokens_per_stage: int = 8192
    """Prompt tokens that share a size; positions beyond the last stage have the smallest."""

    def size(self, position: int) -> int:
        stage = min(position // self.tokens_per_stage, self.num_stages - 1)
        step = (self.largest_tokens - self.smallest_tokens) / max(1, self.num_stages - 1)
        return math.floor(self.largest_tokens - stage * step)


class PositionTokenBudget:
    """The dynamic chunks of Sarathi-Serve's artifact: a table over the prompt's position in place of one number. It
    makes up for attention that costs more along the prompt, and knows nothing of the load."""

    def __init__(self, table: PositionTable) -> None:
        self._table = table

    @property
    def typical_tokens(self) -> int:
        return self._table.largest_tokens

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        del token_deadlines, now
        return self

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int) -> int:
        return max(0, min(most, self._table.size(context_tokens) - shape.num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """What a budget by TBT target keeps to besides the target."""

    max_step_seconds: float
    """Of a step without decodes: a new short prompt and a cancel must not wait behind one giant step."""
    max_step_tokens: int
    """What memory was sized for."""
    quantile: float = 0.95
    """Of the predicted step time: this share of steps shall fit."""
    margin_seconds: float = 0.002
    """For what comes after the step: sampling, frames, the way to the client."""
    tile_tokens: int = 16
    """A step's tokens are a multiple of this where there is a choice: matrix products come in tiles."""


class TargetTokenBudget:
    """As many prefill tokens as the step can carry so that, by the learned step time, every running decode has its next
    token in time. Nothing decodes: large steps, bounded in seconds. Nobody has to choose a number."""

    def __init__(self, step_time: StepTimeModel, limits: TargetLimits) -> None:
        self._step_time = step_time
        self._limits = limits
        self._typical_tokens: float | None = None

    @property
    def typical_tokens(self) -> int:
        """A running mean over the steps that the target limited."""
        return self._limits.max_step_tokens if self._typical_tokens is None else round(self._typical_tokens)

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        limits = self._limits
        seconds = min(token_deadlines) - now - limits.margin_seconds if token_deadlines else limits.max_step_seconds
        return _SecondsBudget(self._step_time, limits, min(seconds, limits.max_step_seconds), self._note_limited)

    def _note_limited(self, num_tokens: int) -> None:
        before = num_tokens if self._typical_tokens is None else self._typical_tokens
        self._typical_tokens = before + _TYPICAL_GAIN * (num_tokens - before)


class _SecondsBudget:
    """A budget in seconds, for one step."""

    def __init__(
        self, step_time: StepTimeModel, limits: TargetLimits, seconds: float, note_limited: Callable[[int], None]
    ) -> None:
        self._step_time = step_time
        self._limits = limits
        self._seconds = seconds
        self._note_limited = note_limited

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int) -> int:
        most = max(0, min(most, self._limits.max_step_tokens - shape.num_tokens))
        fitting = self._most_that_fit(shape, context_tokens, most)
        if fitting < most:
            fitting -= (shape.num_tokens + fitting) % self._limits.tile_tokens
        floor = min(most, MIN_CHUNK_TOKENS - shape.num_prefill_tokens)
        chosen = max(fitting, floor, 0)
        if chosen < most:
            self._note_limited(shape.num_tokens + chosen)
        return chosen

    def _most_that_fit(self, shape: StepShape, context_tokens: int, most: int) -> int:
        """By bisection: the predicted time never falls with more tokens."""
        if most == 0 or self._fits(shape, context_tokens, most, is_last=True):
            return most
        low, high = 0, most  # `low` fits or is 0, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(shape, context_tokens, middle, is_last=False):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, shape: StepShape, context_tokens: int, num_tokens: int, *, is_last: bool) -> bool:
        with_chunk = shape.with_chunk(num_tokens, context_tokens, is_last=is_last)
        return self._step_time.predict(with_chunk, quantile=self._limits.quantile) <= self._seconds


def make_token_budget(settings: SchedulerSettings, step_time: StepTimeModel) -> TokenBudget:
    """What the setting `token_budget` names."""
    match settings.token_budget:
        case "auto":
            limits = TargetLimits(
                max_step_seconds=settings.max_step_seconds, max_step_tokens=settings.max_num_batched_tokens
            )
            return TargetTokenBudget(step_time, limits)
        case "by-position":
            return PositionTokenBudget(PositionTable(largest_tokens=settings.max_num_batched_tokens))
        case max_tokens:
            return FixedTokenBudget(max_tokens)
