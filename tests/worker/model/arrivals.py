"""The real engine on a runner, with requests that come and go while others run: what each of them was told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import FinishReason, RequestId, SamplingParams, TokenLogprobs
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.execution import ThreadExecution
from stallfree_worker.engine.step import EngineEvent, NewRequest, Runner
from stallfree_worker.settings import SchedulerSettings
from tests.worker.engine.bench import MovingBudget

WHOLE = 1_000_000
"""A token budget that no prompt exceeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    prompt: Sequence[int]
    sampling: SamplingParams
    at_step: int = 0
    leaves_after: int | None = None
    """Output tokens after which the client is gone."""


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    events: list[EngineEvent] = field(default_factory=list)

    def note(self, event: EngineEvent) -> None:
        assert event.output_index == len(self.token_ids)
        assert event.token_id is None or event.prompt_logprobs is None or event.output_index == 0
        self.events.append(event)
        self.token_ids += [] if event.token_id is None else [event.token_id]
        self.logprobs += [] if event.logprobs is None else [event.logprobs]
        self.prompt_logprobs += event.prompt_logprobs or ()
        self.finish_reason, self.error = event.finish_reason, event.error


class ArrivalsDriver:
    """One engine. `first_budget` is the token budget of the first step, where it is to differ from all others."""

    def __init__(
        self,
        runner: Runner,
        *,
        token_budget: int = WHOLE,
        first_budget: int | None = None,
        overlaps: bool = False,
    ) -> None:
        self._num_blocks = runner.num_blocks
        self._token_budget = token_budget
        self._budget = MovingBudget(first_budget or token_budget)
        self.engine = Engine(
            SchedulerSettings(),
            runner,
            itertools.count().__next__,
            budget=self._budget,
            execution=ThreadExecution(runner) if overlaps else None,
        )
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    def run(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        """Serves them all to their ends; every block is free afterwards."""
        answers = [Answer() for _ in arrivals]
        last_arrival = max(arrival.at_step for arrival in arrivals)
        for step in itertools.count():
            for index, arrival in enumerate(arrivals):
                if arrival.at_step == step:
                    self.submit(index, arrival)
            if step > last_arrival and not self.engine.has_work:
                break
            self._step(arrivals, answers)
        self.engine.check_integrity()
        assert self.engine.status().num_free_blocks == self._num_blocks
        return answers

    def _step(self, arrivals: Sequence[Arrival], answers: Sequence[Answer]) -> None:
        report = self.engine.step()
        self._budget.max_tokens = self._token_budget
        self.num_preemptions += report.num_preemptions
        self.num_recomputed_tokens += report.num_recomputed_tokens
        for event in report.events:
            index = int(event.request_id)
            answers[index].note(event)
            if len(answers[index].token_ids) == arrivals[index].leaves_after:
                self.engine.cancel(event.request_id)

    def submit(self, index: int, arrival: Arrival) -> None:
        new = NewRequest(
            request_id=RequestId(str(index)),
            prompt_token_ids=tuple(arrival.prompt),
            sampling=arrival.sampling,
            tbt_target_seconds=1.0,
        )
        self.engine.submit(new)


def answer_alone(runner: Runner, arrival: Arrival, *, token_budget: int = WHOLE) -> Answer:
    """What a request is told when nothing else exists."""
    (answer,) = ArrivalsDriver(runner, token_budget=token_budget).run([arrival])
    return answer
