"""`BatchInputs` → the tensors that `decoder` and `cuda_graphs` compute with, on any device. Numbers of one width go
there with one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import BlockTable
from stallfree_worker.model.attention.interface import PagedSequences, PagedTables
from stallfree_worker.model.batch_inputs import BatchInputs
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.transfers import to_device

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInputs:
    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    sequences: PagedSequences
    slot_mapping: Tensor  # int64 [num_groups, num_tokens]: where each token's keys and values go
    fresh_blocks: Tensor  # int64: blocks that this step begins and does not fill


def make_device_inputs(inputs: BatchInputs, cache: KVCache, device: torch.device) -> DeviceInputs:
    lengths = tuple([len(chunk.token_ids) for chunk in inputs.chunks])
    rows = np.arange(len(lengths)).repeat(lengths)
    positions = np.concatenate(
        [
            np.arange(chunk.num_computed_tokens, chunk.num_computed_tokens + len(chunk.token_ids))
            for chunk in inputs.chunks
        ]
    )
    ends = np.array([chunk.num_computed_tokens + len(chunk.token_ids) for chunk in inputs.chunks])
    groups = [
        _Group(tables, ends, cache) for tables in zip(*[chunk.block_tables for chunk in inputs.chunks], strict=True)
    ]
    slots = np.stack([group.slots(rows, positions, cache.block_size) for group in groups])
    slots[:, positions < np.array(inputs.num_shared.tolist())[rows]] = cache.waste_block * cache.block_size
    fresh = np.concatenate([group.fresh_blocks(lengths, cache.block_size) for group in groups])
    on_device, slot_mapping, fresh_blocks = _on_device(np.int64, (positions, slots, fresh), device)
    row_starts, *of_groups = _on_device(
        np.int32,
        [
            np.array(inputs.row_starts.tolist()),
            *[numbers for group in groups for numbers in (group.kv_lengths, group.starts, group.blocks)],
        ],
        device,
    )
    return DeviceInputs(
        token_ids=inputs.token_ids.on(device),
        positions=on_device,
        sequences=PagedSequences(
            cu_seqlens_q=row_starts,
            block_size=cache.block_size,
            query_lengths=lengths,
            tables=tuple(
                [
                    PagedTables(
                        seqlens_k=seqlens_k,
                        block_tables=blocks,
                        kv_lengths=tuple(group.kv_lengths.tolist()),
                        starts=starts,
                    )
                    for group, seqlens_k, starts, blocks in zip(
                        groups, of_groups[::3], of_groups[1::3], of_groups[2::3], strict=True
                    )
                ]
            ),
        ),
        slot_mapping=slot_mapping,
        fresh_blocks=fresh_blocks,
    )


class _Group:
    """The tables of all chunks in one KV group. Lengths count from where they begin."""

    def __init__(self, tables: Sequence[BlockTable], ends: _Numbers, cache: KVCache) -> None:
        """`ends` of the chunks, in their texts."""
        self.starts = np.array([table.num_forgotten for table in tables]) * cache.block_size
        self.kv_lengths = ends - self.starts
        num_used = (-(-self.kv_lengths // cache.block_size)).tolist()
        padding = memoryview(array("i", [cache.null_block]) * max(num_used))
        padded = bytearray()  # numpy would take longer for every row
        for table, used in zip(tables, num_used, strict=True):
            padded += memoryview(table.packed)[:used]  # more blocks may be reserved for later
            padded += padding[used:]
        self.blocks = np.frombuffer(padded, dtype=np.int32).reshape(len(tables), -1)

    def slots(self, rows: _Numbers, positions: _Numbers, block_size: int) -> _Numbers:
        """Of the tokens at `positions` of the texts of the chunks that `rows` tells."""
        places = positions - self.starts[rows]
        slots: _Numbers = self.blocks[rows, places // block_size].astype(np.int64) * block_size + places % block_size
        return slots

    def fresh_blocks(self, lengths: Sequence[int], block_size: int) -> NDArray[np.int32]:
        """A chunk's last block, where the chunk writes the first slot and leaves others open."""
        num_last = self.kv_lengths % block_size
        chunks = np.flatnonzero((num_last > 0) & (num_last <= np.array(lengths)))
        blocks: NDArray[np.int32] = self.blocks[chunks, self.kv_lengths[chunks] // block_size]
        return blocks


def _on_device(
    dtype: type[np.integer[Any]], arrays: Sequence[NDArray[np.integer[Any]]], device: torch.device
) -> list[Tensor]:
    """Each of `arrays` as a tensor of its shape."""
    whole = to_device(np.concatenate(arrays, axis=None, dtype=dtype), device)
    parts = torch.split(whole, [numbers.size for numbers in arrays])
    return [part.view(numbers.shape) for part, numbers in zip(parts, arrays, strict=True)]
