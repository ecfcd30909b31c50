"""`StepPlan` → the flat tensors of one forward pass. Pure bookkeeping on the host, one copy per tensor."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.model.attention.interface import PagedSequences, PagedTables
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.logprobs import prompt_targets
from stallfree_worker.model.transfers import to_device

_ID_BYTES = 4
_PADDING = b"\xff"
"""Makes -1, which is no block."""


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
    ends = lengths + [chunk.num_computed_tokens for chunk in chunks]
    row_ends = lengths.cumsum()
    rows = np.arange(len(chunks)).repeat(lengths)
    positions = np.arange(row_ends[-1]) + (ends - row_ends)[rows]
    kinds = _kinds(chunks, ends, cache)
    slots = np.empty((len(cache.layers.groups), len(positions)), dtype=np.int64)
    for kind in kinds:
        slots[kind.groups] = kind.slots(rows, positions)
    is_shared = positions < np.array([chunk.num_shared_tokens for chunk in chunks])[rows]
    slots[:, is_shared] = cache.waste_block * cache.block_size
    fresh = np.concatenate([kind.fresh_blocks(lengths) for kind in kinds])
    tables = {group: table for kind in kinds for group, table in kind.on(device)}
    return BatchInputs(
        token_ids=to_device(np.fromiter(_token_ids(chunks), dtype=np.int64, count=len(positions)), device),
        positions=to_device(positions, device),
        slot_mapping=to_device(slots, device),
        sequences=PagedSequences(
            cu_seqlens_q=to_device(np.concatenate(([0], row_ends)).astype(np.int32), device),
            block_size=cache.block_size,
            query_lengths=tuple(lengths.tolist()),
            tables=tuple([tables[group] for group in range(len(tables))]),
        ),
        fresh_blocks=to_device(fresh, device) if len(fresh) else None,
        logit_rows=to_device(row_ends[[_draws(chunk) for chunk in chunks]] - 1, device),
        sampled=tuple(filter(_draws, chunks)),
        scored_rows=_scored_rows(chunks, row_ends - lengths, device),
        scored=tuple(filter(prompt_targets, chunks)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The block tables of all chunks in the KV groups of one window, which all begin at the same token and have the
    same lengths. Lengths count from there."""

    groups: list[int]
    block_size: int
    num_forgotten: NDArray[np.int64]  # [num_chunks] blocks before the tables
    kv_lengths: NDArray[np.int64]  # [num_chunks]
    tables: NDArray[np.int32]  # [num_groups of the kind, num_chunks, max_blocks]

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[num_groups of the kind, num_tokens] of the token at each of `positions`, in the text of the chunk that
        `rows` tells."""
        blocks = self.tables[:, rows, positions // self.block_size - self.num_forgotten[rows]]
        slots: NDArray[np.int64] = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        return slots

    def fresh_blocks(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """A chunk's last blocks, where the chunk writes the first slot and leaves others open."""
        last_block = (self.kv_lengths - 1) // self.block_size
        begins = last_block * self.block_size >= self.kv_lengths - lengths
        is_fresh = begins & (self.kv_lengths % self.block_size != 0)
        blocks: NDArray[np.int32] = self.tables[:, np.flatnonzero(is_fresh), last_block[is_fresh]]
        return blocks.astype(np.int64).ravel()

    def on(self, device: torch.device) -> list[tuple[int, PagedTables]]:
        """Each group with its tables."""
        seqlens_k = to_device(self.kv_lengths.astype(np.int32), device)
        starts = to_device((self.num_forgotten * self.block_size).astype(np.int32), device)
        block_tables = to_device(self.tables, device)
        kv_lengths = tuple(self.kv_lengths.tolist())
        return [
            (group, PagedTables(seqlens_k=seqlens_k, block_tables=tables, kv_lengths=kv_lengths, starts=starts))
            for group, tables in zip(self.groups, block_tables.unbind(0), strict=True)
        ]


def _kinds(chunks: list[Chunk], ends: NDArray[np.int64], cache: KVCache) -> list[_Kind]:
    groups_by_window: dict[int | None, list[int]] = defaultdict(list)
    for group, own in enumerate(cache.layers.groups):
        groups_by_window[own.window_tokens].append(group)
    return [_kind(chunks, ends, groups, cache) for groups in groups_by_window.values()]


def _kind(chunks: list[Chunk], ends: NDArray[np.int64], groups: list[int], cache: KVCache) -> _Kind:
    """Only blocks that hold computed tokens are taken; a table may list more, reserved for later."""
    num_forgotten = np.array([chunk.block_tables[groups[0]].num_forgotten for chunk in chunks])
    kv_lengths = ends - num_forgotten * cache.block_size
    num_used = -(-kv_lengths // cache.block_size)
    width = int(num_used.max())
    used_bytes = (num_used * _ID_BYTES).tolist()
    packed = [
        chunk.block_tables[group].packed[:used].ljust(width * _ID_BYTES, _PADDING)
        for group in groups
        for chunk, used in zip(chunks, used_bytes, strict=True)
    ]
    tables = np.frombuffer(b"".join(packed), dtype=np.int32).reshape(len(groups), len(chunks), width)
    is_padding = tables < 0
    if np.any(is_padding & (np.arange(width) < num_used[:, None])):
        raise ValueError("a block table does not reach to the end of its chunk")
    return _Kind(
        groups=groups,
        block_size=cache.block_size,
        num_forgotten=num_forgotten,
        kv_lengths=kv_lengths,
        tables=np.where(is_padding, np.int32(cache.null_block), tables),
    )


def _token_ids(chunks: list[Chunk]) -> Iterator[int]:
    return itertools.chain.from_iterable([chunk.token_ids for chunk in chunks])


def _draws(chunk: Chunk) -> bool:
    return chunk.output_index is not None


def _scored_rows(chunks: list[Chunk], row_starts: NDArray[np.int64], device: torch.device) -> Tensor | None:
    """The first rows of a chunk are those that have a prompt token behind them."""
    targets = map(prompt_targets, chunks)
    rows = [start + np.arange(len(asked)) for start, asked in zip(row_starts, targets, strict=True) if asked]
    return to_device(np.concatenate(rows), device) if rows else None
