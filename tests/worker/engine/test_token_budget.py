from __future__ import annotations

from stallfree_worker.engine.token_budget import FixedTokenBudget


def test_the_budget_is_what_is_left_and_never_negative() -> None:
    budget = FixedTokenBudget(8)
    assert [budget.tokens_left(planned) for planned in (0, 3, 8, 9, 100)] == [8, 5, 0, 0, 0]
