"""Prints what the scheduler costs, as a Markdown table: microseconds of schedule and apply for each step, by how many
requests run and how many wait.

    python -m tests.worker.engine.scheduling_cost

The runner computes nothing, so nothing but the engine's own work is measured, with its real clock: the two durations
that every step's record has. The token budget is that of production, learned from steps that take as long as a small
model's; a long prompt is being prefilled in every step, so the budget is searched and the order is asked each time.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import KVGroup, NewRequest, StepPlan, StepResult
from stallfree_worker.settings import SchedulerSettings

RUNNING = (8, 32, 64, 128, 256)
WAITING = (0, 1_000, 10_000)
NUM_STEPS = 200
NUM_WARM_UP_STEPS = 40
_LONG_TOKENS = 100_000


@dataclass(slots=True)
class ShiftedClock:
    """The real one, ahead by the time that steps would have taken."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead


class FreeRunner:
    """Takes a step's time without spending it."""

    num_blocks = 1_000_000
    block_size = 16
    max_model_len = 200_000
    eos_token_ids = frozenset({0})
    kv_groups = (KVGroup(), *[KVGroup(window_tokens=512)] * 5)
    """As Gemma 3 has them."""

    def __init__(self, clock: ShiftedClock) -> None:
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self._clock.ahead += 0.03 + 0.0008 * plan.num_prefill_tokens + 0.0002 * plan.num_decode_tokens
        tokens = {chunk.request_id: 1 for chunk in plan.chunks if chunk.output_index is not None}
        return StepResult(step_id=plan.step_id, token_id_by_request=tokens, failure_by_request={})


class Load:
    """`num_running` streams and a long prompt run, and `num_waiting` prompts of mixed lengths and priorities wait."""

    def __init__(self, *, num_running: int, num_waiting: int) -> None:
        settings = SchedulerSettings(
            max_num_seqs=num_running + 1, max_waiting_requests=20_000, max_waiting_tokens=10**9, tbt_target_seconds=0.5
        )
        clock = ShiftedClock()
        self.engine = Engine(settings, FreeRunner(clock), clock)
        self._rng = random.Random(7)
        self._num_submitted = 0
        for _ in range(num_running):
            self._submit(200, max_tokens=100_000)
        while self.engine.status().prefill_tokens_left:
            self.engine.step()
        self._submit(_LONG_TOKENS, max_tokens=1)
        self.engine.step()
        for _ in range(num_waiting):
            self._submit(self._rng.randint(1, 8000), max_tokens=10, priority=self._rng.randint(0, 3))

    def _submit(self, num_tokens: int, *, max_tokens: int, priority: int = 0) -> None:
        self._num_submitted += 1
        self.engine.submit(
            NewRequest(
                request_id=RequestId(f"r{self._num_submitted}"),
                prompt_token_ids=(5,) * num_tokens,
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                tbt_target_seconds=0.5,
                priority=priority,
                cache_salt=f"{self._num_submitted}",
            )
        )

    def microseconds(self) -> list[float]:
        """Of schedule and apply together, step by step."""
        seconds = []
        for number in range(NUM_WARM_UP_STEPS + NUM_STEPS):
            record = self.engine.step().record
            if record is not None and number >= NUM_WARM_UP_STEPS:
                seconds.append(record.schedule_seconds + record.apply_seconds)
        return sorted(1e6 * value for value in seconds)


def cost(*, num_running: int, num_waiting: int) -> str:
    """The median, and the 10th and 90th percentile."""
    values = Load(num_running=num_running, num_waiting=num_waiting).microseconds()
    low, high = values[len(values) // 10], values[len(values) * 9 // 10]
    return f"{statistics.median(values):.0f} ({low:.0f}-{high:.0f})"


def main() -> None:
    sys.stdout.write("| running | " + " | ".join(f"{count:,} waiting" for count in WAITING) + " |\n")
    sys.stdout.write("|---" * (1 + len(WAITING)) + "|\n")
    for num_running in RUNNING:
        cells = [cost(num_running=num_running, num_waiting=num_waiting) for num_waiting in WAITING]
        sys.stdout.write(f"| {num_running} | " + " | ".join(cells) + " |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
