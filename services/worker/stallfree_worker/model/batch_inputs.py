"""`StepPlan` → the flat numbers of one forward pass. Pure bookkeeping on the host."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import BlockTable, Chunk, StepPlan
from stallfree_worker.model.attention.interface import PagedSequences, PagedTables
from stallfree_worker.model.host_numbers import NumberList, side_by_side
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.logprobs import prompt_targets
from stallfree_worker.model.transfers import to_device


class GroupTables(NamedTuple):
    """Where one KV group has the tokens of all sequences. Groups of one window begin at the same token and share all
    but the blocks."""

    tables: Sequence[BlockTable]
    """By sequence."""
    addresses: NumberList
    """Of the blocks of each, as 32-bit integers: no step copies a table that it can read where it stands."""
    kv_lengths: NumberList
    """By sequence, tokens in the blocks of the table that are in use: more blocks may be reserved for later."""
    starts: NumberList
    """By sequence, tokens before the table: position in the text of the first token in the blocks."""

    def padded(self, block_size: int, null_block: int) -> NDArray[np.int32]:
        """int32 [num_sequences, max_blocks], padded with the null block."""
        num_used = [-(-length // block_size) for length in self.kv_lengths.tolist()]
        padding = memoryview(array("i", [null_block]) * max(num_used))
        padded = bytearray()  # numpy would take longer for every row
        for table, used in zip(self.tables, num_used, strict=True):
            padded += memoryview(table.packed)[:used]
            padded += padding[used:]
        return np.frombuffer(padded, dtype=np.int32).reshape(len(num_used), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInputs:
    """What is computed with in torch of a hybrid batch."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    sequences: PagedSequences
    slot_mapping: Tensor  # int64 [num_groups, num_tokens]: where each token's keys and values go


class BatchInputs(NamedTuple):
    """One hybrid batch, flat: the tokens of all chunks one after another. Chunks of one token come first, whatever the
    plan's order: attention takes them together."""

    token_ids: NumberList
    positions: NumberList
    row_starts: NumberList
    """Where each sequence's tokens begin, and at last where they all end."""
    query_lengths: tuple[int, ...]
    """Tokens of each sequence that are computed."""
    num_shared: NumberList
    """By sequence, tokens of the text that stand in the cache and are not written again."""
    tables: tuple[GroupTables, ...]
    """By KV group."""
    fresh_blocks: NumberList
    """Blocks that this step begins and does not fill."""
    wanted_rows: NumberList
    """Rising: rows that logits are made of."""
    logit_rows: NumberList
    """Rows whose next token is drawn."""
    sampled: tuple[Chunk, ...]
    """The chunks of `logit_rows`, in that order."""
    scored_rows: NumberList
    """Rows that tell how likely the prompt tokens behind them are."""
    scored: tuple[Chunk, ...]
    """The chunks of `scored_rows`, in that order."""

    @property
    def num_single_queries(self) -> int:
        return self.query_lengths.count(1)

    def on(self, device: torch.device, cache: KVCache) -> DeviceInputs:
        """What is computed with in torch. Compiled kernels do without."""
        padded = [group.padded(cache.block_size, cache.null_block) for group in self.tables]
        on_device = torch.split(
            to_device(np.concatenate(padded, axis=None), device), [blocks.size for blocks in padded]
        )
        return DeviceInputs(
            token_ids=self.token_ids.on(device),
            positions=self.positions.on(device),
            sequences=PagedSequences(
                cu_seqlens_q=self.row_starts.on(device),
                block_size=cache.block_size,
                query_lengths=self.query_lengths,
                tables=tuple(
                    [
                        PagedTables(
                            seqlens_k=group.kv_lengths.on(device),
                            block_tables=blocks.view(len(self.query_lengths), -1),
                            kv_lengths=tuple(group.kv_lengths.tolist()),
                            starts=group.starts.on(device),
                        )
                        for group, blocks in zip(self.tables, on_device, strict=True)
                    ]
                ),
            ),
            slot_mapping=to_device(self._slots(padded, cache), device),
        )

    def _slots(self, padded: Sequence[NDArray[np.int32]], cache: KVCache) -> NDArray[np.int64]:
        """[num_groups, num_tokens]: see `DeviceInputs`. Shared tokens go to the waste block."""
        rows = np.arange(len(self.query_lengths)).repeat(self.query_lengths)
        positions, size = np.array(self.positions.tolist()), cache.block_size
        slots = np.empty((len(self.tables), len(positions)), dtype=np.int64)
        for own, group, blocks in zip(slots, self.tables, padded, strict=True):
            places = positions - np.array(group.starts.tolist())[rows]
            own[:] = blocks[rows, places // size].astype(np.int64) * size + places % size
        is_shared = positions < np.array(self.num_shared.tolist())[rows]
        slots[:, is_shared] = cache.waste_block * size
        return slots


def make_batch_inputs(plan: StepPlan, cache: KVCache) -> BatchInputs:
    chunks = sorted(plan.chunks, key=_is_long)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    row_ends = list(itertools.accumulate(lengths))
    ends = [chunk.num_computed_tokens + length for chunk, length in zip(chunks, lengths, strict=True)]
    tables = list(zip(*[chunk.block_tables for chunk in chunks], strict=True))
    kinds = [
        _kind(tables[groups.start : groups.stop], ends, lengths, cache.block_size) for groups in cache.layers.alike
    ]
    targets = list(map(prompt_targets, chunks))
    drawing = [end - 1 for chunk, end in zip(chunks, row_ends, strict=True) if _draws(chunk)]
    scoring = _scored_rows(targets, row_ends, lengths)
    spans = [range(chunk.num_computed_tokens, end) for chunk, end in zip(chunks, ends, strict=True)]
    token_ids, positions, fresh_blocks, wanted_rows, logit_rows, scored_rows, *addresses = side_by_side(
        "q",
        [
            list(itertools.chain.from_iterable([chunk.token_ids for chunk in chunks])),
            list(itertools.chain.from_iterable(spans)),
            [block for kind in kinds for block in kind.fresh_blocks],
            sorted({*drawing, *scoring}) if scoring else drawing,
            drawing,
            scoring,
            *[[table.packed_address for table in own] for own in tables],
        ],
    )
    row_starts, num_shared, *seen = side_by_side(
        "i",
        [
            [0, *row_ends],
            [chunk.num_shared_tokens for chunk in chunks],
            *[numbers for kind in kinds for numbers in (kind.kv_lengths, kind.starts)],
        ],
    )
    return BatchInputs(
        token_ids=token_ids,
        positions=positions,
        row_starts=row_starts,
        query_lengths=tuple(lengths),
        num_shared=num_shared,
        tables=tuple(
            [
                GroupTables(tables[group], addresses[group], kv_lengths, starts)
                for groups, kv_lengths, starts in zip(cache.layers.alike, seen[::2], seen[1::2], strict=True)
                for group in groups
            ]
        ),
        fresh_blocks=fresh_blocks,
        wanted_rows=wanted_rows,
        logit_rows=logit_rows,
        sampled=tuple(filter(_draws, chunks)),
        scored_rows=scored_rows,
        scored=tuple([chunk for chunk, asked in zip(chunks, targets, strict=True) if asked]),
    )


class _Kind(NamedTuple):
    """What is alike in the KV groups of one window, whose tables all begin at the same token: see `GroupTables`."""

    kv_lengths: list[int]
    starts: list[int]
    fresh_blocks: list[int]
    """Of all these groups, a chunk's last blocks, where the chunk writes the first slot and leaves others open."""


def _kind(tables: Sequence[tuple[BlockTable, ...]], ends: list[int], lengths: list[int], block_size: int) -> _Kind:
    """`tables` by group and chunk, `ends` of the chunks in their texts."""
    starts = [table.num_forgotten * block_size for table in tables[0]]
    kv_lengths = list(map(operator.sub, ends, starts))
    num_used = [-(-length // block_size) for length in kv_lengths]
    if any(len(table.blocks) < used for own in tables for table, used in zip(own, num_used, strict=True)):
        raise ValueError("a block table does not reach to the end of its chunk")
    begun = [
        (chunk, kv_length // block_size)
        for chunk, (kv_length, length) in enumerate(zip(kv_lengths, lengths, strict=True))
        if 0 < kv_length % block_size <= length
    ]
    return _Kind(kv_lengths, starts, [own[chunk].blocks[block] for own in tables for chunk, block in begun])


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
