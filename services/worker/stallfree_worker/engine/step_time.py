"""How long a step takes, learned while serving: `base_seconds + seconds_per_token * tokens in the step`.

Pure: no clock. The engine feeds it one observation per step; routers get its coefficients.
"""

from __future__ import annotations

from stallfree_shared.worker_status import StepTimeCoefficients

_FORGETTING = 0.99
"""Weight that an observation keeps with every later one: a memory of about 100 steps."""
_PRIOR = StepTimeCoefficients(base_seconds=0.02, seconds_per_token=0.0002)
_PRIOR_SPREAD_TOKENS = 64.0
"""The prior's slope counts as much as one step that is this far from the first one."""
_MIN_SPREAD_TOKENS = 4.0
"""Steps that differ by less than this say nothing about the cost of a token; their noise would."""
_MAX_ERROR_RATIO = 4.0
"""An error beyond this many usual errors is an outlier: it pulls no more than one at the limit."""
_LEAST_USUAL_ERROR_RATIO = 0.05
_ERROR_SMOOTHING = 0.05
_LEAST_SECONDS_PER_TOKEN = 1e-9


class StepTimeModel:
    """Least squares over exponentially forgotten steps, kept as weighted means and co-moments.

    This is recursive least squares with a forgetting factor, in a form that stays exact when all steps are alike for a
    long time. Both coefficients are never negative. Before the first observation it predicts from a prior; the first
    one sets the level, and the prior's ratio of base to slope fades as steps of other sizes are seen.
    """

    def __init__(self) -> None:
        self._base_seconds = _PRIOR.base_seconds
        self._seconds_per_token = _PRIOR.seconds_per_token
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_seconds = 0.0
        self._variation = 0.0  # weighted sum of (tokens - mean)²
        self._covariation = 0.0  # weighted sum of (tokens - mean) * (seconds - mean)
        self._usual_error_seconds = 0.0
        self._error_ratio = 0.0

    @property
    def coefficients(self) -> StepTimeCoefficients:
        return StepTimeCoefficients(base_seconds=self._base_seconds, seconds_per_token=self._seconds_per_token)

    @property
    def error_ratio(self) -> float:
        """|predicted - real| / real of the last steps, a running mean; 0 before there are two observations."""
        return self._error_ratio

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step of `num_tokens` tokens takes."""
        return self._base_seconds + self._seconds_per_token * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step of `num_tokens` tokens that took `seconds`. A step without a duration is ignored."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if self._weight == 0.0:
            self._start(num_tokens, seconds)
            return
        error = seconds - self.predict(num_tokens)
        weight = self._weight_of(error)
        self._note_error(abs(error), seconds)
        self._add(num_tokens, seconds, weight)
        self._fit()

    def _start(self, num_tokens: int, seconds: float) -> None:
        scale = seconds / self.predict(num_tokens)
        self._base_seconds *= scale
        self._seconds_per_token *= scale
        self._weight = 1.0
        self._mean_tokens = float(num_tokens)
        self._mean_seconds = seconds
        self._variation = _PRIOR_SPREAD_TOKENS**2
        self._covariation = self._seconds_per_token * self._variation
        self._usual_error_seconds = seconds

    def _weight_of(self, error: float) -> float:
        limit = _MAX_ERROR_RATIO * self._usual_error_seconds
        return 1.0 if abs(error) <= limit else limit / abs(error)

    def _note_error(self, error: float, seconds: float) -> None:
        self._error_ratio += _ERROR_SMOOTHING * (error / seconds - self._error_ratio)
        # An outlier counts for no more than the limit, so a lasting change of speed is believed after a few steps.
        capped = min(error, _MAX_ERROR_RATIO * self._usual_error_seconds)
        usual = self._usual_error_seconds + _ERROR_SMOOTHING * (capped - self._usual_error_seconds)
        self._usual_error_seconds = max(usual, _LEAST_USUAL_ERROR_RATIO * self._mean_seconds)

    def _add(self, num_tokens: int, seconds: float, weight: float) -> None:
        kept = self._weight * _FORGETTING
        self._weight = kept + weight
        gain = weight / self._weight
        from_mean_tokens = num_tokens - self._mean_tokens
        from_mean_seconds = seconds - self._mean_seconds
        self._mean_tokens += gain * from_mean_tokens
        self._mean_seconds += gain * from_mean_seconds
        self._variation = _FORGETTING * self._variation + kept * gain * from_mean_tokens**2
        self._covariation = _FORGETTING * self._covariation + kept * gain * from_mean_tokens * from_mean_seconds

    def _fit(self) -> None:
        if self._variation >= self._weight * _MIN_SPREAD_TOKENS**2:
            self._seconds_per_token = max(_LEAST_SECONDS_PER_TOKEN, self._covariation / self._variation)
        base = self._mean_seconds - self._seconds_per_token * self._mean_tokens
        if base < 0:
            base, self._seconds_per_token = 0.0, self._mean_seconds / self._mean_tokens
        self._base_seconds = base
