"""Computes steps: the engine's `Runner` over a decoder and its KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from stallfree_shared.wire import MAX_LOGPROBS, RequestId, SamplingParams, TokenLogprobs
from stallfree_worker.engine.step import BlockTable, BlockTables, Chunk, KVGroup, StepPlan, StepResult, TokenHistory
from stallfree_worker.model.batch_inputs import BatchInputs, make_batch_inputs
from stallfree_worker.model.decoder import Decoder
from stallfree_worker.model.draw import NO_TOKEN, Draw, Logits
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.logprobs import score_drawn, score_prompts
from stallfree_worker.model.sampler import draw_tokens
from stallfree_worker.model.structured_output import StepMasks, StructuredOutputs

NOT_FINITE = "the model gave logits that are not finite"
NOTHING_LEFT = "min_tokens, stop_token_ids and the structured output leave no token that may come next"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What the engine asks a runner about its model."""

    max_model_len: int
    eos_token_ids: frozenset[int]


class ModelRunner:
    """Sole owner of the decoder, the KV cache's tensors and the grammars of requests. Called from one thread."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, limits: RunnerLimits, structured_outputs: StructuredOutputs
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._limits = limits
        self._structured_outputs = structured_outputs

    def prepare(self) -> None:
        """Does once what steps would else have to do. Must be called before the first of them, but for
        `compute_largest_step` on a GPU."""
        self._decoder.prepare(self._cache)

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._cache.layers.groups

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._limits.eos_token_ids

    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass over all chunks of `plan`, then one draw per chunk that has an `output_index`, and the
        log-probabilities that were asked for.

        A request whose logits are not finite, or whose grammar cannot go on, fails alone, in `failure_by_request`.
        """
        self._structured_outputs.begin(plan)
        inputs = make_batch_inputs(plan, block_size=self.block_size)
        hidden = self._decoder.forward(inputs, self._cache)
        prompts = self._score_prompts(hidden, inputs)
        # where they are needed anyway, a GPU begins them before the masks are waited for
        begun = self._logits(hidden, inputs) if self._needs_logits(inputs.sampled) else None
        masks = self._structured_outputs.finish(inputs.sampled)
        tokens, logits = self._draw(hidden, inputs, masks, begun)
        self._structured_outputs.expect(inputs.sampled, tokens, masks)
        result = StepResult(
            step_id=plan.step_id,
            token_id_by_request={
                chunk.request_id: token
                for chunk, token in zip(inputs.sampled, tokens, strict=True)
                if token is not None
            },
            failure_by_request=masks.failure_by_request,
            completed_request_ids=masks.completed,
            postponed_request_ids=masks.postponed,
        )
        if prompts:
            result = _with_prompts(result, prompts)
        return result if logits is None else _with_logits(result, logits.values, inputs.sampled, tokens)

    def _needs_logits(self, sampled: Sequence[Chunk]) -> bool:
        return self._decoder.find_likeliest is None or any(chunk.needs_logits for chunk in sampled)

    def _draw(
        self, hidden: Tensor, inputs: BatchInputs, masks: StepMasks, logits: Logits | None
    ) -> tuple[list[int | None], Logits | None]:
        """A token for every draw, or None where there is none; and the logits, where they were needed."""
        if not inputs.sampled:
            return [], logits
        find_likeliest = self._decoder.find_likeliest
        if logits is None and find_likeliest is not None:
            allowed = [masks.allowed_by_request.get(chunk.request_id) for chunk in inputs.sampled]
            likeliest: list[int | None] = [*find_likeliest(hidden, inputs.logit_rows, allowed)]
            if NO_TOKEN not in likeliest:
                return likeliest, None
        if logits is None:
            logits = self._logits(hidden, inputs)  # they tell why there is none
        draws = [self._draw_of(chunk, masks) for chunk in inputs.sampled]
        return draw_tokens(logits.values, draws, maxima=logits.maxima), logits

    def _logits(self, hidden: Tensor, inputs: BatchInputs) -> Logits:
        if not inputs.sampled:
            return Logits(hidden.new_empty(0, 0), maxima=None)
        return self._decoder.logits(hidden, inputs.logit_rows)

    def _score_prompts(self, hidden: Tensor, inputs: BatchInputs) -> dict[RequestId, tuple[TokenLogprobs, ...] | None]:
        if not inputs.scored:
            return {}
        return score_prompts(inputs.scored, inputs.scored_rows, lambda rows: self._decoder.logits(hidden, rows).values)

    def _draw_of(self, chunk: Chunk, masks: StepMasks) -> Draw:
        sampling, output_index = chunk.sampling, chunk.output_index or 0
        ends_too_early = output_index < sampling.min_tokens and chunk.request_id not in masks.completed
        return Draw(
            sampling=sampling,
            output_index=output_index,
            history=chunk.history,
            banned_token_ids=self.eos_token_ids | sampling.stop_token_ids if ends_too_early else frozenset(),
            allowed=masks.allowed_by_request.get(chunk.request_id),
        )

    def compute_largest_step(self, num_tokens: int, *, num_requests: int) -> None:
        """One prefill of `num_tokens`, or of as many as fit, and a token of each other of `num_requests`, with all
        log-probabilities there are, to learn how much memory a step takes.

        What it leaves in the cache is never read: no request knows of it. So all may use the same blocks.
        """
        num_groups = len(self.kv_groups)
        blocks_per_group = self.num_blocks // num_groups
        length = max(1, min(num_tokens, self._limits.max_model_len, blocks_per_group * self.block_size))
        tables = [BlockTable(blocks=tuple(range(self.num_blocks)[group::num_groups])) for group in range(num_groups)]
        chunks = [
            Chunk(
                request_id=RequestId(f"largest-step-{number}"),
                token_ids=(0,) * size,
                num_computed_tokens=0,
                block_tables=BlockTables(tables),
                sampling=SamplingParams(max_tokens=1, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS),
                output_index=0,
                history=TokenHistory(prompt_token_ids=(0,) * size, output_token_ids=()),
            )
            for number, size in enumerate([1] * (num_requests - 1) + [length])
        ]
        plan = StepPlan(step_id=0, chunks=tuple(chunks), num_decode_tokens=num_requests - 1, num_prefill_tokens=length)
        self.execute(plan)


def _with_logits(
    result: StepResult, logits: Tensor, sampled: Sequence[Chunk], tokens: Sequence[int | None]
) -> StepResult:
    """With what logits [len(sampled), num_ids] tell: how likely the tokens were, and why there is none."""
    reasons = {
        chunk.request_id: NOTHING_LEFT if logits[row].amax().isfinite() else NOT_FINITE
        for row, (chunk, token) in enumerate(zip(sampled, tokens, strict=True))
        if token is None
    }
    not_finite = [request_id for request_id, reason in reasons.items() if reason == NOT_FINITE]
    return result._replace(
        failure_by_request={**reasons, **result.failure_by_request},
        not_finite_request_ids=result.not_finite_request_ids.union(not_finite),
        logprobs_by_request=score_drawn(logits, sampled, tokens),
    )


def _with_prompts(result: StepResult, prompts: Mapping[RequestId, tuple[TokenLogprobs, ...] | None]) -> StepResult:
    """With the log-probabilities of prompts; None is a failure."""
    unscored = [request_id for request_id, scores in prompts.items() if scores is None]
    return result._replace(
        failure_by_request={**dict.fromkeys(unscored, NOT_FINITE), **result.failure_by_request},
        not_finite_request_ids=result.not_finite_request_ids.union(unscored),
        prompt_logprobs_by_request={request_id: scores for request_id, scores in prompts.items() if scores},
    )
