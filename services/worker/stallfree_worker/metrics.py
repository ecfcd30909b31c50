"""The worker's metrics, one registry an application. Names are an interface (design: README, Metrics).

How the token counters reconcile: `generated_tokens_total` counts every token the engine drew, for cancelled requests
too. `prompt_tokens_total` counts a prompt once, with its first drawn token; prefill that was abandoned
or recomputed shows in `step_tokens` only. `requests_total` summed over outcomes is every submit that was received, and
`refusals_total` summed over reasons is its outcome "rejected".

What the reference (Sarathi-Serve) measures, and the name here: request_scheduling_delay, `scheduling_delay_seconds`;
request_execution_time, `request_execution_seconds`; request_preemption_time, `request_preemption_seconds`;
request_num_restarts, `request_restarts`; batch_execution_time, `step_seconds`; inter_batch_delay,
`step_idle_seconds`; batch_size, `step_requests`; batch_num_{prefill,decode}_tokens, `step_tokens`; prefill_e2e_time,
`time_to_first_token_seconds`; decode_token_execution_plus_preemption_time, `time_between_tokens_seconds`, without its
sample of 0 for every first token.
"""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stallfree_shared import metrics as shared
from stallfree_shared.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from stallfree_shared.load import owed_seconds
from stallfree_shared.worker_status import WorkerStatus
from stallfree_worker.engine.step import EngineEvent, StallCause, StepRecord, StepReport
from stallfree_worker.request_timing import RequestTiming

Outcome = Literal["stop", "length", "abort", "error", "rejected"]

_STEP_TOKENS_BUCKETS = tuple(float(2**power) for power in range(15))
_STEP_REQUESTS_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0)
_ERROR_BUCKETS = (
    0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0,
)  # fmt: skip
_RESTART_BUCKETS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)
_REFUSAL_CODES = tuple(
    error.code for error in (OverloadedError, ContextLengthExceededError, InvalidRequestError, UnavailableError)
)
"""The usual ones: their series are there from the start."""
_PHASES = ("schedule", "execute", "apply")


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
        self.refusals = self._counter(
            "refusals_total", "Requests that were refused before they began, by the code of the error.", "reason"
        )
        for code in _REFUSAL_CODES:
            self.refusals.labels(code)
        self.scheduling_delay = self._histogram(
            "scheduling_delay_seconds",
            "From a request's arrival at this worker to the start of its first step: its time in the queue; one sample "
            "for every request that got there.",
            shared.QUEUE_BUCKETS_SECONDS,
        )
        self.request_execution = self._histogram(
            "request_execution_seconds",
            "Sum of the steps that a request was in; one sample at its end, if it was in any.",
            shared.REQUEST_BUCKETS_SECONDS,
        )
        self.request_preemption = self._histogram(
            "request_preemption_seconds",
            "From losing its KV blocks to having computed all of it again, summed over a request's preemptions; one "
            "sample at the end of each request that was preempted.",
            shared.QUEUE_BUCKETS_SECONDS,
        )
        self.request_restarts = self._histogram(
            "request_restarts",
            "Times that a request lost its KV blocks; one sample at its end, if it was in any step.",
            _RESTART_BUCKETS,
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
        step_requests = Histogram(
            f"{shared.WORKER_PREFIX}_step_requests",
            "Requests computed in one step, by kind: decodes, and prefill chunks; one sample of each kind a step.",
            ("kind",),
            buckets=(0.0, *_STEP_REQUESTS_BUCKETS),
            registry=self.registry,
        )
        self.step_decodes = step_requests.labels("decode")
        self.step_chunks = step_requests.labels("prefill")
        self.step_idle = self._histogram(
            "step_idle_seconds",
            "Between the end of a step and the start of the next one while there was work.",
            shared.SHORT_BUCKETS_SECONDS,
        )
        phases = self._counter("step_phase_seconds_total", "Seconds of the steps, by what they went into.", "phase")
        self.schedule_seconds, self.execute_seconds, self.apply_seconds = map(phases.labels, _PHASES)
        self.preemptions = self._counter("preemptions_total", "Requests that lost their KV blocks to others.")
        self.recomputed_tokens = self._counter(
            "recomputed_tokens_total", "Tokens computed again because a preemption had lost them."
        )
        self.step_time_error = self._gauge(
            "step_time_error_ratio", "|predicted - real| / real step time, a running mean."
        )
        self.step_prediction_error = self._histogram(
            "step_prediction_error_ratio", "|predicted - real| / real time of every step.", _ERROR_BUCKETS
        )
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries_tokens_total", "Prompt tokens that were looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits_tokens_total", "Prompt tokens that the prefix cache had, and that were not computed."
        )

    def _make_state_series(self) -> None:
        self.requests_running = self._gauge("requests_running", "Requests that hold KV blocks.")
        self.requests_waiting = self._gauge("requests_waiting", "Requests that wait for their first or next step.")
        self.kv_cache_usage = self._gauge("kv_cache_usage_ratio", "Share of the KV blocks that is in use, 0 to 1.")
        self.kv_cache_blocks = self._gauge("kv_cache_blocks", "KV blocks that there are.")
        self.kv_cache_tokens = self._gauge("kv_cache_tokens", "Tokens that all KV blocks together hold.")
        self.kv_cache_bytes = self._gauge("kv_cache_bytes", "Bytes that all KV blocks together take.")
        self.longest_decode_wait = self._gauge(
            "longest_decode_wait_seconds", "How long the decode that waits longest has waited for its next token."
        )
        self.longest_prefill_wait = self._gauge(
            "longest_prefill_wait_seconds", "How long the prompt that waits longest has gone without a chunk."
        )
        self.no_progress = self._gauge(
            "no_progress_seconds", "How long there have been requests and no step; 0 while there is progress."
        )
        self.trace_dropped = self._counter("trace_dropped_steps_total", "Steps that --trace could not write.")
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
        if step.record is not None:
            self._observe_record(step.record)
        self.step_time_error.set(step.status.step_time_error_ratio)
        self.longest_decode_wait.set(step.status.longest_decode_wait_seconds)
        self.longest_prefill_wait.set(step.status.longest_prefill_wait_seconds)
        for event in step.events:
            if event.token_id is not None:
                self._observe_token(event)

    def _observe_record(self, record: StepRecord) -> None:
        self.step.observe(record.seconds)
        self.schedule_seconds.inc(record.schedule_seconds)
        self.execute_seconds.inc(record.execute_seconds)
        self.apply_seconds.inc(record.apply_seconds)
        if record.idle_seconds is not None:
            self.step_idle.observe(record.idle_seconds)
        if record.prediction_error_ratio is not None:
            self.step_prediction_error.observe(record.prediction_error_ratio)
        self.step_decode_tokens.observe(record.num_decode_tokens)
        self.step_prefill_tokens.observe(record.num_prefill_tokens)
        self.step_decodes.observe(record.num_decodes)
        self.step_chunks.observe(len(record.request_ids) - record.num_decodes)
        self.preemptions.inc(len(record.preempted_request_ids))
        self.recomputed_tokens.inc(record.num_recomputed_tokens)
        self.prefix_cache_queries.inc(record.num_prefix_query_tokens)
        self.prefix_cache_hits.inc(record.num_prefix_hit_tokens)

    def _observe_token(self, event: EngineEvent) -> None:
        self.generated_tokens.inc()
        if event.output_index == 0:
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

    def set_kv_cache(self, *, num_blocks: int, num_tokens: int, num_bytes: int) -> None:
        """How large the KV cache of the engine that runs now is; 0 while none runs."""
        self.kv_cache_blocks.set(num_blocks)
        self.kv_cache_tokens.set(num_tokens)
        self.kv_cache_bytes.set(num_bytes)

    def forget_engine(self) -> None:
        """The engine is lost: no gauge keeps what it told last."""
        self.set_kv_cache(num_blocks=0, num_tokens=0, num_bytes=0)
        self.longest_decode_wait.set(0)
        self.longest_prefill_wait.set(0)
        self.step_time_error.set(0)

    def count_outcome(self, outcome: Outcome) -> None:
        self.requests.labels(outcome).inc()

    def count_refusal(self, code: str) -> None:
        """`code` is one of the error tree's."""
        self.count_outcome("rejected")
        self.refusals.labels(code).inc()

    def observe_end(self, timing: RequestTiming) -> None:
        """Where the time of a request that ended went."""
        if timing.scheduling_delay_seconds is None:
            return
        self.request_execution.observe(timing.execution_seconds)
        self.request_restarts.observe(timing.num_restarts)
        if timing.num_restarts > 0:
            self.request_preemption.observe(timing.preemption_seconds)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{shared.WORKER_PREFIX}_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{shared.WORKER_PREFIX}_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{shared.WORKER_PREFIX}_{name}", text, buckets=buckets, registry=self.registry)
