"""Where a request's time went: the reference's definitions, on instants chosen by hand."""

from __future__ import annotations

from stallfree_worker.request_timing import RequestTiming


def timing() -> RequestTiming:
    return RequestTiming(received_at=10.0)


def test_scheduling_delay_ends_at_the_start_of_the_first_step_and_never_moves() -> None:
    request = timing()
    assert request.scheduling_delay_seconds is None
    request.note_chunk(started_at=12.5, ended_at=13.0, num_computed=8)
    request.note_preemption(14.0)
    request.note_chunk(started_at=20.0, ended_at=21.0, num_computed=8)
    assert request.scheduling_delay_seconds == 2.5


def test_execution_time_is_the_sum_of_the_steps_that_the_request_was_in() -> None:
    request = timing()
    request.note_chunk(started_at=10.0, ended_at=11.0, num_computed=8)
    request.note_chunk(started_at=15.0, ended_at=15.5, num_computed=16)
    assert request.execution_seconds == 1.5


def test_preemption_time_lasts_from_the_lost_blocks_until_all_is_computed_again() -> None:
    request = timing()
    request.note_chunk(started_at=10.0, ended_at=11.0, num_computed=30)
    request.note_chunk(started_at=11.0, ended_at=12.0, num_computed=31)
    request.note_preemption(12.0)
    request.note_chunk(started_at=15.0, ended_at=16.0, num_computed=20)
    assert request.preemption_seconds == 0.0, "it has not caught up yet"
    request.note_chunk(started_at=16.0, ended_at=17.0, num_computed=31)
    request.note_chunk(started_at=17.0, ended_at=18.0, num_computed=32)
    assert (request.preemption_seconds, request.num_restarts) == (5.0, 1)


def test_two_preemptions_add_up_and_one_within_another_counts_its_time_once() -> None:
    request = timing()
    request.note_chunk(started_at=10.0, ended_at=11.0, num_computed=30)
    request.note_preemption(11.0)
    request.note_chunk(started_at=12.0, ended_at=13.0, num_computed=10)
    request.note_preemption(14.0)
    request.note_chunk(started_at=15.0, ended_at=16.0, num_computed=30)
    request.note_preemption(20.0)
    request.note_chunk(started_at=20.5, ended_at=21.0, num_computed=31)
    assert (request.preemption_seconds, request.num_restarts) == (5.0 + 1.0, 3)


def test_request_that_ends_while_it_waits_for_its_blocks_has_lost_the_time_until_then() -> None:
    request = timing()
    request.note_chunk(started_at=10.0, ended_at=11.0, num_computed=30)
    request.note_preemption(11.0)
    request.note_end(13.0)
    request.note_end(99.0)
    assert request.preemption_seconds == 2.0


def test_undisturbed_request_has_lost_nothing() -> None:
    request = timing()
    request.note_chunk(started_at=10.0, ended_at=11.0, num_computed=30)
    request.note_end(12.0)
    assert (request.preemption_seconds, request.num_restarts) == (0.0, 0)
