"""Computes steps: the engine's `Runner` over a decoder and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import Chunk, StepPlan, StepResult
from stallfree_worker.model.batch_inputs import make_batch_inputs
from stallfree_worker.model.decoder import Decoder
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.sampler import Draw, draw_tokens

NOT_FINITE = "the model gave logits that are not finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What the engine asks a runner about its model."""

    max_model_len: int
    eos_token_ids: frozenset[int]


class ModelRunner:
    """Sole owner of the decoder and the KV cache's tensors. Called from one thread."""

    def __init__(self, decoder: Decoder, cache: KVCache, limits: RunnerLimits) -> None:
        self._decoder = decoder
        self._cache = cache
        self._limits = limits

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def max_model_len(self) -> int:
        return self._limits.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._limits.eos_token_ids

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass over all chunks of `plan`, then one draw per chunk that has an `output_index`.

        A request whose logits are not finite fails alone, in `failure_by_request`.
        """
        inputs = make_batch_inputs(
            plan,
            block_size=self._cache.block_size,
            null_block=self._cache.null_block,
            device=self._decoder.device,
        )
        logits = self._decoder.forward(inputs, self._cache)
        draws = [
            Draw(sampling=chunk.sampling, output_index=chunk.output_index)
            for chunk in inputs.sampled
            if chunk.output_index is not None
        ]
        tokens = draw_tokens(logits, draws) if draws else []
        drawn = [(chunk.request_id, token) for chunk, token in zip(inputs.sampled, tokens, strict=True)]
        return StepResult(
            step_id=plan.step_id,
            token_id_by_request={request_id: token for request_id, token in drawn if token is not None},
            failure_by_request={request_id: NOT_FINITE for request_id, token in drawn if token is None},
        )

    def compute_largest_step(self, num_tokens: int) -> None:
        """One prefill of `num_tokens`, or of as many as fit, to learn how much memory a step takes.

        What it leaves in the cache is never read: no request knows of it.
        """
        length = max(1, min(num_tokens, self._limits.max_model_len, self._cache.num_blocks * self._cache.block_size))
        chunk = Chunk(
            request_id=RequestId("largest-step"),
            token_ids=(0,) * length,
            num_computed_tokens=0,
            block_table=tuple(range(self._cache.num_blocks)),
            sampling=SamplingParams(max_tokens=1),
            output_index=0,
        )
        self.execute(StepPlan(step_id=0, chunks=(chunk,), num_decode_tokens=0, num_prefill_tokens=length))
