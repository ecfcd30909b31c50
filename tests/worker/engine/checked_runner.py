"""A runner without a model that checks every plan against a KV cache it keeps slot by slot.

Each slot remembers which KV group wrote it, at which position of which text: a text is the salt and all tokens up to
the slot's own. A step first writes all its chunks and then reads all their contexts back through the block tables of
every group, as far as its window looks. So a block that holds another text or another tenant's, a lost block, and a
skipped or repeated position are found in the step they happen, in shared blocks too. The token that is drawn depends on
the whole text, on the seed and on the output index; `reference_output` computes the same from the prompt alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import Chunk, KVGroup, NewRequest, StepPlan, StepResult

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


class Text:
    """A request's salt and tokens, as far as they are known, with a name for every beginning of them."""

    def __init__(self, new: NewRequest) -> None:
        self.tokens: list[int] = []
        self.names: list[int] = [hash(("salt", new.cache_salt))]
        """`names[p + 1]` stands for the salt and the tokens up to position `p`."""
        for token in new.prompt_token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.names.append(hash((self.names[-1], token)))


def _needs_logits(chunk: Chunk) -> bool:
    """Whether anything could make its draw another than the likeliest token, or tells of others."""
    one = chunk.sampling
    are_changed = one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1 or one.logit_bias
    is_early = chunk.output_index is not None and chunk.output_index < one.min_tokens
    return bool(one.temperature > 0 or are_changed or is_early or one.logprobs is not None)


def _scores_prompt(chunk: Chunk) -> bool:
    """Whether it tells how likely a prompt token was: one that was not told before stands behind one of its own."""
    if chunk.sampling.prompt_logprobs is None or chunk.history is None:
        return False
    return chunk.num_computed_tokens + 1 < len(chunk.history.prompt_token_ids)


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
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    failing: dict[RequestId, str] = field(default_factory=dict)
    """Requests whose logits are not finite."""
    refusing: dict[RequestId, str] = field(default_factory=dict)
    """Requests whose structured output cannot go on."""
    postponing: Counter[RequestId] = field(default_factory=Counter)
    """How many draws of a request are still to be postponed."""
    completed: set[RequestId] = field(default_factory=set)
    """Requests whose structured output is whole."""
    during_step: Callable[[StepPlan], None] = do_nothing
    """Called while a step is in flight."""
    plans: list[StepPlan] = field(default_factory=list)
    num_drawn_by_id: Counter[RequestId] = field(default_factory=Counter)
    restarts_by_id: dict[RequestId, list[int]] = field(default_factory=dict)
    """For every restart after a preemption, how many tokens had been drawn before it."""
    num_computed_tokens: int = 0
    """Tokens of all chunks so far."""
    _text_by_id: dict[RequestId, Text] = field(default_factory=dict)
    _next_position_by_id: dict[RequestId, int] = field(default_factory=dict)
    """Where the next chunk of a request that has begun must start."""
    _preempted: set[RequestId] = field(default_factory=set)
    _slots: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """Block and offset → KV group, position, name of the text up to there."""

    def expect(self, new: NewRequest) -> None:
        """A request was submitted."""
        self.forget(new.request_id)
        self._text_by_id[new.request_id] = Text(new)

    def forget(self, request_id: RequestId) -> None:
        """The request was cancelled; its id may come again with another prompt."""
        self._text_by_id.pop(request_id, None)
        self._next_position_by_id.pop(request_id, None)
        self.num_drawn_by_id.pop(request_id, None)
        self.restarts_by_id.pop(request_id, None)
        self._preempted.discard(request_id)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._preempted |= set(plan.preempted_request_ids)
        self._check_shape(plan)
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            self._write(chunk, written)
        for chunk in plan.chunks:
            self._read(chunk)
        drawing = {chunk.request_id for chunk in plan.chunks if chunk.output_index is not None}
        failures = {one: reason for one, reason in (self.failing | self.refusing).items() if one in drawing}
        postponed = frozenset(chunk.request_id for chunk in plan.chunks if self._postpones(chunk))
        tokens = {
            chunk.request_id: self._draw(chunk, chunk.output_index)
            for chunk in plan.chunks
            if chunk.output_index is not None and chunk.request_id not in failures.keys() | postponed
        }
        self.during_step(plan)
        self.clock.now += step_seconds(plan)
        return StepResult(
            step_id=plan.step_id,
            token_id_by_request=tokens,
            failure_by_request=failures,
            not_finite_request_ids=frozenset(self.failing.keys() & drawing),
            completed_request_ids=frozenset(self.completed & tokens.keys()),
            postponed_request_ids=postponed,
        )

    def _check_shape(self, plan: StepPlan) -> None:
        request_ids = [chunk.request_id for chunk in plan.chunks]
        assert plan.chunks
        assert len(set(request_ids)) == len(request_ids)
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) == plan.num_tokens
        assert all(len(chunk.token_ids) >= 1 for chunk in plan.chunks)
        assert all(len(chunk.block_tables) == len(self.kv_groups) for chunk in plan.chunks)
        drawing = [chunk for chunk in plan.chunks if chunk.output_index is not None]
        assert all(chunk.needs_logits == _needs_logits(chunk) for chunk in drawing)
        scoring = [chunk for chunk in plan.chunks if _scores_prompt(chunk)]
        assert plan.shape.needs_logits == bool(scoring or any(map(_needs_logits, drawing)))
        contexts = [chunk.num_computed_tokens + 1 for chunk in plan.chunks[: plan.num_decode_tokens]]
        read = sum(
            share * sum(min(context, window or context) for context in contexts) for window, share in plan.shape.windows
        )
        assert plan.shape.decode_context_tokens == pytest.approx(read, abs=len(contexts))

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> None:
        self._note_start(chunk)
        text, end = self._text_by_id[chunk.request_id], chunk.num_computed_tokens + len(chunk.token_ids)
        assert list(chunk.token_ids) == text.tokens[chunk.num_computed_tokens : end], "other tokens than the request's"
        for group in range(len(self.kv_groups)):
            for position in range(max(chunk.num_computed_tokens, chunk.num_shared_tokens), end):
                slot = self._slot(chunk, group, position)
                assert slot not in written, "two tokens of one step share a slot"
                written.add(slot)
                self._slots[slot] = (group, position, text.names[position + 1])
        self._next_position_by_id[chunk.request_id] = end
        self.num_computed_tokens += len(chunk.token_ids)

    def _note_start(self, chunk: Chunk) -> None:
        request_id, start = chunk.request_id, chunk.num_computed_tokens
        next_position = self._next_position_by_id.get(request_id)
        if next_position is None:
            assert start in (chunk.num_shared_tokens, chunk.num_shared_tokens - 1), "a token was skipped"
        elif request_id in self._preempted:
            assert start in (chunk.num_shared_tokens, chunk.num_shared_tokens - 1), "a token was skipped"
            self.restarts_by_id.setdefault(request_id, []).append(self.num_drawn_by_id[request_id])
        else:
            assert start == next_position, "a token was skipped or computed twice"
        self._preempted.discard(request_id)

    def _read(self, chunk: Chunk) -> None:
        """Finds the tokens that the chunk looks at through the block tables of all groups."""
        text, end = self._text_by_id[chunk.request_id], chunk.num_computed_tokens + len(chunk.token_ids)
        for index, group in enumerate(self.kv_groups):
            window = group.window_tokens
            first = 0 if window is None else max(0, chunk.num_computed_tokens - window + 1)
            for position in range(first, end):
                content = self._slots.get(self._slot(chunk, index, position))
                assert content == (index, position, text.names[position + 1]), "the KV cache holds something else"

    def _postpones(self, chunk: Chunk) -> bool:
        if chunk.output_index is None or not self.postponing[chunk.request_id]:
            return False
        self.postponing[chunk.request_id] -= 1
        self._next_position_by_id[chunk.request_id] -= 1
        return True

    def _draw(self, chunk: Chunk, output_index: int) -> int:
        text = self._text_by_id[chunk.request_id]
        assert chunk.num_computed_tokens + len(chunk.token_ids) == len(text.tokens), "drawn before all is computed"
        assert output_index == self.num_drawn_by_id[chunk.request_id], "an output was drawn twice or left out"
        self.num_drawn_by_id[chunk.request_id] += 1
        token = draw(text.tokens, seed=chunk.sampling.seed, output_index=output_index)
        text.append(token)
        return token

    def _slot(self, chunk: Chunk, group: int, position: int) -> tuple[int, int]:
        table = chunk.block_tables[group]
        index = position // self.block_size - table.num_forgotten
        assert index >= 0, "a window has forgotten what it looks at"
        assert 0 <= table.blocks[index] < self.num_blocks
        return table.blocks[index], position % self.block_size
