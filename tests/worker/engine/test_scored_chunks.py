"""Chunks whose prompt tokens' log-probabilities are told: their rows of the output layer count in the step's budget."""

from __future__ import annotations

import pytest

from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.step_time import StepShape
from tests.worker.engine.bench import Bench, MovingBudget

SCORED = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)


class RowBudget(MovingBudget):
    """A row of the output layer costs as much as a token."""

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int, needs_logits: bool = False) -> int:
        return max(0, min(most, self.max_tokens - shape.num_tokens - shape.num_rows))


@pytest.mark.parametrize(
    ("budget_tokens", "sizes"),
    [(600, [256, 256, 88]), (400, [64] * 7 + [152]), (100, [16] * 35 + [40]), (20, [4] * 147 + [8, 4])],
)
def test_a_scored_chunk_fits_the_budget_together_with_its_rows(budget_tokens: int, sizes: list[int]) -> None:
    bench = Bench(budget=RowBudget(budget_tokens), token_budget=1000)
    request = bench.submit(600, sampling=SCORED)
    bench.run()
    bench.assert_outputs_are_right()
    *chunks, decode = bench.chunk_sizes_of(request)
    assert (chunks, decode) == (sizes, 1)
    shapes = [plan.shape for plan in bench.runner.plans]
    # The prompt's last token predicts nothing of the prompt: its row is that of the draw.
    assert [shape.num_rows for shape in shapes] == [*chunks, 1]
    assert all(shape.num_tokens + shape.num_rows <= budget_tokens for shape in shapes)


def test_a_prompt_that_nobody_scores_takes_the_whole_budget_and_one_row() -> None:
    bench = Bench(budget=RowBudget(400), token_budget=1000)
    bench.submit(600, max_tokens=1)
    bench.run()
    assert [(plan.shape.num_tokens, plan.shape.num_rows) for plan in bench.runner.plans] == [(400, 0), (200, 1)]
