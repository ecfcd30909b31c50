"""How long a step takes, learned while serving from what drives it.

Pure: no clock, no torch. The engine feeds it one observation per step; the token budget asks it before each step, and
routers get its two-number summary.

    seconds = speed * (base + Σ slope_k * max(0, tokens - knot_k) + row * rows + context * decode context
                       + attention * prefill attention + request * requests
                       + [logits are needed] * (whole + whole row * rows)),   all coefficients ≥ 0

Rising slopes at growing knots let the cost of a token grow with the step: first weights are read anyway and a token is
nearly free (the memory-bound floor), then arithmetic decides (the knee). All coefficients are non-negative, so the
model is monotone in each driver, and a budget can be found by bisection.

Two time scales. The shape (the coefficients) is fitted by non-negative least squares over a window that keeps a share
for rare shapes, so that thousands of small decode steps do not drown the chunks. The speed is a running ratio of real
to predicted time with a half-life of a few steps: it follows a core that is taken away or a noisy neighbour. Ratios of
the last steps give the quantiles, those of steps with prefill tokens and those of pure decodes apart: a hundred short
steps say little about how far a long one may be off. A single outlier moves neither by more than a cap.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_KNOT_TOKENS = (0, 16, 64, 256)
_NUM_FEATURES = 1 + len(_KNOT_TOKENS) + 6
_BUCKET_SIZE = 48
"""Steps of one class that the window keeps: of one size, with logits or without."""
_DECODES_PER_KEPT = 4
"""Where a class is full, one of so many steps of decodes alone is kept: they are many, and alike."""
_STEPS_PER_FIT = 32
_EAGER_STEPS = 64
"""While there are fewer, every step is followed by a fit."""
_SPEED_GAIN = 0.2
"""Weight of the last step in the speed: a half-life of three steps."""
_FEW_STEPS = 4
"""A class with fewer steps has no usual time yet that an outlier could be told from. With so many it is learned at
once."""
_LEAST_SECONDS = 1e-6
_MAX_RATIO = 3.0
"""A step beyond this many times its prediction, or below its part, counts as if it were there."""
_NUM_RATIOS = 128
_LEAST_QUANTILE_RATIO = 1.1
"""Any upper quantile is at least so many times the prediction: a few good steps say little about the next one."""
_MANY_RATIOS = 8
"""Enough of one kind of step for quantiles of its own."""
_ERROR_SMOOTHING = 0.05
_SHARE_SMOOTHING = 0.05
_RIDGE = 1e-9
_MOST_SWEEPS = 60
_LEAST_MOVE = 1e-5
"""How much a sweep changes: over its coefficients, the sum of the squares of the relative change that each makes to the
predictions of the window's steps. After less, the next sweeps change nothing that matters."""
_LINE_TOKENS = 512
_PRIOR_BASE_SECONDS = 0.02
_PRIOR_SECONDS_PER_TOKEN = 0.0002


class StepShape(NamedTuple):
    """What drives the time of a step, known before it runs."""

    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    """How far back layers look, and the share of the layers that do: what the model is, not what the step holds."""
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    """Those of `num_tokens` that are no decodes."""
    num_rows: int = 0
    """Chunks that draw a token, and prompt tokens that tell how likely the next one was: the output layer computes
    these rows only."""
    decode_context_tokens: float = 0.0
    """Sum of the contexts that the decodes read, the mean over all layers."""
    prefill_attention_tokens: float = 0.0
    """Pairs of query and key in the prefill chunks, the mean over all layers: without windows
    `chunk * (context before it + chunk / 2)`."""
    num_requests: int = 0
    needs_logits: bool = False
    """Whether a row is more than the likeliest token. Else the output layer may take a shorter way."""

    def with_decodes(self, contexts: Sequence[int], *, needs_logits: bool = False) -> StepShape:
        """With one more decode for each of `contexts`, whose lengths they are in tokens."""
        read = self.decode_context_tokens
        for window, share in self.windows:
            most = math.inf if window is None else window
            read += share * sum([context + 0.5 if context < most else most for context in contexts])
        return self._replace(
            num_tokens=self.num_tokens + len(contexts),
            num_rows=self.num_rows + len(contexts),
            decode_context_tokens=read,
            num_requests=self.num_requests + len(contexts),
            needs_logits=self.needs_logits or needs_logits,
        )

    def with_chunk(
        self, num_tokens: int, context_tokens: int, *, is_last: bool, needs_logits: bool = False
    ) -> StepShape:
        """With one more prefill chunk after `context_tokens` computed ones; the last one draws a token."""
        return self._replace(
            num_tokens=self.num_tokens + num_tokens,
            num_prefill_tokens=self.num_prefill_tokens + num_tokens,
            num_rows=self.num_rows + is_last,
            prefill_attention_tokens=self.prefill_attention_tokens + self._pairs(num_tokens, context_tokens),
            num_requests=self.num_requests + 1,
            needs_logits=self.needs_logits or (is_last and needs_logits),
        )

    def with_rows(self, num_rows: int) -> StepShape:
        """With more rows for the output layer to compute, whose logits are told of."""
        return self._replace(num_rows=self.num_rows + num_rows, needs_logits=self.needs_logits or num_rows > 0)

    def _pairs(self, num_tokens: int, context_tokens: int) -> float:
        """Pairs of query and key of `num_tokens` queries behind a context, the mean over all layers."""
        pairs = 0.0
        for window, share in self.windows:
            num_short = num_tokens if window is None else min(num_tokens, max(0, window - context_tokens))
            seen = num_short * (context_tokens + num_short / 2) + (num_tokens - num_short) * (window or 0)
            pairs += share * seen
        return pairs


class StepTimeLine(NamedTuple):
    """How long a step takes: `base_seconds + seconds_per_token * tokens in the step`."""

    base_seconds: float
    seconds_per_token: float


_Features = tuple[float, ...]


class StepTimeModel:
    """See the module. Before the first observation it predicts from a prior, whose level the first step sets."""

    def __init__(self, empty_step: StepShape | None = None) -> None:
        """`empty_step` tells the windows of the model, for the summary."""
        empty_step = empty_step or StepShape()
        self._one_decode = empty_step.with_decodes([0])
        self._one_prompt = empty_step.with_chunk(_LINE_TOKENS, 0, is_last=True)
        self._window: dict[tuple[int, bool], _StepClass] = {}
        self._moments = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]  # Σ w x xᵀ
        self._targets = [0.0] * _NUM_FEATURES  # Σ w x y
        self._coefficients = [_PRIOR_BASE_SECONDS, _PRIOR_SECONDS_PER_TOKEN, *[0.0] * (_NUM_FEATURES - 2)]
        self._num_observed = 0
        self._speed = 1.0
        self._ratios = {has_prefill: _Ratios() for has_prefill in (False, True)}
        self._error_ratio = 0.0
        self._share_with_logits = 0.0
        self._usual_seconds: dict[bool, tuple[float, float]] = {}
        """Since the last fit: see `_seconds_of_usual`."""
        self._last_shape = empty_step
        self._last_features = _features(empty_step)

    @property
    def error_ratio(self) -> float:
        """|predicted - real| / real of the last steps, a running mean; 0 before there are two observations."""
        return self._error_ratio

    @property
    def summary(self) -> StepTimeLine:
        """Through the predictions of one decode and of a prompt of 512 tokens, with logits where most steps have
        them now: what routers reckon with."""
        one, many = (self._speed * seconds for seconds in self._seconds_of_usual(self._share_with_logits > 0.5))
        slope = max((many - one) / (_LINE_TOKENS - 1), 1e-9)
        return StepTimeLine(base_seconds=max(0.0, one - slope), seconds_per_token=slope)

    def predict(self, shape: StepShape, *, quantile: float | None = None) -> float:
        """Seconds that a step of this shape takes: the expectation, or the given quantile (0 to 1) of it."""
        seconds = self._speed * self._shape_seconds(self._features_of(shape))
        return seconds if quantile is None else seconds * self.quantile_ratio(shape, quantile)

    def quantile_ratio(self, shape: StepShape, share: float) -> float:
        """How many times the expectation this quantile is. Always somewhat more than once: an expectation is never
        exact. With few steps of a kind, what holds for all kinds."""
        own = self._ratios[shape.num_prefill_tokens > 0]
        kinds = [own] if len(own) >= _MANY_RATIOS else self._ratios.values()
        return max(_LEAST_QUANTILE_RATIO, *[ratios.quantile(share) for ratios in kinds])

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from a step that took `seconds`. A step without a duration is ignored."""
        if shape.num_tokens <= 0 or seconds <= 0:
            return
        features = self._features_of(shape)
        kept = self._class_of(shape)
        is_known = len(kept) >= _FEW_STEPS
        if self._num_observed == 0:
            self._set_level(features, seconds)
        expected = self._shape_seconds(features)
        if is_known:  # a step of a new class may be predicted badly, and says nothing about the machine's speed
            self._note_ratio(shape, seconds / (self._speed * expected))
        self._num_observed += 1
        self._share_with_logits += _SHARE_SMOOTHING * (shape.needs_logits - self._share_with_logits)
        if kept.wants(shape):
            at_speed = seconds / self._speed
            if is_known:
                at_speed = min(max(at_speed, expected / _MAX_RATIO), expected * _MAX_RATIO)
            self._remember(kept, features, at_speed)
        is_newly_known = not is_known and len(kept) == _FEW_STEPS
        if self._num_observed <= _EAGER_STEPS or is_newly_known or self._num_observed % _STEPS_PER_FIT == 0:
            self._fit()

    def _class_of(self, shape: StepShape) -> _StepClass:
        key = shape.num_tokens.bit_length(), shape.needs_logits
        found = self._window.get(key)
        if found is None:
            found = self._window[key] = _StepClass()
        return found

    def _features_of(self, shape: StepShape) -> _Features:
        """A step is predicted and then observed, the same object both times."""
        if shape is not self._last_shape:
            self._last_shape, self._last_features = shape, _features(shape)
        return self._last_features

    def _set_level(self, features: _Features, seconds: float) -> None:
        """The prior's form, moved to the first step's level."""
        scale = seconds / self._shape_seconds(features)
        self._coefficients = [scale * value for value in self._coefficients]
        self._usual_seconds.clear()

    def _note_ratio(self, shape: StepShape, ratio: float) -> None:
        self._error_ratio += _ERROR_SMOOTHING * (abs(1 - 1 / ratio) - self._error_ratio)
        capped = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
        self._speed *= capped**_SPEED_GAIN
        self._ratios[shape.num_prefill_tokens > 0].add(capped)

    def _shape_seconds(self, features: _Features) -> float:
        """At the speed at which the shape was learned."""
        return max(_LEAST_SECONDS, math.fsum(map(operator.mul, self._coefficients, features)))

    def _seconds_of_usual(self, needs_logits: bool) -> tuple[float, float]:
        """Of one decode and of one prompt, like `_shape_seconds`."""
        found = self._usual_seconds.get(needs_logits)
        if found is None:
            shapes = [shape._replace(needs_logits=needs_logits) for shape in (self._one_decode, self._one_prompt)]
            one, many = (self._shape_seconds(_features(shape)) for shape in shapes)
            found = self._usual_seconds[needs_logits] = one, many
        return found

    def _remember(self, kept: _StepClass, features: _Features, seconds: float) -> None:
        """Puts a step into the window, in place of the oldest one of its class."""
        if len(kept) == _BUCKET_SIZE:
            self._add_moments(*kept.steps.popleft(), sign=-1.0)
        kept.steps.append((features, seconds))
        self._add_moments(features, seconds, sign=1.0)

    def _add_moments(self, features: _Features, seconds: float, *, sign: float) -> None:
        weight = sign / (seconds * seconds)  # errors count in proportion to the step
        given = [(place, value) for place, value in enumerate(features) if value]
        for place, value in given:
            row, scaled = self._moments[place], weight * value
            for column, other in given:
                row[column] += scaled * other
            self._targets[place] += scaled * seconds

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent, held near the present coefficients: what the window says
        nothing about stays as it is."""
        self._usual_seconds.clear()
        near = tuple(self._coefficients)
        for _ in range(_MOST_SWEEPS):
            move = 0.0
            for place, row in enumerate(self._moments):
                hold = _RIDGE + 1e-3 * row[place]
                present = self._coefficients[place]
                others = math.fsum(map(operator.mul, row, self._coefficients)) - row[place] * present
                best = max(0.0, (self._targets[place] - others + hold * near[place]) / (row[place] + hold))
                move += row[place] * (best - present) ** 2
                self._coefficients[place] = best
            if move < _LEAST_MOVE:
                return


class _StepClass:
    """What the window keeps of steps of one class."""

    def __init__(self) -> None:
        self.steps: deque[tuple[_Features, float]] = deque()
        self._num_decodes = 0
        """Steps of decodes alone, since it was full."""

    def __len__(self) -> int:
        return len(self.steps)

    def wants(self, shape: StepShape) -> bool:
        """Ask once a step."""
        if len(self.steps) < _BUCKET_SIZE or shape.num_prefill_tokens > 0:
            return True
        self._num_decodes += 1
        return self._num_decodes % _DECODES_PER_KEPT == 0


class _Ratios:
    """Real to predicted seconds of the last steps of one kind."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, ratio: float) -> None:
        if len(self._last) == _NUM_RATIOS:
            del self._sorted[bisect.bisect_left(self._sorted, self._last.popleft())]
        self._last.append(ratio)
        bisect.insort(self._sorted, ratio)

    def __len__(self) -> int:
        return len(self._last)

    def quantile(self, share: float) -> float:
        """0 where there is none."""
        place = min(len(self._sorted) - 1, math.ceil(share * len(self._sorted)))
        return self._sorted[place] if self._sorted else 0.0


def _features(shape: StepShape) -> _Features:
    """In units that make the coefficients alike in size: thousands of context, millions of pairs."""
    return (
        1.0,
        *(max(0.0, float(shape.num_tokens - knot)) for knot in _KNOT_TOKENS),
        float(shape.num_rows),
        shape.decode_context_tokens / 1e3,
        shape.prefill_attention_tokens / 1e6,
        float(shape.num_requests),
        float(shape.needs_logits),
        float(shape.num_rows) if shape.needs_logits else 0.0,
    )
