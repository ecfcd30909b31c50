"""`StepPlan` → the flat numbers of one forward pass, on the host. Pure bookkeeping.

Only what a plan says: what follows from it, such as positions and lengths, the compiled kernels find for themselves,
and `device_inputs` for whatever computes in torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.model.host_numbers import HostNumbers, NumberList, side_by_side
from stallfree_worker.model.logprobs import prompt_targets


class BatchInputs(NamedTuple):
    """One hybrid batch, flat: the tokens of all chunks one after another. Chunks of one token come first, whatever the
    plan's order: attention takes them together."""

    chunks: Sequence[Chunk]
    token_ids: NumberList
    row_starts: NumberList
    """Where each chunk's tokens begin, and at last where they all end."""
    num_computed: NumberList
    """By chunk, tokens of its text before it."""
    num_shared: NumberList
    """By chunk, tokens of its text that stand in the cache and are not written again."""
    packed_tables: HostNumbers
    """[num_chunks, num_groups]: see `BlockTables`. No step copies a table that can be read where it stands."""
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


def make_batch_inputs(plan: StepPlan, *, block_size: int) -> BatchInputs:
    """Raises ValueError where the blocks of a chunk do not reach to its end: nobody looks again."""
    chunks = sorted(plan.chunks, key=_is_long)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    for chunk, length in zip(chunks, lengths, strict=True):
        if chunk.block_tables.num_reached_blocks * block_size < chunk.num_computed_tokens + length:
            raise ValueError(f"{chunk.request_id}: a block table does not reach to the end of its chunk")
    row_ends = list(itertools.accumulate(lengths))
    targets = list(map(prompt_targets, chunks))
    drawing = [end - 1 for chunk, end in zip(chunks, row_ends, strict=True) if _draws(chunk)]
    scoring = _scored_rows(targets, row_ends, lengths)
    token_ids, wanted_rows, logit_rows, scored_rows = side_by_side(
        "q",
        [
            list(itertools.chain.from_iterable([chunk.token_ids for chunk in chunks])),
            sorted({*drawing, *scoring}) if scoring else drawing,
            drawing,
            scoring,
        ],
    )
    row_starts, num_computed, num_shared = side_by_side(
        "i",
        [
            [0, *row_ends],
            [chunk.num_computed_tokens for chunk in chunks],
            [chunk.num_shared_tokens for chunk in chunks],
        ],
    )
    return BatchInputs(
        chunks=chunks,
        token_ids=token_ids,
        row_starts=row_starts,
        num_computed=num_computed,
        num_shared=num_shared,
        packed_tables=HostNumbers("q", b"".join([chunk.block_tables.packed for chunk in chunks])),
        wanted_rows=wanted_rows,
        logit_rows=logit_rows,
        sampled=tuple(filter(_draws, chunks)),
        scored_rows=scored_rows,
        scored=tuple([chunk for chunk, asked in zip(chunks, targets, strict=True) if asked]),
    )


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
