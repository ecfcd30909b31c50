"""The loop inside the engine's process, with the real engine and a scripted runner, without a process."""

from __future__ import annotations

import queue
import threading

import pytest

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.execution import ThreadExecution
from stallfree_worker.engine.integrity import IntegrityError
from stallfree_worker.engine.step import NewRequest, StepPlan, StepResult
from stallfree_worker.engine.token_budget import TokenBudget
from stallfree_worker.engine_loop import EngineLoop
from stallfree_worker.engine_messages import Cancel, Command, EngineReport, Stop, Submit
from stallfree_worker.settings import SchedulerSettings
from tests.support.scripted import EOS, FAIL_ROW, ScriptedRunner
from tests.worker.engine.bench import MovingBudget

A, B = 40, 41


class Clock:
    """Every look at it is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _submit(request_id: str, *prompt: int, max_tokens: int = 100) -> Submit:
    return Submit(
        request=NewRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            tbt_target_seconds=1.0,
        )
    )


def _engine(budget: TokenBudget | None = None, *, overlaps: bool = False) -> Engine:
    runner = ScriptedRunner(num_blocks=8)
    execution = ThreadExecution(runner) if overlaps else None
    return Engine(SchedulerSettings(), runner, Clock(), budget=budget, execution=execution)


class _StopAfter:
    """Takes reports, and sends commands at given report numbers: the front of these tests."""

    def __init__(self, commands: queue.SimpleQueue[Command], plan: dict[int, Command], *, stop_at: int) -> None:
        self.reports: list[EngineReport] = []
        self._commands = commands
        self._plan = {**plan, stop_at: Stop()}

    def __call__(self, report: EngineReport) -> None:
        if command := self._plan.get(len(self.reports)):
            self._commands.put(command)
        self.reports.append(report)


def _run(engine: Engine, plan: dict[int, Command], *, stop_at: int) -> list[EngineReport]:
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    front = _StopAfter(commands, plan, stop_at=stop_at)
    EngineLoop(engine, commands=commands, send_report=front).run()
    return front.reports


def test_submit_is_acknowledged_by_the_first_report_that_includes_it() -> None:
    reports = _run(_engine(), {0: _submit("a", A, B)}, stop_at=4)
    assert [report.submits_taken for report in reports] == [0, 1, 1, 1, 1]
    assert [event.token_id for report in reports for event in report.step.events] == [A, B, EOS]


def test_refused_submit_becomes_the_error_event_of_its_request_and_counts_as_taken() -> None:
    reports = _run(_engine(), {0: _submit("too-long", A, max_tokens=10_000)}, stop_at=1)
    (event,) = reports[1].step.events
    assert event.request_id == "too-long"
    assert event.error is not None
    assert event.error.code == "context_length_exceeded"
    assert reports[1].submits_taken == 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_cancelled_request_is_freed_before_the_next_step(*, overlaps: bool) -> None:
    """With overlap report 2 leaves when step 3 has begun, so that step is the last with the request."""
    last = 3 if overlaps else 2
    reports = _run(
        _engine(overlaps=overlaps),
        {0: _submit("a", *[A] * 50, max_tokens=60), 2: Cancel(request_id=RequestId("a"))},
        stop_at=last + 1,
    )
    assert reports[last].step.status.requests_running == 1
    assert reports[last + 1].step.events == ()
    assert reports[last + 1].step.status.num_free_blocks == reports[last + 1].step.status.num_blocks
    assert reports[last + 1].step.status.requests_running == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_last_report_does_not_wait_for_more_work(*, overlaps: bool) -> None:
    """Stop is sent when the end was told, so this would never return."""
    reports = _run(_engine(overlaps=overlaps), {0: _submit("a", A, B)}, stop_at=3)
    assert [event.token_id for report in reports for event in report.step.events] == [A, B, EOS]
    assert reports[3].step.status.requests_running == 0


class PatientRunner(ScriptedRunner):
    """Ends no step before the report of the one before has left."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)
        self.told = threading.Semaphore(1)

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.told.acquire(timeout=10), "the step before has not been told"
        return super().execute(plan)


def test_tokens_leave_while_the_next_step_is_computed() -> None:
    runner = PatientRunner()
    engine = Engine(SchedulerSettings(), runner, Clock(), execution=ThreadExecution(runner))
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    commands.put(_submit("a", *[A] * 5))
    tokens: list[int | None] = []

    def send(report: EngineReport) -> None:
        tokens.extend([event.token_id for event in report.step.events])
        if report.step.record is not None:
            runner.told.release()
        if tokens[-1:] == [EOS]:
            commands.put(Stop())

    EngineLoop(engine, commands=commands, send_report=send).run()
    assert tokens == [A] * 5 + [EOS]


def test_b33_row_with_broken_logits_fails_alone() -> None:
    reports = _run(_engine(), {0: _submit("bad", A, FAIL_ROW), 1: _submit("good", A, B)}, stop_at=6)
    events = [event for report in reports for event in report.step.events]
    assert [event.token_id for event in events if event.request_id == "good"] == [A, B, EOS]
    assert [event.error is not None for event in events if event.request_id == "bad"] == [False, True]


def test_b34_engine_that_has_work_and_can_compute_none_of_it_fails_at_once() -> None:
    with pytest.raises(IntegrityError, match="left every request out"):
        _run(_engine(MovingBudget(0)), {0: _submit("a", A)}, stop_at=1000)
