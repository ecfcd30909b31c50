"""How many prefill tokens may join a step. A `TokenBudget` is asked once per step for a `StepBudget`, and that one for
every chunk while the batch is composed. No clock: the instant is passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from stallfree_worker.settings import SchedulerSettings

_TYPICAL_GAIN = 0.1
BUDGET_QUANTILE = 0.98
"""Of the predicted step time: this share of the steps fits a budget in seconds."""
_SMALLEST_CHUNK_TOKENS = 128
"""Of the table by position, at the end of a long prompt; less where steps are smaller."""
MIN_CHUNK_TOKENS = 16
"""Prefill tokens that every step may carry, however late its decodes are: a prefill always moves."""


class StepBudget(Protocol):
    @property
    def limit_seconds(self) -> float | None:
        """What the step may take; None where the budget does not reckon in seconds."""
        ...

    @property
    def limit_tokens(self) -> int | None:
        """What the step may hold, decodes included; None where that is no one number."""
        ...

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int, needs_logits: bool = False) -> int:
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

    def note_limited(self, num_tokens: int) -> None:
        """A step was planned with `num_tokens` tokens, and prefills wanted more of it."""
        ...


class FixedTokenBudget:
    """The same number of tokens for every step: τ of Sarathi-Serve (arXiv 2403.02310, §4.3). Decodes count."""

    limit_seconds = None

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    @property
    def limit_tokens(self) -> int:
        return self._max_tokens

    @property
    def typical_tokens(self) -> int:
        return self._max_tokens

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        del token_deadlines, now
        return self

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int, needs_logits: bool = False) -> int:
        del context_tokens, needs_logits
        # Decodes go whether the budget holds them or not, so a step may be beyond it already.
        return max(0, min(most, self._max_tokens - shape.num_tokens))

    def note_limited(self, num_tokens: int) -> None:
        """Nothing is learned from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """Chunk sizes by position in the prompt: large ones first, shrinking as the context that they read grows."""

    largest_tokens: int = 2048
    smallest_tokens: int = _SMALLEST_CHUNK_TOKENS
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

    limit_seconds = None
    limit_tokens = None

    def __init__(self, table: PositionTable) -> None:
        self._table = table

    @property
    def typical_tokens(self) -> int:
        return self._table.largest_tokens

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        del token_deadlines, now
        return self

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int, needs_logits: bool = False) -> int:
        del needs_logits
        return max(0, min(most, self._table.size(context_tokens) - shape.num_tokens))

    def note_limited(self, num_tokens: int) -> None:
        """Nothing is learned from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """What a budget by TBT target keeps to besides the target."""

    max_step_seconds: float
    """Of a step without decodes: a new short prompt and a cancel must not wait behind one giant step."""
    max_step_tokens: int
    """What memory was sized for."""
    quantile: float = BUDGET_QUANTILE
    margin_seconds: float = 0.002
    margin_ratio: float = 0.06
    """The larger of the two is left for what comes after the step: frames, the router, the way to the client, all of
    which may have to wait for a core."""
    first_margin_ratio: float = 0.2
    """In place of `margin_ratio` for the first step that a prefill joins: it shares the cores with all that the arrival
    of a long prompt sets off, and is predicted from steps without one."""
    tile_tokens: int = 16
    """A step's tokens are a multiple of this where there is a choice: matrix products come in tiles."""


class TargetTokenBudget:
    """As many prefill tokens as the step can carry so that, by the learned step time, every running decode has its next
    token in time. Nothing decodes: large steps, bounded in seconds. Nobody has to choose a number."""

    def __init__(self, step_time: StepTimeModel, limits: TargetLimits) -> None:
        self._step_time = step_time
        self._limits = limits
        self._typical_tokens: float | None = None
        self._was_limited = False
        """Whether prefills wanted more of the step before."""

    @property
    def typical_tokens(self) -> int:
        """A running mean over the steps that the target limited."""
        return self._limits.max_step_tokens if self._typical_tokens is None else round(self._typical_tokens)

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        limits = self._limits
        seconds = limits.max_step_seconds
        if token_deadlines:
            seconds = min(token_deadlines) - now
            margin_ratio = limits.margin_ratio if self._was_limited else limits.first_margin_ratio
            seconds -= max(limits.margin_seconds, margin_ratio * seconds)
        self._was_limited = False
        return _SecondsBudget(self._step_time, limits, seconds)

    def note_limited(self, num_tokens: int) -> None:
        self._was_limited = True
        before = num_tokens if self._typical_tokens is None else self._typical_tokens
        self._typical_tokens = before + _TYPICAL_GAIN * (num_tokens - before)


class _SecondsBudget:
    """A budget in seconds, for one step."""

    limit_tokens = None

    def __init__(self, step_time: StepTimeModel, limits: TargetLimits, seconds: float) -> None:
        self._step_time = step_time
        self._limits = limits
        self.limit_seconds = seconds

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int, needs_logits: bool = False) -> int:
        most = max(0, min(most, self._limits.max_step_tokens - shape.num_tokens))
        fitting = self._most_that_fit(shape, context_tokens, most, needs_logits)
        floor = min(most, MIN_CHUNK_TOKENS - shape.num_prefill_tokens)
        return max(fitting, floor, 0)

    def _most_that_fit(self, shape: StepShape, context_tokens: int, most: int, needs_logits: bool) -> int:
        """All of them, or what fills whole tiles: by bisection, for the predicted time never falls with more tokens."""
        if most == 0 or self._fits(shape.with_chunk(most, context_tokens, is_last=True, needs_logits=needs_logits)):
            return most
        tile = self._limits.tile_tokens
        begun = shape.num_tokens % tile
        low, high = 0, -(-(most + begun) // tile)  # `low` tiles fit or are none, `high` are too many
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(shape.with_chunk(middle * tile - begun, context_tokens, is_last=False)):
                low = middle
            else:
                high = middle
        return max(0, low * tile - begun)

    def _fits(self, shape: StepShape) -> bool:
        return self._step_time.predict(shape, quantile=self._limits.quantile) <= self.limit_seconds


def make_token_budget(settings: SchedulerSettings, step_time: StepTimeModel) -> TokenBudget:
    """What the setting `token_budget` names."""
    match settings.token_budget:
        case "auto":
            limits = TargetLimits(
                max_step_seconds=settings.max_step_seconds, max_step_tokens=settings.max_num_batched_tokens
            )
            return TargetTokenBudget(step_time, limits)
        case "by-position":
            largest_tokens = settings.max_num_batched_tokens
            smallest_tokens = min(_SMALLEST_CHUNK_TOKENS, largest_tokens)
            return PositionTokenBudget(PositionTable(largest_tokens=largest_tokens, smallest_tokens=smallest_tokens))
        case max_tokens:
            return FixedTokenBudget(max_tokens)
