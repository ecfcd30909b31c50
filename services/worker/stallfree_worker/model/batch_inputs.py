"""`StepPlan` → the flat tensors of one forward pass. Pure bookkeeping on the host, one copy per tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.model.attention.interface import PagedSequences, PagedTables
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.logprobs import prompt_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """One hybrid batch, flat: the tokens of all chunks one after another."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_groups, num_tokens]
    sequences: PagedSequences
    fresh_blocks: Tensor | None  # int64: blocks that this step begins and does not fill
    logit_rows: Tensor  # int64 [num_sampled]: rows whose next token is drawn
    sampled: tuple[Chunk, ...]
    """The chunks of `logit_rows`, in that order."""
    scored_rows: Tensor | None  # int64: rows that tell how likely the prompt tokens behind them are
    scored: tuple[Chunk, ...]
    """The chunks of `scored_rows`, in that order."""


def make_batch_inputs(plan: StepPlan, cache: KVCache, *, device: torch.device) -> BatchInputs:
    """Chunks of one token come first, whatever the plan's order: attention takes them together."""
    chunks = sorted(plan.chunks, key=lambda chunk: len(chunk.token_ids) > 1)
    lengths = np.array([len(chunk.token_ids) for chunk in chunks])
    ends = np.array([chunk.num_computed_tokens + len(chunk.token_ids) for chunk in chunks])
    row_ends = np.cumsum(lengths)
    positions = np.arange(row_ends[-1]) + np.repeat(ends - row_ends, lengths)
    groups = [_Group.of(chunks, ends, group, cache) for group in range(len(cache.layers.groups))]
    is_shared = positions < np.repeat(np.array([chunk.num_shared_tokens for chunk in chunks]), lengths)
    rows = np.repeat(np.arange(len(chunks)), lengths)
    slots = [np.where(is_shared, cache.waste_block * cache.block_size, one.slots(rows, positions)) for one in groups]
    fresh = np.concatenate([one.fresh_blocks(lengths) for one in groups])
    return BatchInputs(
        token_ids=_to(device, np.concatenate([np.array(chunk.token_ids, dtype=np.int64) for chunk in chunks])),
        positions=_to(device, positions),
        slot_mapping=_to(device, np.stack(slots)),
        sequences=PagedSequences(
            cu_seqlens_q=_to(device, np.concatenate(([0], row_ends)).astype(np.int32)),
            block_size=cache.block_size,
            query_lengths=tuple(lengths.tolist()),
            tables=tuple([one.on(device) for one in groups]),
        ),
        fresh_blocks=_to(device, fresh) if len(fresh) else None,
        logit_rows=_to(device, row_ends[[_draws(chunk) for chunk in chunks]] - 1),
        sampled=tuple(filter(_draws, chunks)),
        scored_rows=_scored_rows(chunks, row_ends - lengths, device),
        scored=tuple(filter(prompt_targets, chunks)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The block tables of all chunks in one KV group. Lengths count from the start of each table."""

    block_size: int
    num_forgotten: NDArray[np.int64]  # [num_chunks] blocks before the table
    kv_lengths: NDArray[np.int64]  # [num_chunks]
    tables: NDArray[np.int32]  # [num_chunks, max_blocks]

    @classmethod
    def of(cls, chunks: list[Chunk], ends: NDArray[np.int64], group: int, cache: KVCache) -> _Group:
        """Only blocks that hold computed tokens are taken; a table may list more, reserved for later."""
        tables = [chunk.block_tables[group] for chunk in chunks]
        num_forgotten = np.array([table.num_forgotten for table in tables])
        kv_lengths = ends - num_forgotten * cache.block_size
        num_used = -(-kv_lengths // cache.block_size)
        padded = np.full((len(chunks), num_used.max()), cache.null_block, dtype=np.int32)
        for row, table, used in zip(padded, tables, num_used.tolist(), strict=True):
            row[:used] = table.blocks[:used]
        return cls(block_size=cache.block_size, num_forgotten=num_forgotten, kv_lengths=kv_lengths, tables=padded)

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the token at each of `positions`, in the text of the chunk that `rows` tells."""
        blocks: NDArray[np.int32] = self.tables[rows, positions // self.block_size - self.num_forgotten[rows]]
        return blocks.astype(np.int64) * self.block_size + positions % self.block_size

    def fresh_blocks(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """A chunk's last block, where the chunk writes its first slot and leaves others open."""
        last_block = (self.kv_lengths - 1) // self.block_size
        begins = last_block * self.block_size >= self.kv_lengths - lengths
        is_fresh = begins & (self.kv_lengths % self.block_size != 0)
        blocks: NDArray[np.int32] = self.tables[np.flatnonzero(is_fresh), last_block[is_fresh]]
        return blocks.astype(np.int64)

    def on(self, device: torch.device) -> PagedTables:
        return PagedTables(
            seqlens_k=_to(device, self.kv_lengths.astype(np.int32)),
            block_tables=_to(device, self.tables),
            kv_lengths=tuple(self.kv_lengths.tolist()),
            starts=_to(device, (self.num_forgotten * self.block_size).astype(np.int32)),
        )


def _draws(chunk: Chunk) -> bool:
    return chunk.output_index is not None


def _scored_rows(chunks: list[Chunk], row_starts: NDArray[np.int64], device: torch.device) -> Tensor | None:
    """The first rows of a chunk are those that have a prompt token behind them."""
    targets = map(prompt_targets, chunks)
    rows = [start + np.arange(len(asked)) for start, asked in zip(row_starts, targets, strict=True) if asked]
    return _to(device, np.concatenate(rows)) if rows else None


def _to(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
