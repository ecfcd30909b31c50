"""Paged attention in plain torch: the oracle for faster backends, and what runs on a CPU today.

Keys and values are gathered by block table into dense tensors. Sequences with one query (decodes) of about the same
length go through one batched call; each longer chunk through one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from stallfree_worker.model.attention.interface import AttentionRule, PagedAttention, PagedSequences


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Sequences that are computed in one call, with as many queries each."""

    rows: Tensor | slice  # which rows of the flat batch, sequence after sequence
    blocks: Tensor  # int64 [num_sequences * num_blocks]
    num_sequences: int
    mask: Tensor  # [num_sequences, 1, 1, num_queries, num_keys], 0 or -inf


class ReferenceAttention:
    def prepare(self, sequences: PagedSequences) -> PagedAttention:
        return _StepAttention(sequences)


class _StepAttention:
    """Masks and gathers are made once per window and step, not per layer."""

    def __init__(self, sequences: PagedSequences) -> None:
        self._sequences = sequences
        self._groups_by_window: dict[int | None, list[_Group]] = {}

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rule: AttentionRule) -> Tensor:
        groups = self._groups_by_window.get(rule.window_tokens)
        if groups is None:
            groups = _make_groups(self._sequences, rule.window_tokens, q.dtype)
            self._groups_by_window[rule.window_tokens] = groups
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return _attend(q, k_cache, v_cache, groups[0], rule)
        out = torch.empty_like(q)
        for group in groups:
            out[group.rows] = _attend(q[group.rows], k_cache, v_cache, group, rule)
        return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _Group, rule: AttentionRule) -> Tensor:
    """q [num_sequences * num_queries, num_heads, head_dim] → the same shape."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    n = group.num_sequences
    keys, values = (
        cache.index_select(0, group.blocks).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [n, num_kv_heads, num_keys, head_dim]
    # The heads that share a key stand side by side: [n, num_kv_heads, group_size, num_queries, head_dim].
    queries = q.view(n, -1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    out = _score(queries, keys, values, group.mask, rule)
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


def _make_groups(sequences: PagedSequences, window: int | None, dtype: torch.dtype) -> list[_Group]:
    num_single = sequences.num_single_queries
    groups = _decode_groups(sequences, window, dtype) if num_single else []
    first_row = num_single
    for index in range(num_single, len(sequences.query_lengths)):
        groups.append(_chunk_group(sequences, index, window, dtype, first_row=first_row))
        first_row += sequences.query_lengths[index]
    return groups


def _decode_groups(sequences: PagedSequences, window: int | None, dtype: torch.dtype) -> list[_Group]:
    """Decodes by length, a factor of two in one group: padding is at most half of what is read."""
    block_size = sequences.block_size
    indices_by_size: dict[int, list[int]] = defaultdict(list)
    for index in range(sequences.num_single_queries):
        end = sequences.kv_lengths[index]
        indices_by_size[(_num_blocks(_first_key(end - 1, window), end, block_size) - 1).bit_length()].append(index)
    groups = []
    for indices in indices_by_size.values():
        everything = len(indices_by_size) == 1
        rows = slice(0, len(indices)) if everything else torch.tensor(indices, device=sequences.block_tables.device)
        groups.append(_decode_group(sequences, indices, rows, window=window, dtype=dtype))
    return groups


def _decode_group(
    sequences: PagedSequences, indices: list[int], rows: Tensor | slice, *, window: int | None, dtype: torch.dtype
) -> _Group:
    block_size, device = sequences.block_size, sequences.block_tables.device
    ends = [sequences.kv_lengths[index] for index in indices]
    width = max(_num_blocks(_first_key(end - 1, window), end, block_size) for end in ends)
    last = sequences.seqlens_k[rows].long() - 1
    first_key = (last - window + 1).clamp(min=0) if window is not None else torch.zeros_like(last)
    columns = (first_key // block_size)[:, None] + torch.arange(width, device=device)
    tables = sequences.block_tables[rows].long()
    blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    is_seen = (positions <= last[:, None]) & (positions >= first_key[:, None])
    return _Group(
        rows=rows,
        blocks=blocks.flatten(),
        num_sequences=len(indices),
        mask=_as_mask(is_seen[:, None, None, None], dtype),
    )


def _chunk_group(
    sequences: PagedSequences, index: int, window: int | None, dtype: torch.dtype, *, first_row: int
) -> _Group:
    length, end = sequences.query_lengths[index], sequences.kv_lengths[index]
    block_size, device = sequences.block_size, sequences.block_tables.device
    first_block = _first_key(end - length, window) // block_size
    blocks = sequences.block_tables[index, first_block : -(-end // block_size)].long()
    key_positions = torch.arange(first_block * block_size, (first_block + len(blocks)) * block_size, device=device)
    query_positions = torch.arange(end - length, end, device=device)[:, None]
    is_seen = key_positions <= query_positions
    if window is not None:
        is_seen &= key_positions > query_positions - window
    return _Group(
        rows=slice(first_row, first_row + length),
        blocks=blocks,
        num_sequences=1,
        mask=_as_mask(is_seen[None, None, None], dtype),
    )


def _first_key(query_position: int, window: int | None) -> int:
    return 0 if window is None else max(0, query_position - window + 1)


def _num_blocks(first_key: int, end: int, block_size: int) -> int:
    return -(-end // block_size) - first_key // block_size


def _as_mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, float("-inf"))
