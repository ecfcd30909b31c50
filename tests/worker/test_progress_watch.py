"""When work counts as stuck."""

from __future__ import annotations

from stallfree_worker.progress_watch import ProgressWatch


def test_b34_work_without_a_step_is_noticed_once_and_its_time_is_told() -> None:
    watch = ProgressWatch(warning_seconds=10)
    assert not watch.check(0.0, has_work=True)
    assert not watch.check(9.9, has_work=True)
    assert watch.check(10.0, has_work=True)
    assert not watch.check(30.0, has_work=True)
    assert watch.stuck_seconds == 30.0


def test_b34_every_step_begins_the_time_anew_and_the_next_standstill_is_noticed_again() -> None:
    watch = ProgressWatch(warning_seconds=10)
    watch.check(0.0, has_work=True)
    assert watch.check(12.0, has_work=True)
    watch.note_step(13.0)
    assert not watch.check(14.0, has_work=True)
    assert watch.stuck_seconds == 1.0
    assert watch.check(23.0, has_work=True)


def test_b34_idle_worker_is_never_stuck() -> None:
    watch = ProgressWatch(warning_seconds=10)
    watch.check(0.0, has_work=True)
    watch.check(9.0, has_work=False)
    assert watch.stuck_seconds == 0.0
    assert not watch.check(1000.0, has_work=False)
    assert not watch.check(1001.0, has_work=True), "the time of a new request begins with it"
    assert watch.stuck_seconds == 0.0
