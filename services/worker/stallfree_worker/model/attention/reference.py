"""Paged attention in plain torch: the oracle for faster backends, and what runs where none of them can.

Keys and values are gathered by block table into dense tensors. Sequences with one query (decodes) of about the same
length go through one batched call; each longer chunk through calls of its own, some hundred queries at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from stallfree_worker.model.attention.interface import AttentionRule, PagedAttention, PagedSequences, PagedTables

_MAX_QUERIES = 256
"""Of one call: a tile of queries reads no key behind its last one or before its window, and its mask stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Sequences that are computed in one call, with as many queries each."""

    rows: Tensor | slice  # which rows of the flat batch, sequence after sequence
    table_rows: Tensor | slice  # the sequences' rows of the block tables
    columns: Tensor  # int64 [num_sequences, num_blocks]: the places in those rows that are read
    mask: Tensor  # [num_sequences, 1, 1, num_queries, num_keys], 0 or -inf

    def blocks_in(self, tables: PagedTables) -> Tensor:
        """int64 [num_sequences * num_blocks]"""
        return tables.block_tables[self.table_rows].long().gather(1, self.columns).flatten()


class ReferenceAttention:
    def prepare(self, sequences: PagedSequences) -> PagedAttention:
        return _StepAttention(sequences)


_Key = tuple[int | None, tuple[int, ...]]
"""Window and lengths: the groups for which both are alike share their masks."""


class _StepAttention:
    """Masks are made once per step for all layers and KV groups with the same window, places of blocks once per group,
    and neither per layer."""

    def __init__(self, sequences: PagedSequences) -> None:
        self._sequences = sequences
        self._calls: dict[_Key, list[_Call]] = {}
        self._blocks_by_group: dict[int, list[Tensor]] = {}

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rule: AttentionRule) -> Tensor:
        tables = self._sequences.tables[rule.group]
        key = (rule.window_tokens, tables.kv_lengths)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = _make_calls(self._sequences, tables, rule.window_tokens, q.dtype)
        blocks = self._blocks_by_group.get(rule.group)
        if blocks is None:
            blocks = self._blocks_by_group[rule.group] = [call.blocks_in(tables) for call in calls]
        if len(calls) == 1 and isinstance(calls[0].rows, slice):
            return _attend(q, (k_cache, v_cache), blocks[0], calls[0].mask, rule)
        out = torch.empty_like(q)
        for call, its_blocks in zip(calls, blocks, strict=True):
            out[call.rows] = _attend(q[call.rows], (k_cache, v_cache), its_blocks, call.mask, rule)
        return out


def _attend(q: Tensor, caches: tuple[Tensor, Tensor], blocks: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """q [num_sequences * num_queries, num_heads, head_dim] → the same shape."""
    n, (num_kv_heads, head_dim) = len(mask), caches[0].shape[2:]
    keys, values = (
        cache.index_select(0, blocks).view(n, -1, num_kv_heads, head_dim).transpose(1, 2) for cache in caches
    )  # [n, num_kv_heads, num_keys, head_dim]
    # The heads that share a key stand side by side: [n, num_kv_heads, group_size, num_queries, head_dim].
    queries = q.view(n, -1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    out = _score(queries, keys, values, mask, rule)
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape)


def _score(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    if rule.softcap is not None:
        scores = torch.matmul(queries.float(), keys[:, :, None].float().transpose(-1, -2)) * rule.scale
        scores = rule.softcap * torch.tanh(scores / rule.softcap) + mask.float()
        return torch.matmul(scores.softmax(dim=-1), values[:, :, None].float()).to(queries.dtype)
    n, num_kv_heads, group_size, num_queries, head_dim = queries.shape
    if num_queries == 1:
        # The heads of a group become the queries of one head, so that a key is read once for all of them.
        dense = F.scaled_dot_product_attention(queries.squeeze(3), keys, values, mask.squeeze(1), scale=rule.scale)
        return dense.unsqueeze(3)
    shared = (n * num_kv_heads, group_size, -1, head_dim)
    dense = F.scaled_dot_product_attention(
        queries.reshape(n * num_kv_heads, group_size, num_queries, head_dim),
        keys.flatten(0, 1)[:, None].expand(shared),
        values.flatten(0, 1)[:, None].expand(shared),
        mask.squeeze(1),
        scale=rule.scale,
    )
    return dense.view(queries.shape)


def _make_calls(sequences: PagedSequences, tables: PagedTables, window: int | None, dtype: torch.dtype) -> list[_Call]:
    num_single, block_size = sequences.num_single_queries, sequences.block_size
    calls = _decode_calls(tables, num_single, window, block_size=block_size, dtype=dtype) if num_single else []
    first_row = num_single
    for index in range(num_single, len(sequences.query_lengths)):
        length, end = sequences.query_lengths[index], tables.kv_lengths[index]
        for start in range(0, length, _MAX_QUERIES):
            rows = slice(first_row + start, first_row + min(start + _MAX_QUERIES, length))
            positions = range(end - length + start, end - length + start + rows.stop - rows.start)
            columns, mask = _tile(positions, window, block_size=block_size, like=tables.block_tables, dtype=dtype)
            calls.append(_Call(rows=rows, table_rows=slice(index, index + 1), columns=columns, mask=mask))
        first_row += length
    return calls


def _decode_calls(
    tables: PagedTables, num_single: int, window: int | None, *, block_size: int, dtype: torch.dtype
) -> list[_Call]:
    """Decodes by length, a factor of two in one call: padding is at most half of what is read."""
    indices_by_size: dict[int, list[int]] = defaultdict(list)
    widths = [_num_blocks(_first_key(end - 1, window), end, block_size) for end in tables.kv_lengths[:num_single]]
    for index, width in enumerate(widths):
        indices_by_size[(width - 1).bit_length()].append(index)
    calls = []
    for indices in indices_by_size.values():
        everything = len(indices_by_size) == 1
        rows = slice(0, num_single) if everything else torch.tensor(indices, device=tables.block_tables.device)
        width = max([widths[index] for index in indices])
        columns, mask = _decodes(tables, rows, window, width=width, block_size=block_size, dtype=dtype)
        calls.append(_Call(rows=rows, table_rows=rows, columns=columns, mask=mask))
    return calls


def _decodes(
    tables: PagedTables, rows: Tensor | slice, window: int | None, *, width: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Columns of the block tables, [num_sequences, width], and mask of sequences with one query."""
    device = tables.block_tables.device
    last = tables.seqlens_k[rows].long() - 1
    first_key = (last - window + 1).clamp(min=0) if window is not None else torch.zeros_like(last)
    columns = (first_key // block_size)[:, None] + torch.arange(width, device=device)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    is_seen = (positions <= last[:, None]) & (positions >= first_key[:, None])
    return columns.clamp(max=tables.block_tables.shape[1] - 1), _as_mask(is_seen[:, None, None, None], dtype)


def _tile(
    positions: range, window: int | None, *, block_size: int, like: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Columns of the block table, [1, num_blocks], and mask of a sequence's queries at `positions` of its table."""
    first_block, end_block = _first_key(positions.start, window) // block_size, -(-positions.stop // block_size)
    key_positions = torch.arange(first_block * block_size, end_block * block_size, device=like.device)
    query_positions = torch.arange(positions.start, positions.stop, device=like.device)[:, None]
    is_seen = key_positions <= query_positions
    if window is not None:
        is_seen &= key_positions > query_positions - window
    columns = torch.arange(first_block, end_block, device=like.device)[None]
    return columns, _as_mask(is_seen[None, None, None], dtype)


def _first_key(query_position: int, window: int | None) -> int:
    return 0 if window is None else max(0, query_position - window + 1)


def _num_blocks(first_key: int, end: int, block_size: int) -> int:
    return -(-end // block_size) - first_key // block_size


def _as_mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, float("-inf"))
