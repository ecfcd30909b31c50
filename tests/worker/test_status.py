"""The numbers of statuses: what `wire.SubmitAccepted` promises, against every order of events."""

from __future__ import annotations

import random

from stallfree_shared.worker_status import WorkerStatus
from stallfree_worker.engine.step import EngineStatus
from stallfree_worker.engine.step_time import StepTimeLine
from stallfree_worker.settings import SchedulerSettings
from stallfree_worker.status import StatusBook


def _engine_status(*, requests_running: int = 0) -> EngineStatus:
    return EngineStatus(
        requests_running=requests_running,
        requests_waiting=0,
        num_blocks=10,
        num_free_blocks=4,
        token_budget_tokens=512,
        prefill_tokens_left=0,
        expected_output_tokens_left=0,
        step_time=StepTimeLine(base_seconds=0.01, seconds_per_token=0.001),
        step_time_error_ratio=0.0,
    )


def _make(book: StatusBook) -> WorkerStatus:
    return book.make(is_ready=True, is_draining=False)


def test_status_from_before_the_engine_took_a_submit_is_never_numbered_above_its_answer() -> None:
    book = StatusBook(SchedulerSettings())
    book.engine_started(kv_cache_tokens=160)
    answer = book.count_submit()
    for _ in range(1000):
        book.engine_reported(_engine_status(), submits_taken=0)
        assert _make(book).sequence <= answer
    book.engine_reported(_engine_status(requests_running=1), submits_taken=1)
    assert _make(book).sequence > answer


def test_sequences_rise_and_include_exactly_the_submits_that_were_taken() -> None:
    random_ = random.Random(7)
    book = StatusBook(SchedulerSettings())
    book.engine_started(kv_cache_tokens=160)
    answers: list[int] = []
    num_before_engine = num_taken = 0
    last = -1
    for _ in range(3000):
        action = random_.choice(
            ["submit", "report", "report", "make", "restart"]
            if len(answers) % 50 == 49
            else ["submit", "report", "make"]
        )
        if action == "submit":
            answers.append(book.count_submit())
        elif action == "report":
            num_taken = random_.randint(num_taken, len(answers))
            book.engine_reported(_engine_status(), submits_taken=num_taken - num_before_engine)
        elif action == "restart":
            book.engine_lost()
            book.engine_started(kv_cache_tokens=160)
            num_before_engine = num_taken = len(answers)
        status = _make(book)
        assert status.sequence > last
        last = status.sequence
        assert [answer < status.sequence for answer in answers] == [n < num_taken for n in range(len(answers))]
        assert book.submits_untaken == len(answers) - num_taken


def test_blocks_are_told_as_tokens_and_a_lost_engine_has_none() -> None:
    book = StatusBook(SchedulerSettings())
    book.engine_started(kv_cache_tokens=160)
    book.engine_reported(_engine_status(), submits_taken=0)
    assert (_make(book).kv_total_tokens, _make(book).kv_free_tokens) == (160, 64)
    book.engine_lost()
    assert (_make(book).kv_total_tokens, _make(book).kv_free_tokens) == (0, 0)
