"""How many tokens one step may compute. Asked by the batch while it is composed; pure."""

from __future__ import annotations

from typing import Protocol


class TokenBudget(Protocol):
    def tokens_left(self, num_planned_tokens: int) -> int:
        """Tokens that may join a step of `num_planned_tokens`; never negative."""
        ...


class FixedTokenBudget:
    """The same number of tokens for every step: τ of Sarathi-Serve (arXiv 2403.02310, §4.3). Decodes count."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def tokens_left(self, num_planned_tokens: int) -> int:
        # Decodes go whether the budget holds them or not, so a step may be beyond it already.
        return max(0, self._max_tokens - num_planned_tokens)
