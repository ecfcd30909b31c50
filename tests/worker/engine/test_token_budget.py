"""Budgets by number, by position and by target, asked as a batch asks them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_worker.engine.step_time import StepShape, StepTimeModel
from stallfree_worker.engine.token_budget import (
    MIN_CHUNK_TOKENS,
    FixedTokenBudget,
    PositionTable,
    PositionTokenBudget,
    TargetLimits,
    TargetTokenBudget,
    TokenBudget,
    make_token_budget,
)
from stallfree_worker.settings import SchedulerSettings
from tests.worker.engine.test_step_time import decodes, learned, prefill, small_machine

LIMITS = TargetLimits(max_step_seconds=0.5, max_step_tokens=2048)


def tokens_left(
    budget: TokenBudget, shape: StepShape, *, context: int = 0, most: int = 10_000, slack: float = 1
) -> int:
    """What a step of `shape` may take besides, with its decodes due in `slack` seconds."""
    deadlines = [slack] if shape.num_tokens > shape.num_prefill_tokens else []
    return budget.for_step(token_deadlines=deadlines, now=0.0).tokens_left(shape, context_tokens=context, most=most)


def test_a_fixed_budget_is_what_is_left_and_never_negative() -> None:
    budget = FixedTokenBudget(8)
    assert [tokens_left(budget, decodes(planned)) for planned in (0, 3, 8, 9, 100)] == [8, 5, 0, 0, 0]


def test_a_budget_by_position_shrinks_along_the_prompt_and_takes_any_length() -> None:
    budget = PositionTokenBudget(PositionTable(largest_tokens=2048, smallest_tokens=128, tokens_per_stage=8192))
    sizes = [tokens_left(budget, StepShape(), context=position) for position in range(0, 400_000, 4096)]
    assert sizes[0] == 2048
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 128
    assert tokens_left(budget, decodes(3000), context=0) == 0


def test_a_last_chunk_that_needs_logits_must_fit_with_what_they_take() -> None:
    model = StepTimeModel()
    for _ in range(50):
        for shape in (prefill(64), decodes(2), decodes(2).with_chunk(64, 0, is_last=True)):
            model.observe(shape, 0.05)
            model.observe(shape._replace(needs_logits=True), 0.15)
    step = TargetTokenBudget(model, LIMITS).for_step(token_deadlines=[0.11], now=0.0)
    assert step.tokens_left(decodes(2), context_tokens=0, most=64) == 64
    assert step.tokens_left(decodes(2), context_tokens=0, most=64, needs_logits=True) == 62


@pytest.mark.parametrize("target", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("context", [0, 4000, 16_000])
def test_a_budget_by_target_is_the_most_that_fits(target: float, context: int) -> None:
    model = learned(small_machine)
    budget = TargetTokenBudget(model, LIMITS)
    budget.note_limited(100)
    shape = decodes(8)
    chunk = tokens_left(budget, shape, context=context, slack=target)
    seconds = target - max(LIMITS.margin_seconds, LIMITS.margin_ratio * target)
    fits = model.predict(shape.with_chunk(chunk, context, is_last=False), quantile=LIMITS.quantile)
    more = chunk + LIMITS.tile_tokens
    too_long = model.predict(shape.with_chunk(more, context, is_last=False), quantile=LIMITS.quantile)
    assert fits <= seconds < too_long or chunk == MIN_CHUNK_TOKENS
    assert chunk == MIN_CHUNK_TOKENS or (shape.num_tokens + chunk) % LIMITS.tile_tokens == 0


def test_the_first_step_that_a_prefill_joins_is_smaller() -> None:
    budget = TargetTokenBudget(learned(small_machine), LIMITS)
    first = tokens_left(budget, decodes(8), slack=0.2)
    budget.note_limited(first)
    second = tokens_left(budget, decodes(8), slack=0.2)
    nothing_wanted_more = tokens_left(budget, decodes(8), slack=0.2)
    assert first == nothing_wanted_more < second


def test_a_step_that_is_late_already_still_moves_a_prefill() -> None:
    budget = TargetTokenBudget(learned(small_machine), LIMITS)
    assert tokens_left(budget, decodes(8), slack=-5.0) == MIN_CHUNK_TOKENS
    assert tokens_left(budget, decodes(8).with_chunk(MIN_CHUNK_TOKENS, 0, is_last=False), slack=-5.0) == 0


def test_without_decodes_a_step_is_bounded_in_seconds_alone() -> None:
    model = learned(small_machine)
    chunk = tokens_left(TargetTokenBudget(model, LIMITS), StepShape())
    assert chunk > tokens_left(TargetTokenBudget(model, LIMITS), decodes(8), slack=0.2)
    assert model.predict(prefill(chunk), quantile=LIMITS.quantile) <= LIMITS.max_step_seconds


@given(
    st.integers(0, 300),
    st.integers(0, 3000),
    st.integers(0, 100_000),
    st.integers(0, 100_000),
    st.floats(-10, 10),
    st.sampled_from(["auto", "by-position", 1, 64, 4096]),
)
def test_a_budget_is_never_negative_nor_more_than_asked(
    num_decodes: int, planned: int, context: int, most: int, slack: float, name: str
) -> None:
    settings = SchedulerSettings.model_validate({"token_budget": name})
    budget = make_token_budget(settings, StepTimeModel())
    shape = decodes(num_decodes).with_chunk(planned, 0, is_last=False)
    assert 0 <= tokens_left(budget, shape, context=context, most=most, slack=slack) <= most
    assert budget.typical_tokens > 0
