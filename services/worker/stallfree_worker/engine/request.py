"""One request inside the engine: counters of its progress, no phases.

A mutable object that the scheduler alone owns and changes; everyone else gets messages (`step.py`).
Prefill, decode, and recompute after a preemption are one rule: the next chunk is
`min(num_tokens - num_computed_tokens, what the token budget leaves)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stallfree_shared.wire import FinishReason, RequestId
from stallfree_worker.engine.step import Chunk, NewRequest


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request from submission to its end. Instants are those of the engine's clock, in seconds."""

    new: NewRequest
    arrival_number: int
    """Position in the order of submission; kept through preemptions."""
    submitted_at: float
    request_id: RequestId = field(init=False)
    """That of `new`; a field, like `num_tokens`, because it is read many times per token."""
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    """Prompt and output so far: all that must be computed before the next token can be drawn."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the request's blocks."""
    max_computed_tokens: int = 0
    """The highest that `num_computed_tokens` ever was: what lies below it is computed anew."""
    last_token_at: float | None = None
    was_preempted_since_last_token: bool = False
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.request_id = self.new.request_id
        self.num_tokens = len(self.new.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.new.prompt_token_ids)

    @property
    def num_tokens_left(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the token drawn last is left to compute."""
        return bool(self.output_token_ids) and self.num_tokens_left == 1

    @property
    def next_token_due_at(self) -> float:
        """When the TBT target of a decoding request wants its next token."""
        return (self.last_token_at or 0.0) + self.new.tbt_target_seconds

    @property
    def expected_output_tokens_left(self) -> int:
        expected = min(math.ceil(self.new.expected_output_tokens), self.new.sampling.max_tokens)
        return max(0, expected - len(self.output_token_ids))

    def next_chunk(self, num_tokens: int, block_table: tuple[int, ...]) -> Chunk:
        """The next `num_tokens` tokens to compute, as a message. Copies these tokens and no others."""
        end = self.num_computed_tokens + num_tokens
        return Chunk(
            request_id=self.request_id,
            token_ids=self._token_ids(self.num_computed_tokens, end),
            num_computed_tokens=self.num_computed_tokens,
            block_table=block_table,
            sampling=self.new.sampling,
            output_index=len(self.output_token_ids) if end == self.num_tokens else None,
        )

    def num_recomputed_tokens(self, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens had been computed before and were lost to a preemption."""
        return max(0, min(num_tokens, self.max_computed_tokens - self.num_computed_tokens))

    def advance(self, num_tokens: int) -> None:
        """Notes that the next `num_tokens` tokens are computed."""
        self.num_computed_tokens += num_tokens
        self.max_computed_tokens = max(self.max_computed_tokens, self.num_computed_tokens)

    def restart(self) -> None:
        """Forgets what was computed, and nothing else: output, instants and limits stand."""
        self.num_computed_tokens = 0
        self.was_preempted_since_last_token = True

    def add_output(self, token_id: int, now: float) -> None:
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        self.last_token_at = now
        self.was_preempted_since_last_token = False

    def finish_reason(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the request ends if `token_id` is its next output token, or None.

        A stop token at the very limit is a "stop".
        """
        sampling = self.new.sampling
        if not sampling.ignore_eos and (token_id in eos_token_ids or token_id in sampling.stop_token_ids):
            return "stop"
        return "length" if len(self.output_token_ids) + 1 >= sampling.max_tokens else None

    def _token_ids(self, start: int, end: int) -> tuple[int, ...]:
        prompt = self.new.prompt_token_ids
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        outputs = tuple(self.output_token_ids[max(0, start - num_prompt) : end - num_prompt])
        return prompt[start:num_prompt] + outputs if start < num_prompt else outputs
