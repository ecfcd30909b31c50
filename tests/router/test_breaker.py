from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stallfree_router.breaker import FAILURES_TO_OPEN, FIRST_OPEN_SECONDS, MAX_OPEN_SECONDS, Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker = breaker.after_failure(now)
    return breaker


def test_it_opens_at_the_third_failure_in_a_row_and_not_before() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker = breaker.after_failure(0.0)
        assert breaker.allows(0.0)
    assert not breaker.after_failure(0.0).allows(0.0)


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(20):
        breaker = breaker.after_failure(0.0).after_failure(0.0).after_success()
    assert breaker.allows(0.0)


def test_half_open_lets_one_trial_through() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST_OPEN_SECONDS - 0.01)
    assert breaker.allows(FIRST_OPEN_SECONDS)
    trial = breaker.after_dispatch()
    assert not trial.allows(FIRST_OPEN_SECONDS)
    assert trial.after_success() == Breaker()
    assert trial.after_abandon().allows(FIRST_OPEN_SECONDS)


def test_a_failed_trial_opens_for_twice_as_long_up_to_a_bound() -> None:
    now, breaker = 0.0, opened()
    for number in range(1, 12):
        assert breaker.open_until is not None
        now = breaker.open_until
        breaker = breaker.after_dispatch().after_failure(now)
        assert breaker.open_until == now + min(MAX_OPEN_SECONDS, FIRST_OPEN_SECONDS * 2**number)


def test_c39_a_burst_that_fails_of_one_outage_opens_it_once() -> None:
    breaker = opened()
    for _ in range(50):
        breaker = breaker.after_failure(0.1)
    assert breaker == opened()


def test_c39_the_latest_deadline_wins() -> None:
    breaker = Breaker().after_full(0.0, 10.0).after_full(0.5, 1.0)
    assert breaker.is_full(9.9)
    assert not breaker.is_full(10.0)
    assert breaker.after_failure(0.6).after_success().is_full(9.9)
    assert breaker.blocked_until(1.0) == 10.0


def test_c38_full_is_no_failure() -> None:
    breaker = Breaker()
    for _ in range(50):
        breaker = breaker.after_full(0.0, 1.0)
    assert breaker.allows(0.0)


@given(st.lists(st.sampled_from(["failure", "success", "full", "dispatch", "abandon"]), max_size=60))
def test_whatever_happens_it_is_tried_again_in_bounded_time(events: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    for event in events:
        now += 0.1
        match event:
            case "failure":
                breaker = breaker.after_failure(now)
            case "success":
                breaker = breaker.after_success()
            case "full":
                breaker = breaker.after_full(now, 2.0)
            case "dispatch":
                breaker = breaker.after_dispatch()
            case _:
                breaker = breaker.after_abandon()
        assert breaker.blocked_until(now) <= now + MAX_OPEN_SECONDS
        assert breaker.after_abandon().allows(breaker.blocked_until(now))
