from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_router.policy import SLOW_START_SECONDS, Demand, WorkerView, pick, refusal
from stallfree_shared.errors import ContextLengthExceededError, OverloadedError
from stallfree_shared.load import Work, with_work
from stallfree_shared.worker_status import StepTimeCoefficients, WorkerStatus

DEMAND = Demand(model="m", prompt_tokens=100, max_tokens=50, expected_output_tokens=20)


def view(
    url: str = "a",
    *,
    model: str = "m",
    max_model_len: int = 1000,
    is_ready: bool = True,
    is_draining: bool = False,
    is_allowed: bool = True,
    is_full: bool = False,
    age_seconds: float = 100.0,
    running: int = 0,
    prefill: int = 0,
    speed: float = 1.0,
) -> WorkerView:
    status = WorkerStatus(
        sequence=1,
        is_ready=is_ready,
        is_draining=is_draining,
        max_num_seqs=64,
        token_budget_tokens=500,
        kv_total_tokens=100_000,
        kv_free_tokens=100_000,
        requests_running=running,
        requests_waiting=0,
        prefill_tokens_left=prefill,
        expected_output_tokens_left=10 * running,
        step_time=StepTimeCoefficients(base_seconds=0.01 * speed, seconds_per_token=0.0001 * speed),
    )
    return WorkerView(
        url=url,
        model=model,
        max_model_len=max_model_len,
        status=status,
        is_allowed=is_allowed,
        is_full=is_full,
        age_seconds=age_seconds,
    )


def picked(*views: WorkerView, tried: frozenset[str] = frozenset(), seed: int = 0) -> str | None:
    choice = pick(views, DEMAND, tried=tried, rng=random.Random(seed))
    return None if choice is None else choice.url


@pytest.mark.parametrize(
    "unfit",
    [
        view(model="other"),
        view(is_ready=False),
        view(is_draining=True),
        view(is_allowed=False),
        view(is_full=True),
        view(max_model_len=149),
    ],
)
def test_a_worker_that_cannot_take_the_request_is_never_picked(unfit: WorkerView) -> None:
    assert picked(unfit) is None
    assert picked(unfit, view("b", running=60, prefill=100_000)) == "b"


def test_the_exact_context_length_fits() -> None:
    assert picked(view(max_model_len=150)) == "a"


def test_of_two_the_one_with_less_delay_is_picked() -> None:
    for seed in range(20):
        assert picked(view("a", prefill=5000), view("b"), seed=seed) == "b"
        assert picked(view("a", speed=3.0), view("b"), seed=seed) == "b"
        assert picked(view("a", running=40), view("b"), seed=seed) == "b"


def test_a_tried_worker_comes_last() -> None:
    assert picked(view("a"), view("b", prefill=90_000), tried=frozenset({"a"})) == "b"
    assert picked(view("a"), tried=frozenset({"a"})) == "a"


def test_ties_are_random() -> None:
    counts = Counter(picked(view("a"), view("b"), view("c"), seed=seed) for seed in range(300))
    assert min(counts.values()) > 60


def test_the_choice_is_among_the_best_few_and_not_always_the_best() -> None:
    views = [view(str(number), prefill=1000 * number) for number in range(10)]
    counts = Counter(picked(*views, seed=seed) for seed in range(300))
    assert set(counts) == {"0", "1"}  # of the best three, the better of any two


def test_c07_a_burst_against_stale_numbers_is_shared() -> None:
    rng = random.Random(1)
    stale = [view("a"), view("b", running=1)]
    taken: Counter[str] = Counter()
    for _ in range(100):
        views = [
            WorkerView(
                **{
                    **{name: getattr(each, name) for name in WorkerView.__slots__},
                    "status": with_work(each.status, [DEMAND.work] * taken[each.url]),
                }
            )
            for each in stale
        ]
        choice = pick(views, DEMAND, tried=frozenset(), rng=rng)
        assert choice is not None
        taken[choice.url] += 1
    assert max(taken.values()) / min(taken.values()) <= 1.5


def test_c10_a_fresh_worker_is_given_its_share_over_seconds() -> None:
    old = [view(url, running=20, prefill=2000) for url in "abc"]

    def share(age_seconds: float) -> float:
        fresh = view("new", age_seconds=age_seconds)
        return sum(picked(*old, fresh, seed=seed) == "new" for seed in range(300)) / 300

    assert share(0.0) < 0.15
    assert share(0.0) < share(SLOW_START_SECONDS / 2) < share(SLOW_START_SECONDS)
    assert picked(view("new", age_seconds=0.0)) == "new"


def test_refusals_name_the_reason() -> None:
    too_long = refusal([view(max_model_len=149)], DEMAND, retry_after_seconds=1)
    assert isinstance(too_long, ContextLengthExceededError)
    assert "149" in too_long.message
    assert "150" in too_long.message
    full = refusal([view(is_full=True), view("b", is_full=True)], DEMAND, retry_after_seconds=4)
    assert isinstance(full, OverloadedError)
    assert full.retry_after_seconds == 4
    assert refusal([], DEMAND, retry_after_seconds=1) is None
    assert refusal([view(is_full=True), view("b", is_allowed=False)], DEMAND, retry_after_seconds=1) is not None
    assert refusal([view(is_ready=False)], DEMAND, retry_after_seconds=1) is None
    assert refusal([view(max_model_len=149), view("b", is_allowed=False)], DEMAND, retry_after_seconds=1) is None


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 60), st.floats(0, 30)), max_size=6), st.integers()
)
def test_whoever_is_picked_is_able_and_none_only_if_nobody_is(
    workers: list[tuple[bool, bool, int, float]], seed: int
) -> None:
    views = [
        view(str(place), is_ready=ready, is_full=full, running=running, age_seconds=age)
        for place, (ready, full, running, age) in enumerate(workers)
    ]
    able = {each.url for each in views if each.status.is_ready and not each.is_full}
    choice = picked(*views, seed=seed)
    assert choice in able if able else choice is None


def test_work_is_the_demands_prompt_and_expected_output() -> None:
    assert DEMAND.work == Work(prefill_tokens=100, output_tokens=20)


def test_answers_to_one_prompt_go_where_the_prompt_is() -> None:
    demand = replace(DEMAND, prompt_is_at="b")
    views = [view("a"), view("b", running=1, prefill=100), view("c")]
    for seed in range(20):
        choice = pick(views, demand, tried=frozenset(), rng=random.Random(seed))
        assert choice is not None
        assert choice.url == "b"
    assert demand.work_at("b") == Work(prefill_tokens=1, output_tokens=20)
    assert demand.work_at("a") == DEMAND.work


@pytest.mark.parametrize("worse", [{"prefill": 20_000}, {"is_full": True}, {"is_draining": True}, {"is_ready": False}])
def test_answers_to_one_prompt_go_elsewhere_where_that_worker_is_much_worse(worse: dict[str, Any]) -> None:
    demand = replace(DEMAND, prompt_is_at="b")
    choice = pick([view("a"), view("b", **worse)], demand, tried=frozenset(), rng=random.Random(0))
    assert choice is not None
    assert choice.url == "a"


def test_a_worker_that_was_tried_is_not_preferred_for_its_cache() -> None:
    demand = replace(DEMAND, prompt_is_at="b")
    choice = pick([view("a"), view("b")], demand, tried=frozenset({"b"}), rng=random.Random(0))
    assert choice is not None
    assert choice.url == "a"
