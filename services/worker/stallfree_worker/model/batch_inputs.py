"""`StepPlan` → the flat tensors of one forward pass. Pure bookkeeping on the host, one copy per tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.model.attention.interface import PagedSequences


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """One hybrid batch, flat: the tokens of all chunks one after another."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]
    sequences: PagedSequences
    fresh_blocks: Tensor | None  # int64: blocks that this step begins and does not fill
    logit_rows: Tensor  # int64 [num_sampled]: rows whose next token is drawn
    sampled: tuple[Chunk, ...]
    """The chunks of `logit_rows`, in that order."""


def make_batch_inputs(plan: StepPlan, *, block_size: int, null_block: int, device: torch.device) -> BatchInputs:
    """Chunks of one token come first, whatever the plan's order: attention takes them together."""
    chunks = sorted(plan.chunks, key=lambda chunk: len(chunk.token_ids) > 1)
    lengths = np.array([len(chunk.token_ids) for chunk in chunks])
    ends = np.array([chunk.num_computed_tokens + len(chunk.token_ids) for chunk in chunks])
    row_ends = np.cumsum(lengths)
    tables = _block_tables(chunks, ends, block_size=block_size, null_block=null_block)
    positions = np.arange(row_ends[-1]) + np.repeat(ends - row_ends, lengths)
    blocks = tables[np.repeat(np.arange(len(chunks)), lengths), positions // block_size]
    return BatchInputs(
        token_ids=_to(device, np.concatenate([np.array(chunk.token_ids, dtype=np.int64) for chunk in chunks])),
        positions=_to(device, positions),
        slot_mapping=_to(device, blocks.astype(np.int64) * block_size + positions % block_size),
        sequences=PagedSequences(
            cu_seqlens_q=_to(device, np.concatenate(([0], row_ends)).astype(np.int32)),
            seqlens_k=_to(device, ends.astype(np.int32)),
            block_tables=_to(device, tables),
            block_size=block_size,
            query_lengths=tuple(lengths.tolist()),
            kv_lengths=tuple(ends.tolist()),
        ),
        fresh_blocks=_fresh_blocks(ends, lengths, tables, block_size=block_size, device=device),
        logit_rows=_to(device, row_ends[[_draws(chunk) for chunk in chunks]] - 1),
        sampled=tuple(filter(_draws, chunks)),
    )


def _draws(chunk: Chunk) -> bool:
    return chunk.output_index is not None


def _block_tables(
    chunks: list[Chunk], ends: NDArray[np.int64], *, block_size: int, null_block: int
) -> NDArray[np.int32]:
    """[num_chunks, max_blocks]: only blocks that hold computed tokens; a table may list more, reserved for later."""
    num_used = -(-ends // block_size)
    tables = np.full((len(chunks), num_used.max()), null_block, dtype=np.int32)
    for row, chunk, used in zip(tables, chunks, num_used, strict=True):
        row[:used] = chunk.block_table[:used]
    return tables


def _fresh_blocks(
    ends: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tables: NDArray[np.int32],
    *,
    block_size: int,
    device: torch.device,
) -> Tensor | None:
    """A chunk's last block, where the chunk writes its first slot and leaves others open."""
    last_block = (ends - 1) // block_size
    is_fresh = (last_block * block_size >= ends - lengths) & (ends % block_size != 0)
    if not is_fresh.any():
        return None
    return _to(device, tables[np.flatnonzero(is_fresh), last_block[is_fresh]].astype(np.int64))


def _to(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
