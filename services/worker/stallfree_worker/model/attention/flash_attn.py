"""Paged attention by the flash-attn library on CUDA: one call per layer for all chunks and decodes of a step.

Two generations of the library are known. FlashAttention-2 (Dao 2023, arXiv 2307.08691) takes keys and values of
variable length with a block table; its blocks are multiples of 256 tokens. FlashAttention-3 (Shah et al. 2024, arXiv
2407.08608), for Hopper, takes lengths as they are and blocks of any size. In both a causal mask is aligned to the last
key, as the queries of a chunk are the last of its tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from stallfree_worker.model.attention.interface import AttentionRule, PagedAttention, PagedSequences

MOST_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_AMPERE, _HOPPER = (8, 0), (9, 0)
_FLASH3_MODULES = ("flash_attn_3.flash_attn_interface", "flash_attn_interface")
"""Newer and older name of what `pip install` of the library's folder `hopper` gives."""


@dataclass(frozen=True, slots=True)
class FlashAttention2:
    varlen_func: Callable[..., Tensor]
    """`flash_attn.flash_attn_varlen_func`."""

    @property
    def block_size_multiple(self) -> int:
        return 256

    def prepare(self, sequences: PagedSequences) -> PagedAttention:
        most_queries = max(sequences.query_lengths)
        # It wants the lengths of the keys summed up, though the table tells where they are.
        ends = [F.pad(table.seqlens_k.cumsum(0, dtype=torch.int32), (1, 0)) for table in sequences.tables]

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rule: AttentionRule) -> Tensor:
            tables = sequences.tables[rule.group]
            return self.varlen_func(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=sequences.cu_seqlens_q,
                cu_seqlens_k=ends[rule.group],
                max_seqlen_q=most_queries,
                max_seqlen_k=max(tables.kv_lengths),
                softmax_scale=rule.scale,
                causal=True,
                window_size=_window_size(rule),
                softcap=rule.softcap or 0.0,
                block_table=tables.block_tables,
            )

        return attend


@dataclass(frozen=True, slots=True)
class FlashAttention3:
    kvcache_func: Callable[..., Tensor]
    """`flash_attn_interface.flash_attn_with_kvcache`."""

    @property
    def block_size_multiple(self) -> int:
        return 16

    def prepare(self, sequences: PagedSequences) -> PagedAttention:
        most_queries = max(sequences.query_lengths)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rule: AttentionRule) -> Tensor:
            tables = sequences.tables[rule.group]
            return self.kvcache_func(
                q,
                k_cache,
                v_cache,
                cache_seqlens=tables.seqlens_k,
                page_table=tables.block_tables,
                cu_seqlens_q=sequences.cu_seqlens_q,
                max_seqlen_q=most_queries,
                softmax_scale=rule.scale,
                causal=True,
                window_size=_window_size(rule),
                softcap=rule.softcap or 0.0,
            )

        return attend


FlashAttention = FlashAttention2 | FlashAttention3


def _window_size(rule: AttentionRule) -> tuple[int, int]:
    """(left, right), both inclusive and without the query itself; -1 is no limit."""
    return (-1, -1) if rule.window_tokens is None else (rule.window_tokens - 1, 0)


def find_flash_attention(device: torch.device) -> FlashAttention | str:
    """The best generation that is installed and made for this device; or why there is none."""
    if device.type != "cuda":
        return "flash-attn is for CUDA devices"
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        return f"flash-attn needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    if capability[0] == _HOPPER[0]:
        for name in _FLASH3_MODULES:
            module = _import(name)
            if module is not None:
                return FlashAttention3(module.flash_attn_with_kvcache)
    module = _import("flash_attn")
    if module is None:
        return "flash-attn is not installed: it comes with the extra [gpu]"
    return FlashAttention2(module.flash_attn_varlen_func)


def reason_against(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why no generation can compute this model; None where they can."""
    if dtype != torch.bfloat16:
        return f"flash-attn does not compute in {str(dtype).removeprefix('torch.')}"
    if head_dim > MOST_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return f"head_dim {head_dim} is no multiple of {_HEAD_DIM_MULTIPLE} up to {MOST_HEAD_DIM}"
    return None


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:  # not installed, or compiled for another torch
        return None
