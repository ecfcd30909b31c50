"""The real engine on a runner: prompts in, their output tokens out, and how often one of them was preempted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.execution import ThreadExecution
from stallfree_worker.engine.step import KVGroup, NewRequest, Runner, StepPlan, StepResult
from stallfree_worker.settings import BatchingName, SchedulerSettings
from tests.worker.engine.bench import MovingBudget

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
WHOLE = 1_000_000
"""A token budget that no prompt exceeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPool:
    """A runner of which only the first `num_blocks` blocks may be used."""

    runner: Runner
    num_blocks: int

    @property
    def block_size(self) -> int:
        return self.runner.block_size

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.runner.kv_groups

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.runner.eos_token_ids

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)


class EngineDriver:
    """Runs prompts to their ends, all of them submitted before the first step, in the order given.

    `first_budget` is the token budget of the first step, where it is to differ from that of all others.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        token_budget: int = WHOLE,
        first_budget: int | None = None,
        batching: BatchingName = "sarathi",
        has_prefix_cache: bool = True,
        overlaps: bool = False,
    ) -> None:
        self._budget = MovingBudget(first_budget or token_budget)
        self._token_budget = token_budget
        self._num_blocks = runner.num_blocks
        self._engine = Engine(
            SchedulerSettings(batching=batching),
            runner,
            itertools.count().__next__,
            budget=self._budget,
            has_prefix_cache=has_prefix_cache,
            execution=ThreadExecution(runner) if overlaps else None,
        )
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Tokens that the prefix cache spared."""

    def generate(
        self, prompts: Sequence[Sequence[int]], *, num_tokens: int, sampling: Sequence[SamplingParams] | None = None
    ) -> list[list[int]]:
        """The `num_tokens` output tokens of each prompt; every block is free afterwards, if it is in the prefix
        cache or not."""
        for index, (prompt, params) in enumerate(zip(prompts, sampling or [GREEDY] * len(prompts), strict=True)):
            self._submit(index, prompt, params.model_copy(update={"max_tokens": num_tokens, "ignore_eos": True}))
        outputs: list[list[int]] = [[] for _ in prompts]
        while self._engine.has_work:
            report = self._engine.step()
            self._budget.max_tokens = self._token_budget
            self.num_preemptions += report.num_preemptions
            self.num_cached_tokens += report.num_prefix_hit_tokens
            for event in report.events:
                assert event.token_id is not None, event.error
                outputs[int(event.request_id)].append(event.token_id)
        self._engine.check_integrity()
        assert self._engine.status().num_free_blocks == self._num_blocks
        return outputs

    def _submit(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        new = NewRequest(
            request_id=RequestId(str(index)),
            prompt_token_ids=tuple(prompt),
            sampling=params,
            tbt_target_seconds=1.0,
        )
        self._engine.submit(new)
