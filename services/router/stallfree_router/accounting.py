"""What is counted about a call: its outcome, its tokens, when they were written, and one log line at its end.

`Accounting` opens an account for every call to a generation route, whatever becomes of it, and closes it exactly
once. The instants of tokens are those at which they are handed to the server for writing (of an answer that is not
streamed: when they would have been). An event of k tokens is one gap and k - 1 gaps of zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from starlette.types import Scope

from stallfree_router.messages import DEFAULT_TENANT
from stallfree_router.metrics import Outcome, RouterMetrics, StallCause
from stallfree_router.output_text import TextEvent
from stallfree_shared.errors import (
    InvalidRequestError,
    OverloadedError,
    SlowClientError,
    StallfreeError,
    UnavailableError,
)
from stallfree_shared.metrics import stall_seconds

_logger = logging.getLogger(__name__)

_STATE_KEY = "call_account"
UNKNOWN_MODEL = "other"


@dataclass(slots=True)
class _Instants:
    written_at: float
    received_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """What every token is counted in. Finding a series by its labels takes longer than adding to it."""

    generated_tokens: Counter
    time_between_tokens: Histogram


class CallAccount:
    """One call's account. Everyone who serves the call tells it what happened."""

    def __init__(self, metrics: RouterMetrics, *, call_id: str, client_request_id: str, arrived_at: float) -> None:
        self.call_id = call_id
        """Ours and unique. Metrics carry neither id."""
        self.client_request_id = client_request_id
        self.arrived_at = arrived_at
        self.model = UNKNOWN_MODEL
        """One that workers serve, once that is known; never a client's own words."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.outcome: Outcome | None = None
        self.error_code: str | None = None
        self._metrics = metrics
        self._last_by_choice: dict[int, _Instants] = {}
        self._series: _Series | None = None
        """From the first token on."""

    @staticmethod
    def of(scope: Scope) -> CallAccount:
        """The account of the call that `scope` belongs to."""
        account: CallAccount = scope["state"][_STATE_KEY]
        return account

    @staticmethod
    def find(scope: Scope) -> CallAccount | None:
        """None where the request is no call to a generation route."""
        account: CallAccount | None = scope.get("state", {}).get(_STATE_KEY)
        return account

    def attach(self, scope: Scope) -> None:
        scope.setdefault("state", {})[_STATE_KEY] = self

    def dispatched(self, *, prompt_tokens: int) -> None:
        """The call goes to workers."""
        self.prompt_tokens = prompt_tokens
        self._metrics.prompt_tokens.labels(self.model, DEFAULT_TENANT).inc(prompt_tokens)

    def tokens(self, event: TextEvent, written_at: float) -> None:
        """An event's tokens are handed to the server at `written_at`."""
        count = len(event.token_ids)
        if count:
            self.completion_tokens += count
            if self._series is None:
                self._series = _Series(
                    generated_tokens=self._metrics.generated_tokens.labels(self.model, DEFAULT_TENANT),
                    time_between_tokens=self._metrics.time_between_tokens.labels(self.model, DEFAULT_TENANT),
                )
            self._series.generated_tokens.inc(count)
            self._observe_times(event, count, written_at, self._series.time_between_tokens)
        if event.finish_reason is not None and self.outcome != "length":
            self.outcome = event.finish_reason

    def _observe_times(self, event: TextEvent, count: int, written_at: float, gaps: Histogram) -> None:
        last = self._last_by_choice.get(event.choice)
        if last is None:
            self._metrics.time_to_first_token.labels(self.model, DEFAULT_TENANT).observe(written_at - self.arrived_at)
            self._last_by_choice[event.choice] = _Instants(written_at, event.received_at)
        else:
            gaps.observe(written_at - last.written_at)
            self._observe_stall(event, last, written_at)
            last.written_at, last.received_at = written_at, event.received_at
        for _ in range(count - 1):
            gaps.observe(0.0)

    def _observe_stall(self, event: TextEvent, last: _Instants, written_at: float) -> None:
        stall = stall_seconds(written_at - last.written_at, event.tbt_target_seconds)
        if stall > 0:
            came_late = event.received_at - last.received_at > event.tbt_target_seconds
            cause: StallCause = "worker" if came_late else "router"
            self._metrics.stall.labels(self.model, DEFAULT_TENANT, cause).observe(stall)
            self._metrics.stalled_seconds.labels(self.model, DEFAULT_TENANT).inc(stall)

    def aborted(self) -> None:
        """The client has left."""
        self.outcome = "abort"

    def failed(self, error: Exception) -> None:
        """The call ends by this error. What has begun to be answered can be refused no more."""
        is_refusal = isinstance(error, InvalidRequestError | OverloadedError | UnavailableError)
        if isinstance(error, SlowClientError):
            self.outcome = "abort"
        else:
            self.outcome = "rejected" if is_refusal and self.completion_tokens == 0 else "error"
        self.error_code = error.code if isinstance(error, StallfreeError) else "internal_error"


class Accounting:
    """Opens and closes accounts."""

    def __init__(self, metrics: RouterMetrics, *, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock

    def open(self, *, call_id: str, client_request_id: str) -> CallAccount:
        self._metrics.in_flight_requests.inc()
        return CallAccount(
            self._metrics, call_id=call_id, client_request_id=client_request_id, arrived_at=self._clock()
        )

    def close(self, account: CallAccount) -> None:
        """Counts the call. One that ended without a word was cut off by our own end."""
        outcome = account.outcome or "abort"
        seconds = self._clock() - account.arrived_at
        self._metrics.in_flight_requests.dec()
        self._metrics.requests.labels(account.model, DEFAULT_TENANT, outcome).inc()
        self._metrics.request_seconds.labels(account.model, DEFAULT_TENANT, outcome).observe(seconds)
        _logger.info(
            "request finished",
            extra={
                "request_id": account.call_id,
                "client_request_id": account.client_request_id,
                "model": account.model,
                "outcome": outcome,
                "error_code": account.error_code,
                "prompt_tokens": account.prompt_tokens,
                "completion_tokens": account.completion_tokens,
                "seconds": round(seconds, 4),
            },
        )
