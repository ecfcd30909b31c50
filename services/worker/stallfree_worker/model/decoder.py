"""The decoder: one forward pass over a flat hybrid batch, in plain torch, on any device.

All tokens go through every linear layer together; attention alone knows which chunk a token belongs to. It computes
from a `DecoderConfig` and knows no family's name. Called by `runner`. `cpu.decoder` does the same in compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from stallfree_worker.model.attention.interface import AttentionBackend, AttentionRule
from stallfree_worker.model.batch_inputs import BatchInputs
from stallfree_worker.model.device_inputs import DeviceInputs, make_device_inputs
from stallfree_worker.model.draw import Logits
from stallfree_worker.model.families import DecoderConfig, LayerConfig
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.kv_groups import group_layers
from stallfree_worker.model.linear import Linear
from stallfree_worker.model.operations import PLAIN, Operations
from stallfree_worker.model.rope import RotaryEmbeddings
from stallfree_worker.model.weights import DecoderWeights, LayerWeights


class FindLikeliest(Protocol):
    def __call__(self, hidden: Tensor, rows: NumberList, allowed: Sequence[Tensor | None]) -> list[int]:
        """The likeliest id of each of these rows of what `forward` gave, among those that are allowed to it (see
        `id_masks`): that of its logits, to the bit. -1 where only they can tell which it is, or why there is none."""
        ...


class Decoder(Protocol):
    """What `runner` computes with."""

    @property
    def device(self) -> torch.device: ...

    def prepare(self, cache: KVCache) -> None:
        """Does once what steps on this cache would else have to do. Called before the first of them."""
        ...

    def forward(self, inputs: BatchInputs, cache: KVCache) -> Tensor:
        """Writes the step's keys and values to the cache → the last layer's output, [num_tokens, hidden_size], of which
        only the `wanted_rows` need be right. The next call may write over it."""
        ...

    def logits(self, hidden: Tensor, rows: NumberList) -> Logits:
        """Those of some rows of what `forward` gave."""
        ...

    @property
    def find_likeliest(self) -> FindLikeliest | None:
        """Where it can do with less than the logits if only the likeliest ids are wanted."""
        ...


class TorchDecoder:
    """Holds weights, and no state between steps: what a step leaves behind is in the KV cache."""

    find_likeliest = None

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights[Linear],
        attention: AttentionBackend,
        operations: Operations = PLAIN,
    ) -> None:
        self._config = config
        self._operations = operations
        self._weights = weights
        self._attention = attention
        places = group_layers([layer.window_tokens for layer in config.layers]).places
        self._layers = [
            _Layer(config, layer, layer_weights, operations, group=place.group)
            for layer, layer_weights, place in zip(config.layers, weights.layers, places, strict=True)
        ]
        # Gemma was trained with the scale rounded to the dtype of its weights.
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        self._embedding_scale = torch.tensor(scale, dtype=weights.embedding.dtype, device=self.device)
        self._rope_configs = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._ropes = RotaryEmbeddings(self._rope_configs, head_dim=config.head_dim, device=self.device)

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    def prepare(self, cache: KVCache) -> None:
        """There is nothing to do."""

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs, cache: KVCache) -> Tensor:
        return self.compute(self.begin(inputs, cache), cache)

    def begin(self, inputs: BatchInputs, cache: KVCache) -> DeviceInputs:
        """Brings a batch to the device, and clears its fresh blocks."""
        own = make_device_inputs(inputs, cache, self.device)
        if len(own.fresh_blocks):
            cache.clear(own.fresh_blocks)
        return own

    def compute(self, inputs: DeviceInputs, cache: KVCache) -> Tensor:
        """`forward` of what `begin` gave."""
        hidden = F.embedding(inputs.token_ids, self._weights.embedding) * self._embedding_scale
        angles = dict(zip(self._rope_configs, self._ropes.angles(inputs.positions), strict=True))
        slots = inputs.slot_mapping.unbind(0)
        attend = self._attention.prepare(inputs.sequences)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.project(hidden, angles[layer.rope])
            cache.write(index, slots[layer.attention_rule.group], k, v)
            hidden = layer.finish(hidden, attend(q, *cache.layer(index), layer.attention_rule))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: NumberList) -> Logits:
        chosen = hidden.index_select(0, rows.on(self.device))
        normed = self._operations.norm(chosen, self._weights.final_norm, self._config.norm_eps)
        logits = self._weights.head(normed)
        cap = self._config.logit_softcap
        return Logits(logits if cap is None else torch.tanh(logits / cap) * cap, maxima=None)


class _Layer:
    """One layer, before and after its attention."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        weights: LayerWeights[Linear],
        operations: Operations,
        *,
        group: int,
    ) -> None:
        self.rope = layer.rope
        self.attention_rule = AttentionRule(
            scale=config.attention_scale,
            window_tokens=layer.window_tokens,
            group=group,
            softcap=config.attention_softcap,
        )
        self._config = config
        self._weights = weights
        self._operations = operations

    def project(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [num_tokens, hidden_size] → q, k, v [num_tokens, heads of each, head_dim], q and k rotated."""
        config, weights = self._config, self._weights
        num_rotated = config.num_heads + config.num_kv_heads
        projected = weights.qkv(self._operations.norm(hidden, weights.input_norm, config.norm_eps))
        heads = projected.view(len(hidden), -1, config.head_dim)
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        qk = self._operations.norm_and_rotate(qk, weights.qk_norm, config.norm_eps, *angles)
        return qk[:, : config.num_heads], qk[:, config.num_heads :], v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Adds what attention gave, [num_tokens, num_heads, head_dim], and the MLP to the residual stream."""
        weights, operations, eps = self._weights, self._operations, self._config.norm_eps
        hidden = operations.add_norm(hidden, weights.output(attended.flatten(1)), weights.attention_post_norm, eps)
        gate_up = weights.gate_up(operations.norm(hidden, weights.mlp_norm, eps))
        update = weights.down(operations.gated(gate_up, self._config.activation))
        return operations.add_norm(hidden, update, weights.mlp_post_norm, eps)
