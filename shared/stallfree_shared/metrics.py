"""Metric names, labels and buckets that both services use. Names are an interface: dashboards, alerts and the HPA
read them. TBT is observed once per token, never per chunk or event; TTFT from arrival, queueing included."""

from __future__ import annotations

_RENARD_10 = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
_RENARD_20 = (
    1.0,
    1.12,
    1.25,
    1.4,
    1.6,
    1.8,
    2.0,
    2.24,
    2.5,
    2.8,
    3.15,
    3.55,
    4.0,
    4.5,
    5.0,
    5.6,
    6.3,
    7.1,
    8.0,
    9.0,
)


def _series(steps: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
    """Preferred numbers from `low` to `high`, both included: neighbours differ by a constant ratio."""
    values = (round(step * 10.0**decade, 6) for decade in range(-4, 4) for step in steps)
    return tuple(value for value in values if low <= value <= high)


TIME_TO_FIRST_TOKEN_BUCKETS_SECONDS = _series(_RENARD_10, 0.005, 630.0)
TIME_BETWEEN_TOKENS_BUCKETS_SECONDS = (
    0.001, 0.002, 0.0035, *_series(_RENARD_20, 0.005, 0.25), *_series(_RENARD_10, 0.315, 40.0),
)  # fmt: skip
STALL_BUCKETS_SECONDS = _series(_RENARD_10, 0.001, 40.0)
REQUEST_BUCKETS_SECONDS = _series(_RENARD_10, 0.01, 2500.0)
SHORT_BUCKETS_SECONDS = _series(_RENARD_10, 0.0001, 5.0)
QUEUE_BUCKETS_SECONDS = _series(_RENARD_10, 0.001, 63.0)
STEP_BUCKETS_SECONDS = TIME_BETWEEN_TOKENS_BUCKETS_SECONDS

ROUTER_PREFIX = "stallfree_router"
WORKER_PREFIX = "stallfree_worker"
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def stall_seconds(gap_seconds: float, target_seconds: float) -> float:
    """The part of a gap between two tokens that lies beyond the TBT target."""
    return max(0.0, gap_seconds - target_seconds)
