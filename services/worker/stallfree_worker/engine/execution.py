"""When a planned step is computed: in the caller's own time, or beside it in a thread. Called by `engine`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from stallfree_worker.engine.step import Runner, StepPlan, StepResult


class Execution(Protocol):
    """Computes one step after the other."""

    @property
    def overlaps(self) -> bool:
        """Whether a step is computed while its caller does something else."""
        ...

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begins a step. What it returns waits for the result, and raises what the runner raised; it is called before
        the next step begins."""
        ...


class InlineExecution:
    """Computes a step when its result is asked for."""

    overlaps = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        return lambda: self._runner.execute(plan)


class ThreadExecution:
    """Computes steps in one thread of its own. Worth it where the device computes and the host waits: on a GPU, or
    where a CPU has a core more than the model's threads take."""

    overlaps = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steps")

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self._thread.submit(self._runner.execute, plan).result
