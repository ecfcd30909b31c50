"""`StepPlan` → the flat tensors of one forward pass. Pure bookkeeping on the host.

It runs between two passes, when weights have driven all else out of the CPU's caches, and a call into a library costs
as much as some tens of plain steps of the interpreter. So lengths are lists, and all numbers of one kind become one
array, which is also one copy to the device.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import BlockTable, Chunk, StepPlan
from stallfree_worker.model.attention.interface import PagedSequences, PagedTables
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.logprobs import prompt_targets
from stallfree_worker.model.transfers import to_device

_ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """One hybrid batch, flat: the tokens of all chunks one after another."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    sequences: PagedSequences
    num_shared: Tensor  # int32 [num_sequences]: tokens of the text that stand in the cache and are not written again
    fresh_blocks: Tensor | None  # int64: blocks that this step begins and does not fill
    wanted_rows: Tensor  # int64, rising: rows that logits are made of
    logit_rows: Tensor  # int64 [num_sampled]: rows whose next token is drawn
    sampled: tuple[Chunk, ...]
    """The chunks of `logit_rows`, in that order."""
    scored_rows: Tensor | None  # int64: rows that tell how likely the prompt tokens behind them are
    scored: tuple[Chunk, ...]
    """The chunks of `scored_rows`, in that order."""
    find_slots: Callable[[], Tensor]

    @cached_property
    def slot_mapping(self) -> Tensor:
        """int64 [num_groups, num_tokens]: where each token's keys and values go. Found when it is first asked for: not
        every decoder asks."""
        return self.find_slots()


def make_batch_inputs(plan: StepPlan, cache: KVCache, *, device: torch.device) -> BatchInputs:
    """Chunks of one token come first, whatever the plan's order: attention takes them together."""
    chunks = sorted(plan.chunks, key=_is_long)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    row_ends = list(itertools.accumulate(lengths))
    ends = [chunk.num_computed_tokens + length for chunk, length in zip(chunks, lengths, strict=True)]
    kinds = _kinds(chunks, ends, cache)
    fresh = [block for kind in kinds for block in kind.fresh_blocks(lengths)]
    targets = list(map(prompt_targets, chunks))
    drawing = [end - 1 for chunk, end in zip(chunks, row_ends, strict=True) if _draws(chunk)]
    scoring = _scored_rows(targets, row_ends, lengths)
    spans = [range(chunk.num_computed_tokens, end) for chunk, end in zip(chunks, ends, strict=True)]
    own_positions = list(itertools.chain.from_iterable(spans))
    token_ids, positions, wanted_rows, logit_rows, scored_rows, fresh_blocks = _on_device(
        np.int64,
        (
            list(itertools.chain.from_iterable([chunk.token_ids for chunk in chunks])),
            own_positions,
            sorted({*drawing, *scoring}) if scoring else drawing,
            drawing,
            scoring,
            fresh,
        ),
        device,
    )
    shared = [chunk.num_shared_tokens for chunk in chunks]
    of_kinds = [numbers for kind in kinds for numbers in (kind.kv_lengths, kind.starts)]
    row_starts, num_shared, *seen = _on_device(np.int32, ([0, *row_ends], shared, *of_kinds), device)
    tables = {
        group: table
        for kind, seqlens_k, starts in zip(kinds, seen[::2], seen[1::2], strict=True)
        for group, table in kind.on(device, seqlens_k, starts)
    }
    return BatchInputs(
        token_ids=token_ids,
        positions=positions,
        sequences=PagedSequences(
            cu_seqlens_q=row_starts,
            block_size=cache.block_size,
            query_lengths=tuple(lengths),
            tables=tuple([tables[group] for group in range(len(tables))]),
        ),
        num_shared=num_shared,
        fresh_blocks=fresh_blocks if fresh else None,
        wanted_rows=wanted_rows,
        logit_rows=logit_rows,
        sampled=tuple(filter(_draws, chunks)),
        scored_rows=scored_rows if scoring else None,
        scored=tuple([chunk for chunk, asked in zip(chunks, targets, strict=True) if asked]),
        find_slots=lambda: to_device(_slots(chunks, lengths, own_positions, kinds, cache), device),
    )


def _on_device(dtype: type[np.integer[Any]], lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each of `lists` as a tensor, with one copy for all."""
    whole = to_device(np.fromiter(itertools.chain.from_iterable(lists), dtype, count=sum(map(len, lists))), device)
    return list(torch.split(whole, list(map(len, lists))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The block tables of all chunks in the KV groups of one window, which all begin at the same token and have the
    same lengths. Lengths count from there."""

    groups: list[int]
    block_size: int
    starts: list[int]
    """Tokens before the tables, by chunk."""
    kv_lengths: list[int]
    tables: list[list[BlockTable]]
    """By group and chunk."""
    packed: NDArray[np.int32]  # [num_groups of the kind, num_chunks, max_blocks]: the same

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[num_groups of the kind, num_tokens] of the token at each of `positions`, in the text of the chunk that
        `rows` tells."""
        places = positions - np.array(self.starts)[rows]
        blocks = self.packed[:, rows, places // self.block_size].astype(np.int64)
        slots: NDArray[np.int64] = blocks * self.block_size + places % self.block_size
        return slots

    def fresh_blocks(self, lengths: list[int]) -> list[int]:
        """A chunk's last blocks, where the chunk writes the first slot and leaves others open."""
        size = self.block_size
        begun = [
            (chunk, kv_length // size)
            for chunk, (kv_length, length) in enumerate(zip(self.kv_lengths, lengths, strict=True))
            if 0 < kv_length % size <= length
        ]
        return [tables[chunk].blocks[block] for tables in self.tables for chunk, block in begun]

    def on(self, device: torch.device, seqlens_k: Tensor, starts: Tensor) -> list[tuple[int, PagedTables]]:
        """Each group with its tables. `seqlens_k` and `starts` are the lists of the same names, on the device."""
        block_tables = to_device(self.packed, device)
        kv_lengths = tuple(self.kv_lengths)
        return [
            (group, PagedTables(seqlens_k=seqlens_k, block_tables=tables, kv_lengths=kv_lengths, starts=starts))
            for group, tables in zip(self.groups, block_tables.unbind(0), strict=True)
        ]


def _kinds(chunks: list[Chunk], ends: list[int], cache: KVCache) -> list[_Kind]:
    groups_by_window: dict[int | None, list[int]] = defaultdict(list)
    for group, own in enumerate(cache.layers.groups):
        groups_by_window[own.window_tokens].append(group)
    return [_kind(chunks, ends, groups, cache) for groups in groups_by_window.values()]


def _kind(chunks: list[Chunk], ends: list[int], groups: list[int], cache: KVCache) -> _Kind:
    size = cache.block_size
    tables = [[chunk.block_tables[group] for chunk in chunks] for group in groups]
    starts = [table.num_forgotten * size for table in tables[0]]
    kv_lengths = list(map(operator.sub, ends, starts))
    return _Kind(
        groups=groups,
        block_size=size,
        starts=starts,
        kv_lengths=kv_lengths,
        tables=tables,
        packed=_packed(tables, [-(-length // size) for length in kv_lengths], null_block=cache.null_block),
    )


def _packed(tables: list[list[BlockTable]], num_used: list[int], *, null_block: int) -> NDArray[np.int32]:
    """[num_groups, num_chunks, max_blocks], padded with the null block. Of a chunk's tables only the blocks in use are
    taken: more may be reserved for later."""
    width = max(num_used)
    padding = null_block.to_bytes(_ID_BYTES, sys.byteorder) * width
    used_bytes = [_ID_BYTES * used for used in num_used]
    packed = bytearray()
    for own in tables:
        for table, end in zip(own, used_bytes, strict=True):
            if len(table.packed) < end:
                raise ValueError("a block table does not reach to the end of its chunk")
            packed += table.packed[:end]
            packed += padding[end:]
    return np.frombuffer(packed, dtype=np.int32).reshape(len(tables), len(num_used), width)


def _slots(
    chunks: list[Chunk], lengths: list[int], own_positions: list[int], kinds: list[_Kind], cache: KVCache
) -> NDArray[np.int64]:
    """See `BatchInputs.slot_mapping`. Shared tokens go to the waste block."""
    rows = np.arange(len(chunks)).repeat(lengths)
    positions = np.array(own_positions)
    slots = np.empty((len(cache.layers.groups), len(positions)), dtype=np.int64)
    for kind in kinds:
        slots[kind.groups] = kind.slots(rows, positions)
    is_shared = positions < np.array([chunk.num_shared_tokens for chunk in chunks])[rows]
    slots[:, is_shared] = cache.waste_block * cache.block_size
    return slots


def _is_long(chunk: Chunk) -> bool:
    return len(chunk.token_ids) > 1


def _draws(chunk: Chunk) -> bool:
    return chunk.output_index is not None


def _scored_rows(targets: Sequence[Sequence[int]], row_ends: list[int], lengths: list[int]) -> list[int]:
    """The first rows of a chunk are those that have a prompt token behind them."""
    return [
        row
        for asked, end, length in zip(targets, row_ends, lengths, strict=True)
        for row in range(end - length, end - length + len(asked))
    ]
