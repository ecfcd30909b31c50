"""The router's metrics, one registry an application. Names are an interface (design: README, Metrics)."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stallfree_shared import metrics as shared

Outcome = Literal["stop", "length", "abort", "error", "rejected"]
StallCause = Literal["worker", "router"]


class RouterMetrics:
    """Every series of this router. A label value is never free text from a client: an unknown model is "other"."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = shared.ROUTER_PREFIX
        model = ("model", "tenant")
        self.requests = Counter(
            f"{prefix}_requests_total",
            "Calls received, by how they ended. The sum over outcomes is all calls to the generation routes.",
            (*model, "outcome"),
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            f"{prefix}_time_to_first_token_seconds",
            "From a call's arrival to its first output token, queueing included; one sample a generation with output.",
            model,
            buckets=shared.TIME_TO_FIRST_TOKEN_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.time_between_tokens = Histogram(
            f"{prefix}_time_between_tokens_seconds",
            "Between two consecutive output tokens of one generation; one sample for every token but the first.",
            model,
            buckets=shared.TIME_BETWEEN_TOKENS_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.stall = Histogram(
            f"{prefix}_stall_seconds",
            "The part of a gap between two tokens beyond the TBT target; one sample a stall.",
            (*model, "cause"),
            buckets=shared.STALL_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.stalled_seconds = Counter(
            f"{prefix}_stalled_seconds_total", "Sum of all stalls.", model, registry=self.registry
        )
        self.request_seconds = Histogram(
            f"{prefix}_request_seconds",
            "From a call's arrival to its end.",
            (*model, "outcome"),
            buckets=shared.REQUEST_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            f"{prefix}_queue_seconds",
            "From a call's arrival to its dispatch to a worker: reading, tokenizing, waiting for a worker.",
            model,
            buckets=shared.QUEUE_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            f"{prefix}_decision_seconds",
            "Choosing a worker.",
            buckets=shared.SHORT_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.predicted_output_tokens_error = Histogram(
            f"{prefix}_predicted_output_tokens_error_ratio",
            "|predicted - real| / real output tokens, at admission; only of generations that ended by themselves.",
            ("model",),
            buckets=(0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0),
            registry=self.registry,
        )
        self.attempts = Counter(
            f"{prefix}_attempts_total",
            "Dispatches of a generation to a worker, by why: first, or a retry and its reason.",
            ("reason",),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            f"{prefix}_prompt_tokens_total",
            "Prompt tokens of calls that were dispatched.",
            model,
            registry=self.registry,
        )
        self.generated_tokens = Counter(
            f"{prefix}_generated_tokens_total", "Output tokens received from workers.", model, registry=self.registry
        )
        self.in_flight_requests = Gauge(
            f"{prefix}_in_flight_requests", "Calls being served now.", registry=self.registry
        )
        self.usable_workers = Gauge(
            f"{prefix}_usable_workers", "Workers that can take a request now.", ("model",), registry=self.registry
        )
        self.event_loop_lag_seconds = Histogram(
            f"{prefix}_event_loop_lag_seconds",
            "How late the event loop runs what is due.",
            buckets=shared.SHORT_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.redis_seconds = Histogram(
            f"{prefix}_redis_seconds",
            "One call to Redis, by result: ok or error.",
            ("result",),
            buckets=shared.SHORT_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.records_dropped = Counter(
            f"{prefix}_records_dropped_total",
            "Records of ended requests that were never written, because Redis was away for too long.",
            registry=self.registry,
        )
        self.redis_degraded = Gauge(
            f"{prefix}_redis_degraded", "1 while Redis is away and request state is not kept.", registry=self.registry
        )
