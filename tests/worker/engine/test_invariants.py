"""Random submits, steps and cancels against the engine's invariants, which are checked after every move.

What a plan may be is judged from outside: from the events, the plans and the checked runner's own cache.
"""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import KVGroup, StepPlan
from tests.worker.engine.bench import Bench, MovingBudget, prompt_of
from tests.worker.engine.checked_runner import do_nothing

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 5), (3,), (None, 4, 4))
"""Of the model's KV groups."""


class EngineMachine(RuleBasedStateMachine):
    num_runs = 0
    num_preemptions = 0
    num_restarts = 0
    num_cancels_in_flight = 0
    num_cached_tokens = 0

    @initialize(
        num_blocks=st.integers(2, 8),
        block_size=st.integers(1, 4),
        token_budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        windows=st.sampled_from(WINDOWS),
        has_prefix_cache=st.sampled_from([True, True, False]),
        overlaps=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        max_num_seqs: int,
        windows: tuple[int | None, ...],
        *,
        has_prefix_cache: bool,
        overlaps: bool,
    ) -> None:
        type(self).num_runs += 1
        self.budget = MovingBudget(token_budget)
        self.budgets = [token_budget]
        """Those that the next step may have been composed with: the one of the step before too, with overlap."""
        self.overlaps = overlaps
        self.bench = Bench(
            num_blocks=num_blocks * len(windows),
            block_size=block_size,
            max_model_len=num_blocks * block_size,
            budget=self.budget,
            max_num_seqs=max_num_seqs,
            kv_groups=tuple(KVGroup(window_tokens=window) for window in windows),
            has_prefix_cache=has_prefix_cache,
            max_prefill_wait_seconds=1.0,
            priority_step_seconds=5.0,
            overlaps=overlaps,
        )
        self.capacity = self.bench.engine.max_model_len
        self.arrivals: dict[RequestId, int] = {}
        """Requests inside the engine, and their place in the order of arrival."""
        self.decoding: set[RequestId] = set()
        """Requests that the last step gave a token, and that go on."""
        self.running: set[RequestId] = set()
        """Requests that hold blocks, or held some when the next step may have been composed."""
        self.order: dict[RequestId, int] = {}
        """Places in the order of arrival, those of ended requests too."""

    @rule(
        prompt=st.integers(1, 100),
        max_tokens=st.integers(1, 100),
        priority=st.integers(-1, 2),
        ttft_target_seconds=st.sampled_from([0.02, 0.5, 5.0]),
        text=st.sampled_from([None, 0, 0, 1]),
        cache_salt=st.sampled_from(["", "", "x"]),
    )
    def submit(
        self,
        prompt: int,
        max_tokens: int,
        priority: int,
        ttft_target_seconds: float,
        text: int | None,
        cache_salt: str,
    ) -> None:
        self._submit(
            prompt,
            max_tokens,
            priority=priority,
            ttft_target_seconds=ttft_target_seconds,
            text=text,
            cache_salt=cache_salt,
        )

    @rule(prompt=st.integers(1, 30), count=st.integers(2, 5), max_tokens=st.integers(1, 10))
    def submit_siblings(self, prompt: int, count: int, max_tokens: int) -> None:
        """Several answers to one prompt."""
        for _ in range(count):
            self._submit(prompt, max_tokens, text=0)

    @rule(prompt=st.integers(1, 8), count=st.integers(2, 5))
    def submit_long_answers(self, prompt: int, count: int) -> None:
        """Requests that all fit at first, and that together outgrow the cache."""
        for _ in range(count):
            self._submit(prompt, self.capacity)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        """Nothing is computed for a while: requests become urgent and overdue, and age."""
        self.bench.clock.now += seconds

    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step_once()

    @rule(max_tokens=st.integers(1, 24))
    def change_budget(self, max_tokens: int) -> None:
        self.budgets = [*(self.budgets if self.overlaps else ()), max_tokens]
        self.budget.max_tokens = max_tokens

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.arrivals)))
        assert self.bench.engine.cancel(request_id)
        assert not self.bench.engine.cancel(request_id)
        self._leave(request_id)

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.arrivals)))

        def cancel_now(plan: StepPlan) -> None:
            assert self.bench.engine.cancel(request_id)
            self.bench.engine.check_integrity()

        self.bench.runner.during_step = cancel_now
        self._step_once(cancelled=request_id)
        type(self).num_cancels_in_flight += 1
        self.bench.runner.during_step = do_nothing

    @invariant()
    def state_is_whole(self) -> None:
        self.bench.engine.check_integrity()
        status = self.bench.engine.status()
        assert status.requests_running + status.requests_waiting == len(self.arrivals)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        lengths = [len(new.prompt_token_ids) + new.sampling.max_tokens for new in self.bench.new_by_id.values()]
        for _ in range(sum(lengths) * (len(lengths) + 1)):
            if not self.bench.engine.has_work:
                break
            self._step_once()
        self.bench.assert_idle()
        type(self).num_preemptions += sum(report.num_preemptions for report in self.bench.reports)
        type(self).num_cached_tokens += sum(report.num_prefix_hit_tokens for report in self.bench.reports)
        type(self).num_restarts += sum(len(restarts) for restarts in self.bench.runner.restarts_by_id.values())

    def _submit(
        self,
        prompt: int,
        max_tokens: int,
        *,
        priority: int = 0,
        ttft_target_seconds: float = 5.0,
        text: int | None = None,
        cache_salt: str = "",
    ) -> None:
        """`text` is the number of a text that prompts of any length begin; None: one that nobody else has."""
        prompt = min(prompt, self.capacity - 1)
        request_id = self.bench.submit(
            prompt if text is None else prompt_of(prompt, text),
            cache_salt=cache_salt,
            max_tokens=min(max_tokens, self.capacity - prompt),
            priority=priority,
            ttft_target_seconds=ttft_target_seconds,
        )
        self.arrivals[request_id] = self.order[request_id] = len(self.bench.new_by_id)

    def _step_once(self, cancelled: RequestId | None = None) -> None:
        has_work = self.bench.engine.has_work
        num_plans = len(self.bench.runner.plans)
        report = self.bench.step()
        assert len(self.bench.runner.plans) - num_plans == has_work, "work is there and nothing was planned"
        if not has_work:
            return
        self._check_plan(self.bench.runner.plans[-1])
        assert cancelled not in {event.request_id for event in report.events}
        ended = {event.request_id for event in report.events if event.finish_reason is not None}
        self.decoding = {event.request_id for event in report.events} - ended
        for request_id in ended:
            self.bench.assert_outputs_are_right(request_id)
        for request_id in ended | ({cancelled} if cancelled else set()):
            self._leave(request_id)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= max(self.budgets) or plan.num_prefill_tokens == 0
        self.budgets = [self.budget.max_tokens]
        num_decodes = sum(len(chunk.token_ids) == 1 and bool(chunk.output_index) for chunk in plan.chunks)
        assert plan.num_decode_tokens <= num_decodes, "a prefill was counted as a decode"
        planned = {chunk.request_id for chunk in plan.chunks}
        assert len(planned) <= self.bench.settings.max_num_seqs
        missing = self.decoding - planned
        assert len(missing) <= len(plan.preempted_request_ids), "a decode was left out of the step"
        self._check_evictions(set(plan.preempted_request_ids))
        self.running = ((self.running & self.arrivals.keys()) | planned) - set(plan.preempted_request_ids)

    def _check_evictions(self, evicted: set[RequestId]) -> None:
        """Who has the best priority, and is the oldest of those, loses its blocks to a better priority only."""
        if self.running and (oldest := min(self.running, key=self._seniority)) in evicted:
            better = [other for other in self.order if self._seniority(other)[0] < self._seniority(oldest)[0]]
            assert better, "the oldest lost its blocks"

    def _seniority(self, request_id: RequestId) -> tuple[int, int]:
        return self.bench.new_by_id[request_id].priority, self.order[request_id]

    def _leave(self, request_id: RequestId) -> None:
        del self.arrivals[request_id]
        self.decoding.discard(request_id)


@pytest.mark.parametrize("num_runs", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_invariants_hold_over_random_submits_steps_and_cancels(
    capsys: pytest.CaptureFixture[str], num_runs: int
) -> None:
    EngineMachine.num_runs = 0
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=15,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert EngineMachine.num_runs >= num_runs
    with capsys.disabled():
        sys.stdout.write(
            f"\nengine state machine: {EngineMachine.num_runs} runs, {EngineMachine.num_preemptions} preemptions, "
            f"{EngineMachine.num_restarts} restarts, {EngineMachine.num_cancels_in_flight} cancels in flight, "
            f"{EngineMachine.num_cached_tokens} tokens from the prefix cache\n"
        )
