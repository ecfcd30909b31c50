"""How long will the answer be? Learned from the answers so far, one predictor a router, in memory.

Lengths are kept as decayed histograms over log-spaced bins, keyed by (model, max_tokens bucket), and all of a model
together. A generation that ended by itself is a sample of the length; one that was cut (by max_tokens, or by its
client) only says that the length is above that point: it is censored. The Kaplan-Meier estimate of the survival curve
S uses both without bias, and the expectation under a cap is the area below it:

    E[min(L, cap) - g | L > g]  =  (integral of S from g to cap) / S(g)

Few samples lean on the model's curve, and none at all on a fixed share of max_tokens. `dispatch` asks at admission and
tells the end.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from stallfree_router.metrics import RouterMetrics

MAX_KEYS = 1024
DECAY = 0.998
"""Weight that a sample keeps with each later one: half after about 350."""
PRIOR_SAMPLES = 8.0
"""Samples that a broader estimate counts as."""
PRIOR_SHARE = 0.25
PRIOR_MAX_TOKENS = 512.0

_EDGES: Final = (0, *sorted({round(2 ** (quarter / 4)) for quarter in range(85)}))
"""Bin i holds lengths in (_EDGES[i], _EDGES[i + 1]]; up to 2**21 tokens, then one open bin."""


class LengthHistogram:
    """Decayed counts of lengths, ended and censored, and the survival curve that they give."""

    def __init__(self) -> None:
        self._ended = [0.0] * len(_EDGES)
        self._censored = [0.0] * len(_EDGES)
        self.num_samples = 0.0
        """Decayed, so it stays below 1 / (1 - DECAY)."""

    def add(self, num_tokens: int, *, is_censored: bool) -> None:
        self._ended = [count * DECAY for count in self._ended]
        self._censored = [count * DECAY for count in self._censored]
        self.num_samples = self.num_samples * DECAY + 1.0
        place = max(0, bisect.bisect_left(_EDGES, num_tokens) - 1)
        (self._censored if is_censored else self._ended)[place] += 1.0

    def expected_tokens_left(self, cap: int, *, generated: int = 0) -> float:
        """E[min(L, cap) - generated | L > generated]; 0 where `generated` has reached the cap."""
        if generated >= cap:
            return 0.0
        area = at_generated = 0.0
        for low, high, before, after in self._survival():
            if high <= generated:
                continue
            if low >= cap:
                break
            first, last = max(low, generated), min(high, cap)
            at_first = _between(low, high, before, after, first)
            at_last = _between(low, high, before, after, last)
            at_generated = at_generated or at_first
            area += (last - first) * (at_first + at_last) / 2
        return area / at_generated if at_generated > 0 else 1.0

    def _survival(self) -> Iterator[tuple[int, int, float, float]]:
        """(low, high, S(low), S(high)) of each bin. Those censored in a bin were at risk through all of it."""
        at_risk, survival = self.num_samples, 1.0
        for place, low in enumerate(_EDGES):
            high = _EDGES[place + 1] if place + 1 < len(_EDGES) else 2 * low
            after = survival * max(0.0, 1 - self._ended[place] / at_risk) if at_risk > 1e-9 else survival
            yield low, high, survival, after
            survival = after
            at_risk -= self._ended[place] + self._censored[place]


class Predictor:
    """Owns the length statistics of this router, at most `MAX_KEYS` histograms; the least recently used goes first."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._histogram_by_key: OrderedDict[tuple[str, int | None], LengthHistogram] = OrderedDict()

    def expected_output_tokens(self, model: str, max_tokens: int, *, generated: int = 0) -> float:
        """Tokens still expected of a generation that may have `max_tokens` and has `generated` of them."""
        left = max_tokens - generated
        expected = min(PRIOR_SHARE * left, PRIOR_MAX_TOKENS)
        for key in ((model, None), (model, max_tokens.bit_length())):
            histogram = self._histogram_by_key.get(key)
            if histogram is not None:
                own = histogram.expected_tokens_left(max_tokens, generated=generated)
                weight = histogram.num_samples / (histogram.num_samples + PRIOR_SAMPLES)
                expected = weight * own + (1 - weight) * expected
        return min(float(left), max(1.0, expected)) if left > 0 else 0.0

    def learn(self, model: str, max_tokens: int, *, num_tokens: int, predicted: float, ended_by_itself: bool) -> None:
        """Takes in one end. The error of the prediction is measured only where the real length is known."""
        for key in ((model, None), (model, max_tokens.bit_length())):
            self._histogram(key).add(num_tokens, is_censored=not ended_by_itself)
        if ended_by_itself and num_tokens > 0:
            error = abs(predicted - num_tokens) / num_tokens
            self._metrics.predicted_output_tokens_error.labels(model).observe(error)

    def _histogram(self, key: tuple[str, int | None]) -> LengthHistogram:
        histogram = self._histogram_by_key.setdefault(key, LengthHistogram())
        self._histogram_by_key.move_to_end(key)
        if len(self._histogram_by_key) > MAX_KEYS:
            self._histogram_by_key.popitem(last=False)
        return histogram


def _between(low: int, high: int, before: float, after: float, at: int) -> float:
    return before + (after - before) * (at - low) / (high - low)
