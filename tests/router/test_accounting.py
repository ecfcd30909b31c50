"""What is counted: TTFT, TBT once a token, stalls with their cause. Time is the test's."""

from __future__ import annotations

import pytest

from stallfree_router.accounting import Accounting, CallAccount
from stallfree_router.metrics import RouterMetrics
from stallfree_router.output_text import TextEvent
from stallfree_shared.errors import OverloadedError, SlowClientError, StallfreeError, WorkerLostError
from stallfree_shared.wire import FinishReason

_PREFIX = "stallfree_router"


class Books:
    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = RouterMetrics()
        self.accounting = Accounting(self.metrics, clock=lambda: self.now)
        self.account = self.open()

    def open(self) -> CallAccount:
        account = self.accounting.open(call_id="id", client_request_id="theirs")
        account.model = "m"
        return account

    def event(
        self, count: int, *, received_at: float, written_at: float, choice: int = 0, finish: FinishReason | None = None
    ) -> None:
        event = TextEvent(
            choice=choice,
            text="x",
            token_ids=(1,) * count,
            received_at=received_at,
            tbt_target_seconds=0.2,
            finish_reason=finish,
        )
        self.account.tokens(event, written_at)

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"model": "m", "tenant": "default", **labels}
        return self.metrics.registry.get_sample_value(f"{_PREFIX}_{name}", labels)


def test_d09_ttft_ends_at_the_first_token_and_the_first_gap_is_no_tbt() -> None:
    books = Books()
    books.event(1, received_at=101.4, written_at=101.5)
    assert books.value("time_to_first_token_seconds_sum") == pytest.approx(1.5)
    assert books.value("time_between_tokens_seconds_count") == 0


def test_tbt_has_one_sample_for_every_token_but_the_first() -> None:
    books = Books()
    books.event(3, received_at=101.0, written_at=101.0)
    books.event(2, received_at=101.1, written_at=101.1)
    assert books.value("time_between_tokens_seconds_count") == 4
    assert books.value("time_between_tokens_seconds_sum") == pytest.approx(0.1)
    assert books.value("generated_tokens_total") == 5


def test_d07_ttft_has_one_sample_a_generation_with_output() -> None:
    books = Books()
    books.event(1, received_at=101.0, written_at=101.0, choice=0)
    books.event(1, received_at=101.0, written_at=101.0, choice=1)
    books.event(1, received_at=101.0, written_at=101.0, choice=1)
    books.event(0, received_at=101.0, written_at=101.0, choice=2, finish="length")
    assert books.value("time_to_first_token_seconds_count") == 2


def test_a_token_that_came_late_is_the_workers_stall() -> None:
    books = Books()
    books.event(1, received_at=101.0, written_at=101.0)
    books.event(1, received_at=101.5, written_at=101.5)
    assert books.value("stall_seconds_sum", cause="worker") == pytest.approx(0.3)
    assert books.value("stalled_seconds_total") == pytest.approx(0.3)


def test_a_token_that_came_in_time_and_left_late_is_the_routers_stall() -> None:
    books = Books()
    books.event(1, received_at=101.0, written_at=101.0)
    books.event(1, received_at=101.1, written_at=101.5)
    assert books.value("stall_seconds_count", cause="router") == 1
    assert books.value("stall_seconds_count", cause="worker") is None


def test_a_gap_within_the_target_is_no_stall() -> None:
    books = Books()
    books.event(1, received_at=101.0, written_at=101.0)
    books.event(1, received_at=101.19, written_at=101.19)
    assert books.value("stalled_seconds_total") is None


def test_d01_every_call_is_counted_once_with_its_outcome() -> None:
    books = Books()
    books.event(1, received_at=101.0, written_at=101.0, choice=0, finish="length")
    books.event(1, received_at=101.0, written_at=101.0, choice=1, finish="stop")
    books.accounting.close(books.account)
    rejected, failed, left, cut = (books.open() for _ in range(4))
    rejected.failed(OverloadedError("full"))
    failed.failed(WorkerLostError("gone"))
    left.aborted()
    for account in (rejected, failed, left, cut):
        books.accounting.close(account)
    counts = {
        outcome: books.value("requests_total", outcome=outcome) for outcome in ("length", "rejected", "error", "abort")
    }
    assert counts == {"length": 1, "rejected": 1, "error": 1, "abort": 2}
    assert books.metrics.registry.get_sample_value(f"{_PREFIX}_in_flight_requests") == 0


@pytest.mark.parametrize(("error", "outcome"), [(OverloadedError("full"), "error"), (SlowClientError("slow"), "abort")])
def test_what_has_begun_to_be_answered_is_no_refusal_any_more(error: StallfreeError, outcome: str) -> None:
    books = Books()
    books.event(1, received_at=101.0, written_at=101.0)
    books.account.failed(error)
    assert books.account.outcome == outcome


def test_one_log_line_a_call_without_any_text(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    books.event(2, received_at=101.0, written_at=101.0, finish="stop")
    books.now = 102.5
    with caplog.at_level("INFO"):
        books.accounting.close(books.account)
    (record,) = caplog.records
    assert record.getMessage() == "request finished"
    assert record.__dict__["outcome"] == "stop"
    assert record.__dict__["completion_tokens"] == 2
    assert record.__dict__["seconds"] == 2.5
