"""A runner without a model that checks every plan against a KV cache it keeps slot by slot.

Each slot remembers which request wrote which token at which position. A step first writes all its chunks and then reads
all their contexts back through the block tables, so a block with two owners, a lost block and a skipped or repeated
position are found in the step they happen. The token that is drawn depends on everything read, on the seed and on the
output index; `reference_output` computes the same from the prompt alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import Chunk, StepPlan, StepResult

VOCABULARY_SIZE = 97
EOS_TOKEN_ID = 0


@dataclass(slots=True)
class VirtualClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def draw(context: Sequence[int], *, seed: int, output_index: int) -> int:
    return hash((tuple(context), seed, output_index)) % VOCABULARY_SIZE


def reference_output(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What a request gives when nothing else exists: no chunks, no batch, no memory to run out of."""
    outputs: list[int] = []
    stops = frozenset() if sampling.ignore_eos else sampling.stop_token_ids | {EOS_TOKEN_ID}
    while len(outputs) < sampling.max_tokens and not (outputs and outputs[-1] in stops):
        outputs.append(draw([*prompt, *outputs], seed=sampling.seed, output_index=len(outputs)))
    return outputs


def do_nothing(plan: StepPlan) -> None:
    """Nothing happens while the step is in flight."""


def step_seconds(plan: StepPlan) -> float:
    return 0.01 + 0.0001 * plan.num_tokens


@dataclass(slots=True, kw_only=True)
class CheckedRunner:
    num_blocks: int
    block_size: int
    clock: VirtualClock
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID})
    failing: dict[RequestId, str] = field(default_factory=dict)
    during_step: Callable[[StepPlan], None] = do_nothing
    """Called while a step is in flight."""
    plans: list[StepPlan] = field(default_factory=list)
    num_computed_by_id: Counter[RequestId] = field(default_factory=Counter)
    """Tokens computed since the last (re)start."""
    num_drawn_by_id: Counter[RequestId] = field(default_factory=Counter)
    restarts_by_id: dict[RequestId, list[int]] = field(default_factory=dict)
    """For every restart after a preemption, how many tokens had been drawn before it."""
    _slots: dict[tuple[int, int], tuple[RequestId, int, int]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._check_shape(plan)
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            self._write(chunk, written)
        contexts = {chunk.request_id: self._read(chunk) for chunk in plan.chunks}
        tokens = {
            chunk.request_id: self._draw(chunk, contexts[chunk.request_id], chunk.output_index)
            for chunk in plan.chunks
            if chunk.output_index is not None and chunk.request_id not in self.failing
        }
        self.during_step(plan)
        self.clock.now += step_seconds(plan)
        planned = {chunk.request_id for chunk in plan.chunks if chunk.output_index is not None}
        failures = {request_id: reason for request_id, reason in self.failing.items() if request_id in planned}
        return StepResult(step_id=plan.step_id, token_id_by_request=tokens, failure_by_request=failures)

    def forget(self, request_id: RequestId) -> None:
        """The request was cancelled; its id may come again with another prompt."""
        self.num_computed_by_id.pop(request_id, None)
        self.num_drawn_by_id.pop(request_id, None)
        self.restarts_by_id.pop(request_id, None)

    def _check_shape(self, plan: StepPlan) -> None:
        request_ids = [chunk.request_id for chunk in plan.chunks]
        assert plan.chunks
        assert len(set(request_ids)) == len(request_ids)
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) == plan.num_tokens
        assert all(len(chunk.token_ids) >= 1 for chunk in plan.chunks)

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        self._note_start(chunk)
        for position, token in enumerate(chunk.token_ids, start=chunk.num_computed_tokens):
            slot = self._slot(chunk, position)
            assert slot not in written, "two tokens of one step share a slot"
            written.add(slot)
            self._slots[slot] = (chunk.request_id, position, token)
        self.num_computed_by_id[chunk.request_id] += len(chunk.token_ids)

    def _note_start(self, chunk: Chunk) -> None:
        num_computed = self.num_computed_by_id[chunk.request_id]
        if chunk.num_computed_tokens == 0 and num_computed > 0:
            self.restarts_by_id.setdefault(chunk.request_id, []).append(self.num_drawn_by_id[chunk.request_id])
            self.num_computed_by_id[chunk.request_id] = 0
        else:
            assert chunk.num_computed_tokens == num_computed, "a token was skipped or computed twice"

    def _read(self, chunk: Chunk) -> list[int]:
        """The tokens at all positions up to the chunk's end, found through its block table."""
        context = []
        for position in range(chunk.num_computed_tokens + len(chunk.token_ids)):
            owner, written_position, token = self._slots[self._slot(chunk, position)]
            assert (owner, written_position) == (chunk.request_id, position), "the KV cache holds something else"
            context.append(token)
        return context

    def _draw(self, chunk: Chunk, context: list[int], output_index: int) -> int:
        assert output_index == self.num_drawn_by_id[chunk.request_id], "an output was drawn twice or left out"
        self.num_drawn_by_id[chunk.request_id] += 1
        return draw(context, seed=chunk.sampling.seed, output_index=output_index)

    def _slot(self, chunk: Chunk, position: int) -> tuple[int, int]:
        block = chunk.block_table[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block, position % self.block_size
