"""The paged KV cache: the tensors, and how many blocks fit. Which block is whose is the engine's business."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.families import DecoderConfig
from stallfree_worker.model.kv_groups import GroupedLayers, group_layers

DEFAULT_CPU_CACHE_BYTES = 2**30
_NUM_OWN_BLOCKS = 2
"""Allocated besides those that can be given away: the null block and the waste block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The layout of one block, alike for every KV group."""

    layers: GroupedLayers
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: DecoderConfig, *, block_size: int, dtype: torch.dtype) -> KVCacheShape:
        return cls(
            layers=group_layers([layer.window_tokens for layer in config.layers]),
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes in all layers of a group, keys and values together."""
        slots = self.layers.layers_per_group * self.block_size * 2
        return slots * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def blocks_of_step(self, num_tokens: int) -> int:
        """Blocks of a cache in which one chunk of `num_tokens` tokens just fits."""
        return len(self.layers.groups) * ceil(num_tokens / self.block_size) + _NUM_OWN_BLOCKS

    def blocks_within(self, memory_bytes: int, *, most_useful_tokens: int) -> int:
        """How many blocks fit, and are of use. Raises `ModelLoadError` with both figures where they are too few for
        even one token, which needs a block of every group."""
        num_groups = len(self.layers.groups)
        num_blocks = memory_bytes // self.block_bytes - _NUM_OWN_BLOCKS
        if num_blocks < num_groups:
            least = num_groups + _NUM_OWN_BLOCKS
            raise ModelLoadError(
                f"the KV cache has {max(memory_bytes, 0)} bytes, but the least it needs is {least * self.block_bytes} "
                f"bytes ({least} blocks of {self.block_size} tokens); raise --kv-cache-memory"
            )
        return min(num_blocks, num_groups * ceil(most_useful_tokens / self.block_size))


class KVCache:
    """Keys and values: [num_blocks + 2, block_size, num_kv_heads, head_dim] each, for every layer of a group. Within a
    block the compiled kernels for CPUs have a layout of their own.

    Everything that attention may read is finite, whatever an earlier owner of a block left there: a masked slot still
    enters a product with weight 0, and 0 x NaN is NaN. So a block is cleared when a request begins to fill it, and
    block tables are padded with the null block, which is always zero. What must not be written where it belongs,
    because it stands there already and others read it, goes to the waste block, which nobody reads; the compiled
    kernels do not write it at all.
    """

    def __init__(self, shape: KVCacheShape, *, num_blocks: int, device: torch.device) -> None:
        sizes = (num_blocks + _NUM_OWN_BLOCKS, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.layers = shape.layers
        self.null_block, self.waste_block = num_blocks, num_blocks + 1
        places = range(shape.layers.layers_per_group)
        self._keys = [torch.zeros(sizes, dtype=shape.dtype, device=device) for _ in places]
        self._values = [torch.zeros(sizes, dtype=shape.dtype, device=device) for _ in places]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and values in which a layer's own are; which blocks those are its group's table tells."""
        place = self.layers.places[index].place
        return self._keys[place], self._values[place]

    def clear(self, blocks: Tensor) -> None:
        """Zeroes `blocks`, int64 [n], in all layers."""
        for cache in (*self._keys, *self._values):
            cache.index_fill_(0, blocks, 0)

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts a layer's keys and values [num_tokens, num_kv_heads, head_dim] at `slots`, int64 [num_tokens]."""
        for cache, new in zip(self.layer(index), (keys, values), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, new)
