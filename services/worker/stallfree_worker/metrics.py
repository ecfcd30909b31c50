"""The worker's metrics, one registry an application. Names are an interface (design: README, Metrics).

How the token counters reconcile: `generated_tokens_total` counts every token the engine drew, for cancelled requests
too. `prompt_tokens_total` counts a prompt once, with its first drawn token; prefill that was abandoned
or recomputed shows in `step_tokens` only. `requests_total` summed over outcomes is every submit that was received.
"""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stallfree_shared import metrics as shared
from stallfree_shared.load import owed_seconds
from stallfree_shared.worker_status import WorkerStatus
from stallfree_worker.engine.step import EngineEvent, StallCause, StepReport

Outcome = Literal["stop", "length", "abort", "error", "rejected"]

_STEP_TOKENS_BUCKETS = tuple(float(2**power) for power in range(15))


class WorkerMetrics:
    """Every series of this worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_request_series()
        self._make_step_series()
        self._make_state_series()

    def _make_request_series(self) -> None:
        self.requests = self._counter(
            "requests_total",
            "Requests received, by how they ended. The sum over outcomes, with those still running, is all submits.",
            "outcome",
        )
        for outcome in get_args(Outcome):
            self.requests.labels(outcome)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival at this worker to its first output token, queueing included.",
            shared.TIME_TO_FIRST_TOKEN_BUCKETS_SECONDS,
        )
        self.time_between_tokens = self._histogram(
            "time_between_tokens_seconds",
            "Between two consecutive output tokens of one request; one sample for every token but the first.",
            shared.TIME_BETWEEN_TOKENS_BUCKETS_SECONDS,
        )
        self.stall = Histogram(
            f"{shared.WORKER_PREFIX}_stall_seconds",
            "The part of a gap between two tokens beyond the TBT target; one sample a stall.",
            ("cause",),
            buckets=shared.STALL_BUCKETS_SECONDS,
            registry=self.registry,
        )
        for cause in get_args(StallCause):
            self.stall.labels(cause)
        self.stalled_seconds = self._counter("stalled_seconds_total", "Sum of all stalls.")
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests that got their first output token."
        )
        self.generated_tokens = self._counter("generated_tokens_total", "Output tokens drawn.")

    def _make_step_series(self) -> None:
        self.step = self._histogram("step_seconds", "One step of the engine.", shared.STEP_BUCKETS_SECONDS)
        step_tokens = Histogram(
            f"{shared.WORKER_PREFIX}_step_tokens",
            "Tokens computed in one step, by kind; one sample of each kind a step.",
            ("kind",),
            buckets=(0.0, *_STEP_TOKENS_BUCKETS),
            registry=self.registry,
        )
        self.step_prefill_tokens = step_tokens.labels("prefill")
        self.step_decode_tokens = step_tokens.labels("decode")
        self.preemptions = self._counter("preemptions_total", "Requests that lost their KV blocks to others.")
        self.recomputed_tokens = self._counter(
            "recomputed_tokens_total", "Tokens computed again because a preemption had lost them."
        )
        self.step_time_error = self._gauge(
            "step_time_error_ratio", "|predicted - real| / real step time, a running mean."
        )

    def _make_state_series(self) -> None:
        self.requests_running = self._gauge("requests_running", "Requests that hold KV blocks.")
        self.requests_waiting = self._gauge("requests_waiting", "Requests that wait for their first or next step.")
        self.kv_cache_usage = self._gauge("kv_cache_usage_ratio", "Share of the KV blocks that is in use, 0 to 1.")
        self.token_budget = self._gauge(
            "token_budget_tokens", "Tokens that a step holds now where prefills are waiting."
        )
        self.predicted_load = self._gauge(
            "predicted_load_seconds", "Expected seconds of work still owed: prefill left and expected output left."
        )
        self.engine_up = self._gauge("engine_up", "1 while the engine can compute, 0 while it loads or is lost.")
        self.engine_restarts = self._counter("engine_restarts_total", "Times the engine was started anew.")

    def observe_step(self, step: StepReport) -> None:
        """Counts what one step gave."""
        if step.num_decode_tokens + step.num_prefill_tokens > 0:
            self.step.observe(step.step_seconds)
            self.step_decode_tokens.observe(step.num_decode_tokens)
            self.step_prefill_tokens.observe(step.num_prefill_tokens)
            self.preemptions.inc(step.num_preemptions)
            self.recomputed_tokens.inc(step.num_recomputed_tokens)
        self.step_time_error.set(step.status.step_time_error_ratio)
        for event in step.events:
            if event.token_id is not None:
                self._observe_token(event)

    def _observe_token(self, event: EngineEvent) -> None:
        self.generated_tokens.inc()
        if event.index == 0:
            self.prompt_tokens.inc(event.num_prompt_tokens)
        if event.time_between_tokens_seconds is not None:
            self.time_between_tokens.observe(event.time_between_tokens_seconds)
        if event.stall_seconds > 0:
            self.stall.labels(event.stall_cause or "decode").observe(event.stall_seconds)
            self.stalled_seconds.inc(event.stall_seconds)

    def set_state(self, status: WorkerStatus) -> None:
        """Refreshes the gauges. Called for idle engines too, so that none stays stuck at its last busy value."""
        self.requests_running.set(status.requests_running)
        self.requests_waiting.set(status.requests_waiting)
        used_tokens = status.kv_total_tokens - status.kv_free_tokens
        self.kv_cache_usage.set(used_tokens / status.kv_total_tokens if status.kv_total_tokens else 0.0)
        self.token_budget.set(status.token_budget_tokens)
        self.predicted_load.set(owed_seconds(status))
        self.engine_up.set(status.is_ready)

    def count_outcome(self, outcome: Outcome) -> None:
        self.requests.labels(outcome).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{shared.WORKER_PREFIX}_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{shared.WORKER_PREFIX}_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{shared.WORKER_PREFIX}_{name}", text, buckets=buckets, registry=self.registry)
