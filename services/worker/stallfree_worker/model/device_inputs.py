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
    size, num_chunks = cache.block_size, len(inputs.chunks)
    row_starts, num_computed = inputs.row_starts.as_array(), inputs.num_computed.as_array()
    lengths = np.diff(row_starts)
    chunk_of_row = np.arange(num_chunks).repeat(lengths)
    positions = np.arange(len(chunk_of_row)) + (num_computed - row_starts[:-1])[chunk_of_row]
    # [num_groups, num_chunks]: lengths in a table count from its first token
    starts = inputs.packed_tables.as_array().reshape(num_chunks, -1, 2)[:, :, 1].T * size
    kv_lengths = num_computed + lengths - starts
    groups = zip(*[chunk.block_tables for chunk in inputs.chunks], strict=True)
    padded = [
        _padded(tables, used, null_block=cache.null_block)
        for tables, used in zip(groups, (-(-kv_lengths // size)).tolist(), strict=True)
    ]
    places = positions - starts[:, chunk_of_row]
    slots = np.stack([_slots(blocks, chunk_of_row, own, size) for blocks, own in zip(padded, places, strict=True)])
    slots[:, positions < inputs.num_shared.as_array()[chunk_of_row]] = cache.waste_block * size
    device_positions, slot_mapping, fresh_blocks = _on_device(
        np.int64, (positions, slots, _fresh_blocks(kv_lengths, lengths, padded, size)), device
    )
    cu_seqlens_q, seqlens_k, *block_tables = _on_device(np.int32, (row_starts, kv_lengths, *padded), device)
    tables = [
        PagedTables(seqlens_k=seqlens, block_tables=blocks, kv_lengths=tuple(on_host))
        for seqlens, blocks, on_host in zip(seqlens_k.unbind(0), block_tables, kv_lengths.tolist(), strict=True)
    ]
    return DeviceInputs(
        token_ids=inputs.token_ids.on(device),
        positions=device_positions,
        sequences=PagedSequences(
            cu_seqlens_q=cu_seqlens_q,
            block_size=size,
            query_lengths=tuple(lengths.tolist()),
            tables=tuple(tables),
        ),
        slot_mapping=slot_mapping,
        fresh_blocks=fresh_blocks,
    )


def _padded(tables: Sequence[BlockTable], num_used: Sequence[int], *, null_block: int) -> NDArray[np.int32]:
    """[num_chunks, max_blocks] of one group. Of a table the blocks in use are taken: more may be reserved for later."""
    padding = memoryview(array("i", [null_block]) * max(num_used))
    padded = bytearray()  # numpy would take longer for every row
    for table, used in zip(tables, num_used, strict=True):
        padded += memoryview(table.packed)[:used]
        padded += padding[used:]
    return np.frombuffer(padded, dtype=np.int32).reshape(len(tables), -1)


def _slots(blocks: NDArray[np.int32], chunk_of_row: _Numbers, places: _Numbers, block_size: int) -> _Numbers:
    """Of the tokens at `places` of the tables of one group, a row for each chunk."""
    slots: _Numbers = blocks[chunk_of_row, places // block_size].astype(np.int64) * block_size + places % block_size
    return slots


def _fresh_blocks(
    kv_lengths: _Numbers, lengths: NDArray[np.int32], padded: Sequence[NDArray[np.int32]], block_size: int
) -> NDArray[np.int32]:
    """Of each group, a chunk's last block, where the chunk writes the first slot and leaves others open."""
    num_last = kv_lengths % block_size
    fresh = [
        blocks[own, length[own] // block_size]
        for blocks, length, own in zip(padded, kv_lengths, (num_last > 0) & (num_last <= lengths), strict=True)
    ]
    return np.concatenate(fresh)


def _on_device(
    dtype: type[np.integer[Any]], arrays: Sequence[NDArray[np.integer[Any]]], device: torch.device
) -> list[Tensor]:
    """Each of `arrays` as a tensor of its shape."""
    whole = to_device(np.concatenate(arrays, axis=None, dtype=dtype, casting="same_kind"), device)
    parts = torch.split(whole, [numbers.size for numbers in arrays])
    return [part.view(numbers.shape) for part, numbers in zip(parts, arrays, strict=True)]
