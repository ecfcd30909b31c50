"""The paged KV cache: the tensors, and how many blocks fit. Which block is whose is the engine's business."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.families import DecoderConfig

DEFAULT_CPU_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The layout of one block, alike for every layer."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: DecoderConfig, *, block_size: int, dtype: torch.dtype) -> KVCacheShape:
        return cls(
            num_layers=len(config.layers),
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes in all layers, keys and values together."""
        slots = self.num_layers * self.block_size * 2
        return slots * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def blocks_within(self, memory_bytes: int, *, most_useful_tokens: int) -> int:
        """How many blocks fit, and are of use. Raises `ModelLoadError` with both figures if not even one fits."""
        # One block more than can be given away is allocated: the null block.
        num_blocks = memory_bytes // self.block_bytes - 1
        if num_blocks < 1:
            raise ModelLoadError(
                f"the KV cache has {max(memory_bytes, 0)} bytes, but the least it needs is {2 * self.block_bytes} "
                f"bytes (two blocks of {self.block_size} tokens); raise --kv-cache-memory"
            )
        return min(num_blocks, ceil(most_useful_tokens / self.block_size))


class KVCache:
    """Keys and values of all layers: [num_blocks + 1, block_size, num_kv_heads, head_dim] each.

    Everything that attention may read is finite, whatever an earlier owner of a block left there: a masked slot still
    enters a product with weight 0, and 0 x NaN is NaN. So a block is cleared when a request begins to fill it, and
    block tables are padded with the null block, which is the last one and always zero.
    """

    def __init__(self, shape: KVCacheShape, *, num_blocks: int, device: torch.device) -> None:
        sizes = (num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.null_block = num_blocks
        self._keys = [torch.zeros(sizes, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self._values = [torch.zeros(sizes, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._keys[index], self._values[index]

    def clear(self, blocks: Tensor) -> None:
        """Zeroes `blocks`, int64 [n], in all layers."""
        for cache in (*self._keys, *self._values):
            cache.index_fill_(0, blocks, 0)

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts keys and values [num_tokens, num_kv_heads, head_dim] at `slots`, int64 [num_tokens]."""
        for cache, new in ((self._keys[index], keys), (self._values[index], values)):
            cache.flatten(0, 1).index_copy_(0, slots, new)
