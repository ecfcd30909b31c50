"""The router's metrics, one registry an application. Names are an interface (README, Metrics)."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stallfree_shared import metrics as shared

Outcome = Literal["stop", "length", "abort", "error", "rejected"]
StallCause = Literal["worker", "router"]

_CALL = ("model", "tenant")
_ERROR_RATIO_BUCKETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)


class RouterMetrics:
    """Every series of this router. A label value is never free text from a client: an unknown model is "other"."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_call_series()
        self._make_token_series()
        self._make_dispatch_series()
        self._make_process_series()

    def _make_call_series(self) -> None:
        self.requests = self._counter(
            "requests_total",
            "Calls received, by how they ended. The sum over outcomes is all calls to the generation routes.",
            *_CALL,
            "outcome",
        )
        self.request_seconds = self._histogram(
            "request_seconds",
            "From a call's arrival to its end.",
            *_CALL,
            "outcome",
            buckets=shared.REQUEST_BUCKETS_SECONDS,
        )
        self.in_flight_requests = self._gauge("in_flight_requests", "Calls being served now.")

    def _make_token_series(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a call's arrival to its first output token, queueing included; one sample a generation with output.",
            *_CALL,
            buckets=shared.TIME_TO_FIRST_TOKEN_BUCKETS_SECONDS,
        )
        self.time_between_tokens = self._histogram(
            "time_between_tokens_seconds",
            "Between two consecutive output tokens of one generation; one sample for every token but the first.",
            *_CALL,
            buckets=shared.TIME_BETWEEN_TOKENS_BUCKETS_SECONDS,
        )
        self.stall = self._histogram(
            "stall_seconds",
            "The part of a gap between two tokens beyond the TBT target; one sample a stall.",
            *_CALL,
            "cause",
            buckets=shared.STALL_BUCKETS_SECONDS,
        )
        self.stalled_seconds = self._counter("stalled_seconds_total", "Sum of all stalls.", *_CALL)
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of calls that were dispatched.", *_CALL
        )
        self.generated_tokens = self._counter("generated_tokens_total", "Output tokens received from workers.", *_CALL)

    def _make_dispatch_series(self) -> None:
        self.queue_seconds = self._histogram(
            "queue_seconds",
            "From a call's arrival to its dispatch to a worker: reading, tokenizing, waiting for a worker.",
            *_CALL,
            buckets=shared.QUEUE_BUCKETS_SECONDS,
        )
        self.decision_seconds = self._histogram(
            "decision_seconds", "Choosing a worker.", buckets=shared.SHORT_BUCKETS_SECONDS
        )
        self.attempts = self._counter(
            "attempts_total",
            "Dispatches of a generation to a worker, by why: first, or a retry and its reason.",
            "reason",
        )
        self.predicted_output_tokens_error = self._histogram(
            "predicted_output_tokens_error_ratio",
            "|predicted - real| / real output tokens, at admission; only of generations that ended by themselves.",
            "model",
            buckets=_ERROR_RATIO_BUCKETS,
        )
        self.usable_workers = self._gauge("usable_workers", "Workers that can take a request now.", "model")

    def _make_process_series(self) -> None:
        self.event_loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds",
            "How late the event loop runs what is due.",
            buckets=shared.SHORT_BUCKETS_SECONDS,
        )
        self.redis_seconds = self._histogram(
            "redis_seconds",
            "One call to Redis, by result: ok or error.",
            "result",
            buckets=shared.SHORT_BUCKETS_SECONDS,
        )
        self.records_dropped = self._counter(
            "records_dropped_total",
            "Records of ended requests that were never written, because Redis was away for too long.",
        )
        self.redis_degraded = self._gauge("redis_degraded", "1 while Redis is away and request state is not kept.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{shared.ROUTER_PREFIX}_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{shared.ROUTER_PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{shared.ROUTER_PREFIX}_{name}", text, labels, buckets=buckets, registry=self.registry)
