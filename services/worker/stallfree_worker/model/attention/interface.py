"""What the decoder asks of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class PagedTables(NamedTuple):
    """Where one KV group has the tokens of the sequences. What lies behind a group's window may be left out, so the
    same sequence can be shorter in one group than in another; only distances between tokens matter."""

    seqlens_k: Tensor  # int32 [num_sequences]: tokens in the blocks of the table
    block_tables: Tensor  # int32 [num_sequences, max_blocks], padded with the null block
    kv_lengths: tuple[int, ...]
    """`seqlens_k` on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequences:
    """The sequences of one hybrid batch, as a variable-length paged kernel takes them.

    The queries of sequence `i` are rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` of the flat batch, and the last of
    the tokens in its blocks. Sequences with a single query come first. Tuples repeat the lengths on the host, so that
    nobody waits for the device to learn them.
    """

    cu_seqlens_q: Tensor  # int32 [num_sequences + 1]
    block_size: int
    query_lengths: tuple[int, ...]
    tables: tuple[PagedTables, ...]
    """By KV group."""

    @property
    def num_single_queries(self) -> int:
        return sum(length == 1 for length in self.query_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """How scores are made; the same for all sequences of a layer."""

    scale: float
    window_tokens: int | None
    group: int = 0
    """The KV group whose tables hold for the layer."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rule: AttentionRule) -> Tensor:
        """Causal attention with grouped heads, accumulated in float32.

        q [num_tokens, num_heads, head_dim]; k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim], which
        hold the keys and values of the queries' own tokens already → [num_tokens, num_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    def prepare(self, sequences: PagedSequences) -> PagedAttention:
        """The attention of one step; every layer calls it."""
        ...
