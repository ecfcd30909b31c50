"""Reference attention against the formula, one query and head at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from stallfree_worker.model.attention.interface import AttentionRule, PagedSequences, PagedTables
from stallfree_worker.model.attention.reference import ReferenceAttention

BLOCK_SIZE = 4
NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 8


def by_formula(q: Tensor, keys: Tensor, values: Tensor, position: int, rule: AttentionRule) -> Tensor:
    """q [num_heads, head_dim]; keys, values [num_tokens, num_kv_heads, head_dim]."""
    first = 0 if rule.window_tokens is None else max(0, position - rule.window_tokens + 1)
    rows = []
    for head in range(q.shape[0]):
        kv_head = head // GROUP
        scores = [float(q[head] @ keys[p, kv_head]) * rule.scale for p in range(first, position + 1)]
        if rule.softcap is not None:
            scores = [rule.softcap * math.tanh(score / rule.softcap) for score in scores]
        shares = [math.exp(score - max(scores)) for score in scores]
        weighted = [share * values[p, kv_head] for share, p in zip(shares, range(first, position + 1), strict=True)]
        rows.append(torch.stack(weighted).sum(0) / sum(shares))
    return torch.stack(rows)


def make_batch(query_lengths: list[int], kv_lengths: list[int]) -> tuple[PagedSequences, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    num_blocks = [-(-length // BLOCK_SIZE) for length in kv_lengths]
    pool = torch.randperm(sum(num_blocks)).tolist()
    tables = torch.full((len(kv_lengths), max(num_blocks)), len(pool), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.tensor([pool.pop() for _ in range(count)])
    sequences = PagedSequences(
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(query_lengths)], dtype=torch.int32),
        block_size=BLOCK_SIZE,
        query_lengths=tuple(query_lengths),
        tables=(
            PagedTables(
                seqlens_k=torch.tensor(kv_lengths, dtype=torch.int32),
                block_tables=tables,
                kv_lengths=tuple(kv_lengths),
            ),
        ),
    )
    cache_shape = (sum(num_blocks) + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = torch.randn(cache_shape), torch.randn(cache_shape)
    return sequences, torch.randn(sum(query_lengths), NUM_KV_HEADS * GROUP, HEAD_DIM), k_cache, v_cache


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_query_sees_what_the_formula_says(window: int | None, softcap: float | None) -> None:
    query_lengths = [1, 1, 1, 1, 5, 9, 2]
    kv_lengths = [1, 4, 13, 40, 5, 30, 18]
    sequences, q, k_cache, v_cache = make_batch(query_lengths, kv_lengths)
    rule = AttentionRule(scale=0.3, window_tokens=window, softcap=softcap)
    out = ReferenceAttention().prepare(sequences)(q, k_cache, v_cache, rule)
    row = 0
    for index, (query_length, kv_length) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        blocks = sequences.tables[0].block_tables[index, : -(-kv_length // BLOCK_SIZE)].long()
        keys, values = k_cache[blocks].flatten(0, 1), v_cache[blocks].flatten(0, 1)
        for position in range(kv_length - query_length, kv_length):
            expected = by_formula(q[row], keys, values, position, rule)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
            row += 1
