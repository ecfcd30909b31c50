from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_shared.load import (
    Work,
    decode_seconds,
    delay_seconds,
    harm_seconds,
    marginal_decode_seconds,
    owed_seconds,
    prefill_seconds,
    time_to_first_token_seconds,
    with_work,
)
from stallfree_shared.worker_status import StepTimeCoefficients, WorkerStatus


def status(
    *, running: int = 0, waiting: int = 0, prefill: int = 0, output: int = 0, free: int = 100_000, speed: float = 1.0
) -> WorkerStatus:
    """A worker with 10 ms and 0.1 ms a token, a token budget of 500 and 8 slots; `speed` 2 is twice as slow."""
    return WorkerStatus(
        sequence=1,
        is_ready=True,
        is_draining=False,
        max_num_seqs=8,
        token_budget_tokens=500,
        kv_total_tokens=100_000,
        kv_free_tokens=free,
        requests_running=running,
        requests_waiting=waiting,
        prefill_tokens_left=prefill,
        expected_output_tokens_left=output,
        step_time=StepTimeCoefficients(base_seconds=0.01 * speed, seconds_per_token=0.0001 * speed),
    )


statuses = st.builds(
    status,
    running=st.integers(0, 8),
    waiting=st.integers(0, 50),
    prefill=st.integers(0, 10**6),
    output=st.integers(0, 10**6),
    free=st.integers(0, 100_000),
    speed=st.floats(0.01, 100),
)
works = st.builds(Work, prefill_tokens=st.integers(1, 10**5), output_tokens=st.floats(0, 10**5))


@pytest.mark.parametrize(
    ("worker", "num_tokens", "seconds"),
    [
        (status(), 0, 0.0),
        (status(), 500, 0.01 + 500 * 0.0001),
        (status(), 501, 2 * 0.01 + 501 * 0.0001),
        (status(running=100), 400, 0.01 + 100 * 0.0001 + 400 * 0.0001),
        (status(running=100), 800, 2 * (0.01 + 0.01) + 0.08),
        (status(running=500), 3, 3 * (0.01 + 0.05) + 0.0003),
    ],
)
def test_prefill_takes_steps_of_what_the_budget_leaves_beside_decodes(
    worker: WorkerStatus, num_tokens: int, seconds: float
) -> None:
    assert prefill_seconds(worker, num_tokens) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("worker", "seconds"), [(status(), 0.0101), (status(running=1), 0.0101), (status(running=4, waiting=90), 0.00135)]
)
def test_an_output_token_pays_its_share_of_the_fixed_part(worker: WorkerStatus, seconds: float) -> None:
    assert marginal_decode_seconds(worker) == pytest.approx(seconds)


def test_owed_seconds_are_prefill_and_output() -> None:
    worker = status(running=2, prefill=498, output=100)
    assert owed_seconds(worker) == pytest.approx(0.0102 + 0.0498 + 100 * 0.0051)


@given(statuses)
def test_an_idle_worker_owes_nothing_and_no_worker_less(worker: WorkerStatus) -> None:
    owed = owed_seconds(worker)
    assert owed >= 0
    assert (owed == 0) == (worker.prefill_tokens_left == worker.expected_output_tokens_left == 0)


@given(statuses, works)
def test_more_work_never_makes_a_worker_look_better(worker: WorkerStatus, work: Work) -> None:
    loaded = with_work(worker, [work])
    assert loaded.requests_waiting == worker.requests_waiting + 1
    assert time_to_first_token_seconds(loaded, work) > prefill_seconds(worker, work.prefill_tokens)
    assert prefill_seconds(loaded, loaded.prefill_tokens_left) >= prefill_seconds(worker, worker.prefill_tokens_left)


@given(statuses, works)
def test_a_worker_twice_as_slow_costs_twice_as_much(worker: WorkerStatus, work: Work) -> None:
    coefficients = worker.step_time
    slow = worker.model_copy(
        update={
            "step_time": StepTimeCoefficients(
                base_seconds=2 * coefficients.base_seconds, seconds_per_token=2 * coefficients.seconds_per_token
            )
        }
    )
    assert delay_seconds(slow, work) == pytest.approx(2 * delay_seconds(worker, work))
    assert owed_seconds(slow) == pytest.approx(2 * owed_seconds(worker))


@given(statuses, works)
def test_the_first_token_never_comes_before_the_own_prefill(worker: WorkerStatus, work: Work) -> None:
    assert time_to_first_token_seconds(worker, work) >= prefill_seconds(worker, work.prefill_tokens) > 0


def test_all_that_are_there_are_harmed_for_as_long_as_they_run() -> None:
    work = Work(prefill_tokens=1000, output_tokens=50)
    assert harm_seconds(status(), work) == 0
    assert harm_seconds(status(running=4, output=40), work) == pytest.approx(4 * 0.0001 * (1000 + 10))
    assert harm_seconds(status(running=1, waiting=3, output=400), work) == pytest.approx(4 * 0.0001 * (1000 + 50))


@pytest.mark.parametrize(("running", "waiting", "num_decodes"), [(0, 0, 1), (3, 2, 6), (8, 90, 8)])
def test_the_own_output_takes_steps_with_all_that_are_there(running: int, waiting: int, num_decodes: int) -> None:
    work = Work(prefill_tokens=1000, output_tokens=50)
    seconds = 50 * (0.01 + 0.0001 * num_decodes)
    assert decode_seconds(status(running=running, waiting=waiting), work) == pytest.approx(seconds)


def test_a_request_waits_for_a_slot_and_for_memory() -> None:
    work = Work(prefill_tokens=100, output_tokens=100)
    own = prefill_seconds(status(running=7), 100)
    assert time_to_first_token_seconds(status(running=7, output=700), work) == pytest.approx(own)
    assert time_to_first_token_seconds(status(running=8, output=800), work) > own + 0.1
    assert time_to_first_token_seconds(status(running=7, output=700, free=100), work) > own


def test_no_work_is_the_same_status() -> None:
    assert with_work(status(running=3), []) == status(running=3)
