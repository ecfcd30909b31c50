"""flash-attn's two functions on a CPU: their documented signatures, what they check of their arguments, and what they
compute, one sequence at a time. They stand in for the library where there is no GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    block_table: Tensor | None = None,
) -> Tensor:
    """Of FlashAttention-2."""
    assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
    assert block_table is not None
    assert k.shape[1] % 256 == 0
    _check_lengths(cu_seqlens_k, len(block_table) + 1)
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_k >= int(lengths.max())
    return _attend(
        q, k, v, cu_seqlens_q, max_seqlen_q, lengths, block_table, softmax_scale, causal, window_size, softcap
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """Of FlashAttention-3."""
    unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens)
    assert all(one is None for one in (*unused, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa))
    assert (attention_chunk, num_splits, sm_margin, return_softmax_lse) == (0, 0, 0, False)
    assert rotary_interleaved
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    _check_lengths(cache_seqlens, len(page_table))
    return _attend(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        max_seqlen_q,
        cache_seqlens,
        page_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
    )


def _check_lengths(lengths: Tensor, count: int) -> None:
    assert lengths.dtype == torch.int32
    assert lengths.shape == (count,)
    assert lengths.is_contiguous()


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqlens_k: Tensor,
    tables: Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    _check_lengths(cu_seqlens_q, len(tables) + 1)
    assert tables.dtype == torch.int32
    assert tables.stride(-1) == 1
    num_heads, head_dim = q.shape[1:]
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[3] == head_dim
    assert num_heads % k_cache.shape[2] == 0
    assert all(one.stride(-1) == 1 and one.dtype == q.dtype for one in (q, k_cache, v_cache))
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert causal
    assert scale is not None
    out = torch.full_like(q, float("nan"))  # rows that belong to no sequence are left as memory has them
    for index, table in enumerate(tables):
        rows = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
        own = q[rows]
        length = int(seqlens_k[index])
        blocks = table[: -(-length // k_cache.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[rows] = _attend_one(own, keys, values, scale, window_size, softcap)
    return out


def _attend_one(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, window_size: tuple[int, int], softcap: float
) -> Tensor:
    """A query at row i sees the keys from `i + len(keys) - len(q) - left` to `i + len(keys) - len(q)`."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(group, dim=1).float() for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(len(q))[:, None] + len(keys) - len(q)
    places = torch.arange(len(keys))[None]
    left, right = window_size
    assert right in {-1, 0}
    is_seen = (places <= last) & ((places >= last - left) if left >= 0 else torch.tensor(True))
    shares = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, values).to(q.dtype)
