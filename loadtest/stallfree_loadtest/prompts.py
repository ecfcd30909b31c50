"""Prompts of random token ids, fresh for every draw: lengths are exact, and no cached prefix helps.

Used by the open loop and the experiments.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_NORMAL_P90 = 1.2815515655446004
"""The 90 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token ids are drawn from `low <= id < high`."""

    low: int = 1000
    high: int = 8000

    def draw(self, random_numbers: random.Random, num_tokens: int) -> tuple[int, ...]:
        return tuple(random_numbers.choices(range(self.low, self.high), k=num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTail:
    """Lengths as real ones are spread, most short and a few very long: log-normal, given by median and P90."""

    median: int
    p90: int
    most: int
    """Longer draws are cut to it."""

    def draw(self, random_numbers: random.Random) -> int:
        sigma = math.log(self.p90 / self.median) / _NORMAL_P90
        length = round(random_numbers.lognormvariate(math.log(self.median), sigma))
        return min(max(1, length), self.most)
