"""One request inside the engine: counters of its progress, no phases.

A mutable object that the scheduler alone owns and changes; everyone else gets messages (`step.py`).
Prefill, decode, and recompute after a preemption are one rule: the next chunk is
`min(num_tokens - num_computed_tokens, what the token budget leaves)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stallfree_shared.wire import FinishReason, RequestId, SamplingParams, TokenLogprobs
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.prefix_hashes import PrefixHashes
from stallfree_worker.engine.step import BlockTables, Chunk, NewRequest, TokenHistory

Line = tuple[int, int, int]
"""Names the requests that are served in order of arrival among themselves: priority, size and target alike."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request from submission to its end. Instants are those of the engine's clock, in seconds."""

    new: NewRequest
    arrival_number: int
    """Position in the order of submission; kept through preemptions."""
    submitted_at: float
    prefix_hashes: PrefixHashes | None = None
    """The names of its full blocks in the prefix cache; None where that is off."""
    request_id: RequestId = field(init=False)
    """That of `new`; a field, like `num_prompt_tokens`, because it is read many times per token."""
    num_prompt_tokens: int = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    """Prompt and output so far: all that must be computed before the next token can be drawn."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the request's blocks."""
    max_computed_tokens: int = 0
    """The highest that `num_computed_tokens` ever was: what lies below it is computed anew."""
    num_cached_tokens: int | None = None
    """Tokens that the prefix cache spared when the request was first admitted; None before."""
    num_spared_tokens: int = 0
    """While the request waits, tokens that it will likely not have to compute: what the prefix cache had when it began
    to wait. While it runs, leading tokens that others hold too, so that they stay if it is preempted."""
    num_prompt_logprobs_told: int = 0
    """Prompt tokens, from the second on, whose log-probabilities have left the engine: they leave once."""
    line: Line = (0, 0, 0)
    """The one that it waits in, or last waited in."""
    waits_since: float = field(init=False)
    """The end of its last chunk, or its submission."""
    last_token_at: float | None = None
    was_preempted_since_last_token: bool = False
    is_token_pending: bool = False
    """A step that draws its next token is being computed. That token is counted in `num_tokens`, and nobody knows it
    yet."""
    was_preempted_with_token_pending: bool = False
    is_draw_postponed: bool = False
    """All is computed but for the last token, which is to be computed again: its draw was postponed."""
    is_cancelled: bool = False
    _num_logit_draws: int = field(init=False)
    """Its first so many draws take more than knowing the likeliest token."""
    _looks_back: bool = field(init=False)
    _expected_output_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.new.request_id
        self.num_tokens = self.num_prompt_tokens = len(self.new.prompt_token_ids)
        self.waits_since = self.submitted_at
        sampling = self.new.sampling
        self._num_logit_draws = sampling.min_tokens if sampling.wants_only_likeliest else sampling.max_tokens
        self._looks_back = _looks_back(sampling) or sampling.prompt_logprobs is not None
        self._expected_output_tokens = math.ceil(min(self.new.expected_output_tokens, sampling.max_tokens))

    @property
    def num_tokens_left(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Of a waiting request, what it likely has to compute before its next token."""
        return max(1, self.num_tokens - self.num_spared_tokens)

    @property
    def readable_hashes(self) -> PrefixHashes | None:
        """What it may look up in the prefix cache. Nothing, where the log-probabilities of all prompt tokens are asked
        for: they must all be computed."""
        return self.prefix_hashes if self.new.sampling.prompt_logprobs is None else None

    @property
    def is_decoding(self) -> bool:
        """Whether only the token drawn last is left to compute, or the last again because its draw was postponed."""
        has_one_left = self.num_tokens - self.num_computed_tokens == 1  # no property of a property: asked most often
        return has_one_left and (self.num_tokens > self.num_prompt_tokens or self.is_draw_postponed)

    @property
    def num_outputs(self) -> int:
        """Output tokens, with the pending one."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def needs_logits(self) -> bool:
        """Whether its next draw takes more than knowing the likeliest token."""
        return self.num_outputs < self._num_logit_draws

    @property
    def num_known_tokens(self) -> int:
        """`num_tokens` without the pending one."""
        return self.num_tokens - self.is_token_pending

    @property
    def wants_nothing_more(self) -> bool:
        """Whether its pending token is the last, whatever it will be."""
        return self.is_token_pending and self.num_outputs >= self.new.sampling.max_tokens

    @property
    def next_token_due_at(self) -> float | None:
        """When the TBT target wants the token after the last that is known; None before there is one."""
        return None if self.last_token_at is None else self.last_token_at + self.new.tbt_target_seconds

    def decode_due_at(self, now: float) -> float | None:
        """When the TBT target wants what a step that begins `now` would draw for this request: a pending token counts
        as drawn then. None where it would draw nothing, is no decode, or has drawn nothing yet."""
        if not self.is_decoding or self.wants_nothing_more:
            return None
        return now + self.new.tbt_target_seconds if self.is_token_pending else self.next_token_due_at

    @property
    def expected_output_tokens_left(self) -> int:
        return max(0, self._expected_output_tokens - self.num_outputs)

    @property
    def was_preempted(self) -> bool:
        """Whether it lost its blocks, and has drawn nothing since."""
        return self.was_preempted_since_last_token or self.was_preempted_with_token_pending

    def next_chunk(self, num_tokens: int, block_tables: BlockTables, *, num_shared_tokens: int) -> Chunk:
        """The next `num_tokens` tokens to compute, as a message. Copies these tokens and no others."""
        end = self.num_computed_tokens + num_tokens
        return Chunk(
            request_id=self.request_id,
            token_ids=self._token_ids(self.num_computed_tokens, end),
            num_computed_tokens=self.num_computed_tokens,
            block_tables=block_tables,
            num_shared_tokens=num_shared_tokens,
            sampling=self.new.sampling,
            output_index=len(self.output_token_ids) if end == self.num_tokens else None,
            needs_logits=self.needs_logits,
            history=self._history(end) if self._looks_back else None,
        )

    def num_recomputed_tokens(self, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens had been computed before and were lost to a preemption."""
        return max(0, min(num_tokens, self.max_computed_tokens - self.num_computed_tokens))

    def begin(self, num_computed_tokens: int) -> None:
        """Notes that the request runs; so many tokens the prefix cache spares it."""
        self.num_computed_tokens = num_computed_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_computed_tokens

    def advance(self, num_tokens: int, *, draws: bool) -> None:
        """Counts the next `num_tokens` tokens as computed, and the token drawn after them where one is. Steps are
        computed in order, so whatever is planned next may rely on it while this step still runs."""
        self.num_computed_tokens += num_tokens
        self.max_computed_tokens = max(self.max_computed_tokens, self.num_computed_tokens)
        self.is_draw_postponed = False
        if draws:
            self.is_token_pending = True
            self.num_tokens += 1

    def postpone_draw(self) -> None:
        """There is no pending token after all: the last token is to be computed again, and the draw with it."""
        self.is_token_pending = False
        self.num_tokens -= 1
        self.num_computed_tokens -= 1
        self.max_computed_tokens = self.num_computed_tokens
        self.is_draw_postponed = True

    def restart(self) -> None:
        """Forgets what was computed, and nothing else: output, instants and limits stand."""
        self.num_computed_tokens = 0
        self.is_draw_postponed = False
        if self.is_token_pending:
            self.was_preempted_with_token_pending = True
        else:
            self.was_preempted_since_last_token = True

    def add_output(self, token_id: int, now: float) -> None:
        """The pending token is known, `now`."""
        self.output_token_ids.append(token_id)
        if self.prefix_hashes is not None:
            self.prefix_hashes.append(token_id)
        self.last_token_at = now
        self.is_token_pending = False
        self.was_preempted_since_last_token = self.was_preempted_with_token_pending
        self.was_preempted_with_token_pending = False

    def finish_reason(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the request ends if `token_id` is its next output token, or None.

        A stop token at the very limit is a "stop".
        """
        sampling = self.new.sampling
        if not sampling.ignore_eos and (token_id in eos_token_ids or token_id in sampling.stop_token_ids):
            return "stop"
        return "length" if len(self.output_token_ids) + 1 >= sampling.max_tokens else None

    def num_scored_tokens(self, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens tell how likely the prompt token behind them is."""
        end = min(self.num_computed_tokens + num_tokens, self.num_prompt_tokens - 1)
        if self.new.sampling.prompt_logprobs is None or end <= self.num_prompt_logprobs_told:
            return 0
        return end - self.num_computed_tokens

    def take_prompt_logprobs(self, first: int, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...] | None:
        """Those of `logprobs`, of the prompt tokens at `first` and behind, that are not told yet, and now are."""
        num_known = self.num_prompt_logprobs_told + 1 - first
        require(num_known >= 0, f"{self.request_id}: prompt tokens without log-probabilities")
        fresh = logprobs[num_known:]
        self.num_prompt_logprobs_told += len(fresh)
        return fresh or None

    def _history(self, end: int) -> TokenHistory | None:
        """For a chunk that ends before `end`: where a token is drawn after it that depends on those before, and where
        prompt tokens are predicted in it that are not told yet."""
        sampling = self.new.sampling
        draws = end == self.num_tokens and _looks_back(sampling)
        tells = self.num_scored_tokens(end - self.num_computed_tokens) > 0
        if not draws and not tells:
            return None
        outputs = tuple(self.output_token_ids) if draws else ()
        return TokenHistory(prompt_token_ids=self.new.prompt_token_ids, output_token_ids=outputs)

    def _token_ids(self, start: int, end: int) -> tuple[int, ...]:
        prompt = self.new.prompt_token_ids
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        outputs = tuple(self.output_token_ids[max(0, start - num_prompt) : end - num_prompt])
        return prompt[start:num_prompt] + outputs if start < num_prompt else outputs


def _looks_back(sampling: SamplingParams) -> bool:
    """Whether the draw of a token depends on the tokens before it other than through the model."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
        or sampling.structured_output is not None
    )
