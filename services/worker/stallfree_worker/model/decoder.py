"""The decoder: one forward pass over a flat hybrid batch, in plain torch, on any device.

All tokens go through every linear layer together; attention alone knows which chunk a token belongs to. It computes
from a `DecoderConfig` and knows no family's name. Called by `runner`. `cpu.decoder` does the same in compiled kernels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from stallfree_worker.model.attention.interface import AttentionBackend, AttentionRule
from stallfree_worker.model.batch_inputs import BatchInputs
from stallfree_worker.model.families import DecoderConfig, LayerConfig
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.kv_groups import group_layers
from stallfree_worker.model.linear import Linear
from stallfree_worker.model.rope import RotaryEmbedding, rotate
from stallfree_worker.model.weights import DecoderWeights, LayerWeights


class Decoder(Protocol):
    """What `runner` computes with."""

    @property
    def device(self) -> torch.device: ...

    def forward(self, inputs: BatchInputs, cache: KVCache) -> Tensor:
        """Writes the step's keys and values to the cache → the last layer's output, [num_tokens, hidden_size]."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The logits of some rows, int64 [num_rows], of what `forward` gave: [num_rows, num_ids]."""
        ...


class TorchDecoder:
    """Holds weights, and no state between steps: what a step leaves behind is in the KV cache."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights[Linear], attention: AttentionBackend) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        places = group_layers([layer.window_tokens for layer in config.layers]).places
        self._layers = [
            _Layer(config, layer, layer_weights, group=place.group)
            for layer, layer_weights, place in zip(config.layers, weights.layers, places, strict=True)
        ]
        # Gemma was trained with the scale rounded to the dtype of its weights.
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        self._embedding_scale = torch.tensor(scale, dtype=weights.embedding.dtype, device=self.device)
        self._ropes = {
            layer.rope: RotaryEmbedding(layer.rope, head_dim=config.head_dim, device=self.device)
            for layer in config.layers
        }

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    def forward(self, inputs: BatchInputs, cache: KVCache) -> Tensor:
        if inputs.fresh_blocks is not None:
            cache.clear(inputs.fresh_blocks)
        hidden = F.embedding(inputs.token_ids, self._weights.embedding) * self._embedding_scale
        angles = {rope: embedding.angles(inputs.positions) for rope, embedding in self._ropes.items()}
        slots = inputs.slot_mapping.unbind(0)
        attend = self._attention.prepare(inputs.sequences)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.project(hidden, angles[layer.rope])
            cache.write(index, slots[layer.attention_rule.group], k, v)
            hidden = layer.finish(hidden, attend(q, *cache.layer(index), layer.attention_rule))
        return hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        normed = _norm(hidden.index_select(0, rows), self._weights.final_norm, self._config.norm_eps)
        logits = self._weights.head(normed)
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class _Layer:
    """One layer, before and after its attention."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, weights: LayerWeights[Linear], *, group: int) -> None:
        self.rope = layer.rope
        self.attention_rule = AttentionRule(
            scale=config.attention_scale,
            window_tokens=layer.window_tokens,
            group=group,
            softcap=config.attention_softcap,
        )
        self._config = config
        self._weights = weights

    def project(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [num_tokens, hidden_size] → q, k, v [num_tokens, heads of each, head_dim], q and k rotated."""
        config, weights = self._config, self._weights
        num_rotated = config.num_heads + config.num_kv_heads
        projected = weights.qkv(_norm(hidden, weights.input_norm, config.norm_eps))
        heads = projected.view(len(hidden), -1, config.head_dim)
        qk, v = heads[:, :num_rotated].float(), heads[:, num_rotated:]
        if weights.qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_dim,), eps=config.norm_eps) * weights.qk_norm
        qk = rotate(qk, angles).to(hidden.dtype)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Adds what attention gave, [num_tokens, num_heads, head_dim], and the MLP to the residual stream."""
        config, weights = self._config, self._weights
        update = weights.output(attended.flatten(1))
        if weights.attention_post_norm is not None:
            update = _norm(update, weights.attention_post_norm, config.norm_eps)
        hidden = hidden + update
        update = self._mlp(_norm(hidden, weights.mlp_norm, config.norm_eps))
        if weights.mlp_post_norm is not None:
            update = _norm(update, weights.mlp_post_norm, config.norm_eps)
        return hidden + update

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self._weights.gate_up(x).chunk(2, dim=-1)
        active = F.silu(gate) if self._config.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self._weights.down(active * up)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32; the result has the dtype of `x`.

    In bfloat16, Gemma's own code does just that; that of the other families rounds once more, before the weight.
    """
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
