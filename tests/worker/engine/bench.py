"""An engine on a checked runner and a virtual clock, driven step by step; every step is followed by the self-check."""

from __future__ import annotations

from collections.abc import Sequence

from stallfree_shared.wire import FinishReason, RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.execution import InlineExecution
from stallfree_worker.engine.step import EngineEvent, KVGroup, NewRequest, StepReport
from stallfree_worker.engine.step_time import StepShape
from stallfree_worker.engine.token_budget import StepBudget, TokenBudget
from stallfree_worker.settings import BatchingName, SchedulerSettings
from tests.worker.engine.checked_runner import CheckedRunner, VirtualClock, reference_output

UNLIMITED_BLOCKS = 4096


class LateExecution(InlineExecution):
    """Composes the next step before it computes one: what overlap does, in an order that is always the same."""

    overlaps = True


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * position + 13 * salt) % 89 + 1 for position in range(length))


class MovingBudget:
    """A token budget that a test changes between steps, as a budget by target will."""

    limit_seconds = None

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    @property
    def limit_tokens(self) -> int:
        return self.max_tokens

    @property
    def typical_tokens(self) -> int:
        return self.max_tokens

    def for_step(self, *, token_deadlines: Sequence[float], now: float) -> StepBudget:
        return self

    def tokens_left(self, shape: StepShape, *, context_tokens: int, most: int, needs_logits: bool = False) -> int:
        return max(0, min(most, self.max_tokens - shape.num_tokens))

    def note_limited(self, num_tokens: int) -> None:
        """Nothing is learned from it."""


class Bench:
    def __init__(
        self,
        *,
        num_blocks: int = UNLIMITED_BLOCKS,
        block_size: int = 16,
        token_budget: int = 64,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_waiting_requests: int = 1024,
        max_waiting_tokens: int = 1_000_000,
        budget: TokenBudget | None = None,
        kv_groups: tuple[KVGroup, ...] = (KVGroup(),),
        has_prefix_cache: bool = True,
        batching: BatchingName = "sarathi",
        max_prefill_wait_seconds: float = 5.0,
        priority_step_seconds: float = 30.0,
        overlaps: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        self.runner = CheckedRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            clock=self.clock,
            max_model_len=max_model_len or num_blocks * block_size,
            kv_groups=kv_groups,
        )
        self.settings = SchedulerSettings(
            max_num_seqs=max_num_seqs,
            batching=batching,
            token_budget=token_budget,
            max_waiting_requests=max_waiting_requests,
            max_waiting_tokens=max_waiting_tokens,
            max_prefill_wait_seconds=max_prefill_wait_seconds,
            priority_step_seconds=priority_step_seconds,
        )
        self.engine = Engine(
            self.settings,
            self.runner,
            self.clock,
            budget=budget,
            has_prefix_cache=has_prefix_cache,
            execution=LateExecution(self.runner) if overlaps else None,
        )
        self.new_by_id: dict[RequestId, NewRequest] = {}
        self.events_by_id: dict[RequestId, list[EngineEvent]] = {}
        self.reports: list[StepReport] = []

    def submit(
        self,
        prompt: int | Sequence[int],
        *,
        max_tokens: int = 4,
        request_id: str | None = None,
        tbt_target_seconds: float = 10.0,
        ttft_target_seconds: float = 5.0,
        priority: int = 0,
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
    ) -> RequestId:
        """Submits a prompt, or one of that length; output does not end before `max_tokens` by default."""
        number = len(self.new_by_id)
        new = NewRequest(
            request_id=RequestId(request_id or f"r{number}"),
            prompt_token_ids=prompt_of(prompt, number) if isinstance(prompt, int) else tuple(prompt),
            sampling=sampling or SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number),
            tbt_target_seconds=tbt_target_seconds,
            ttft_target_seconds=ttft_target_seconds,
            priority=priority,
            cache_salt=cache_salt,
            expected_output_tokens=float(max_tokens),
        )
        self.engine.submit(new)
        self.runner.expect(new)
        self.new_by_id[new.request_id] = new
        self.events_by_id[new.request_id] = []
        return new.request_id

    def step(self) -> StepReport:
        report = self.engine.step()
        for event in report.events:
            self.events_by_id[event.request_id].append(event)
        self.reports.append(report)
        self.engine.check_integrity()
        return report

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, *, max_steps: int = 20_000) -> int:
        """Steps until nothing is left, and tells how many steps that took."""
        for count in range(max_steps):
            if not self.engine.has_work:
                return count
            self.step()
        message = f"work is left after {max_steps} steps"
        raise AssertionError(message)

    def output_of(self, request_id: RequestId) -> list[int]:
        """The tokens told so far, after checking that each index came once and in order."""
        events = self.events_by_id[request_id]
        assert [event.output_index for event in events] == list(range(len(events)))
        return [event.token_id for event in events if event.token_id is not None]

    def finish_reason_of(self, request_id: RequestId) -> FinishReason | None:
        return self.events_by_id[request_id][-1].finish_reason

    def num_restarts_of(self, request_id: RequestId) -> int:
        return len(self.runner.restarts_by_id.get(request_id, []))

    def chunk_sizes_of(self, request_id: RequestId) -> list[int]:
        chunks = [chunk for plan in self.runner.plans for chunk in plan.chunks if chunk.request_id == request_id]
        return [len(chunk.token_ids) for chunk in chunks]

    def assert_outputs_are_right(self, *request_ids: RequestId) -> None:
        """The requests (all, if none is named) gave what they give alone and undisturbed."""
        for request_id in request_ids or self.new_by_id:
            new = self.new_by_id[request_id]
            assert self.output_of(request_id) == reference_output(new.prompt_token_ids, new.sampling), request_id
            assert self.finish_reason_of(request_id) is not None

    def assert_idle(self) -> None:
        self.engine.check_integrity()
        status = self.engine.status()
        assert not self.engine.has_work
        assert (status.requests_running, status.requests_waiting) == (0, 0)
        assert status.num_free_blocks == status.num_blocks
        assert (status.prefill_tokens_left, status.expected_output_tokens_left) == (0, 0)
