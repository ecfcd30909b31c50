"""The budget by TBT target, in the real engine on a made-up machine with a virtual clock: streams decode, a long prompt
arrives, and no stream waits longer than its target."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.calibration import calibrate
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest, StepPlan, StepResult
from stallfree_worker.settings import SchedulerSettings
from tests.support.scripted import ScriptedRunner
from tests.worker.engine.test_step_time import Machine, small_machine

LONG = RequestId("long")
LONG_TOKENS = 4096


class TimedRunner(ScriptedRunner):
    """Takes as long as its machine says, with some noise."""

    def __init__(self, machine: Machine, *, noise: float) -> None:
        super().__init__(num_blocks=8192, max_model_len=100_000)
        self.machine = machine
        self.now = 0.0
        self._noise = noise
        self._rng = random.Random(11)

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += self.machine(plan.shape) * self._rng.lognormvariate(0, self._noise)
        return super().execute(plan)


@dataclass
class Load:
    """An engine under load, and the gaps between tokens that it gave."""

    settings: SchedulerSettings
    machine: Machine = small_machine
    noise: float = 0.0
    gaps: list[float] = field(default_factory=list)
    long_ttft: float | None = None

    def __post_init__(self) -> None:
        self.runner = TimedRunner(self.machine, noise=self.noise)
        self.engine = Engine(self.settings, self.runner, lambda: self.runner.now)
        calibrate(self.engine, max_chunk_tokens=self.settings.max_step_tokens)
        self.num_submitted = 0

    def submit(self, num_tokens: int, *, request_id: RequestId | None = None, max_tokens: int = 3000) -> None:
        self.num_submitted += 1
        self.engine.submit(
            NewRequest(
                request_id=request_id or RequestId(f"r{self.num_submitted}"),
                prompt_token_ids=(50,) * num_tokens,
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
                tbt_target_seconds=self.settings.tbt_target_seconds,
                cache_salt=f"{self.num_submitted}",  # all these prompts are alike, and none shall find another's blocks
            )
        )

    def step(self) -> None:
        for event in self.engine.step().events:
            if event.request_id == LONG and event.output_index == 0:
                self.long_ttft = event.time_to_first_token_seconds
            elif event.request_id != LONG and event.time_between_tokens_seconds is not None:
                self.gaps.append(event.time_between_tokens_seconds)

    def run_long_prompt(self, *, num_streams: int = 8) -> None:
        """Streams decode; a long prompt arrives; its prefill's gaps are kept."""
        for _ in range(num_streams):
            self.submit(512)
        for _ in range(60):
            self.step()
        self.gaps.clear()
        self.submit(LONG_TOKENS, request_id=LONG, max_tokens=1)
        while self.long_ttft is None:
            self.step()


def settings_for(target: float, budget: object = "auto") -> SchedulerSettings:
    return SchedulerSettings.model_validate({"token_budget": budget, "tbt_target_seconds": target})


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


@pytest.mark.parametrize("target", [0.1, 0.2, 0.5])
def test_no_stream_waits_longer_than_its_target_for_a_long_prompt(target: float) -> None:
    load = Load(settings_for(target), noise=0.03)
    load.run_long_prompt()
    assert p99(load.gaps) <= target


@pytest.mark.parametrize("target", [0.1, 0.2, 0.5])
def test_the_long_prompt_is_no_later_than_with_the_best_fixed_budget_that_keeps_the_target(target: float) -> None:
    auto = Load(settings_for(target))
    auto.run_long_prompt()
    fixed: list[float] = []
    for budget in (32, 48, 64, 96, 128, 192, 256, 384, 512, 1024):
        load = Load(settings_for(target, budget))
        load.run_long_prompt()
        if p99(load.gaps) <= target and load.long_ttft is not None:
            fixed.append(load.long_ttft)
    assert auto.long_ttft is not None
    assert auto.long_ttft <= 1.05 * min(fixed)


def test_the_budget_follows_when_the_machine_becomes_slower() -> None:
    """A core is taken away amid a prefill: after 20 steps every gap is within the target again."""
    load = Load(settings_for(0.2), noise=0.03)
    load.run_long_prompt()
    load.submit(LONG_TOKENS, request_id=LONG, max_tokens=1)
    load.runner.machine = lambda shape: 1.8 * small_machine(shape)
    for _ in range(20):
        load.step()
    load.gaps.clear()
    for _ in range(30):
        load.step()
    assert p99(load.gaps) <= 0.2


def test_the_budget_follows_when_the_batch_grows() -> None:
    """From 2 streams to 32 with long contexts."""
    load = Load(settings_for(0.2), noise=0.03)
    load.run_long_prompt(num_streams=2)
    for _ in range(30):
        load.submit(1000)
    for _ in range(250):
        load.step()
    load.gaps.clear()
    load.submit(LONG_TOKENS, request_id=RequestId("long-2"), max_tokens=1)
    for _ in range(60):
        load.step()
    assert p99(load.gaps) <= 0.2


def test_a_target_that_cannot_be_met_still_moves_the_prompt() -> None:
    """Decodes alone take longer than the target: the prefill goes on in its least chunks."""
    load = Load(settings_for(0.02))
    load.run_long_prompt()
    assert load.long_ttft is not None
