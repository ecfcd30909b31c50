"""The calls into flash-attn: shapes, strides and order of arguments, against plain torch. Without a GPU a stand-in
takes the library's place; the tests of whole batches run on one with the marker `gpu` too."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stallfree_worker.model.attention.flash_attn import (
    FlashAttention,
    FlashAttention2,
    FlashAttention3,
    find_flash_attention,
    reason_against,
)
from stallfree_worker.model.attention.interface import AttentionRule, PagedSequences, PagedTables
from stallfree_worker.model.attention.reference import ReferenceAttention
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.loader import load_model
from tests.worker.model import flash_attn_stand_in as stand_in
from tests.worker.model.conftest import tiny_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64
QUERY_LENGTHS = (1, 1, 1, 5, 300, 2)
KV_LENGTHS = (1, 700, 256, 5, 301, 513)

Flash = tuple[FlashAttention, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(params=["2", "3", pytest.param("real", marks=pytest.mark.gpu)])
def flash(request: pytest.FixtureRequest) -> Flash:
    if request.param == "2":
        return FlashAttention2(stand_in.flash_attn_varlen_func), CPU, torch.float32
    if request.param == "3":
        return FlashAttention3(stand_in.flash_attn_with_kvcache), CPU, torch.float32
    found = find_flash_attention(CUDA)
    assert not isinstance(found, str), found
    return found, CUDA, torch.bfloat16


def make_tables(lengths: tuple[int, ...], *, block_size: int, num_blocks: int, device: torch.device) -> PagedTables:
    free = random.Random(1).sample(range(num_blocks - 1), num_blocks - 1)
    used = [-(-length // block_size) for length in lengths]
    tables = torch.full((len(lengths), max(used)), num_blocks - 1, dtype=torch.int32)
    for row, count in enumerate(used):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    return PagedTables(
        seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        kv_lengths=lengths,
    )


def make_sequences(*tables: PagedTables, block_size: int, device: torch.device) -> PagedSequences:
    starts = [0, *itertools.accumulate(QUERY_LENGTHS)]
    return PagedSequences(
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        block_size=block_size,
        query_lengths=QUERY_LENGTHS,
        tables=tables,
    )


def random_tensors(num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, keys, values. The queries are a slice of a wider tensor, as those of a fused projection are."""
    torch.manual_seed(2)
    fused = torch.randn(sum(QUERY_LENGTHS), NUM_HEADS + NUM_KV_HEADS, HEAD_DIM).to(device, dtype)
    caches = [torch.randn(num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM).to(device, dtype) for _ in range(2)]
    return [fused[:, :NUM_HEADS], *caches]


@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_hybrid_batch_has_the_result_of_plain_torch(flash: Flash, window: int | None, softcap: float | None) -> None:
    attention, device, dtype = flash
    block_size = 256
    tables = make_tables(KV_LENGTHS, block_size=block_size, num_blocks=20, device=device)
    sequences = make_sequences(tables, block_size=block_size, device=device)
    q, keys, values = random_tensors(20, block_size, device, dtype)
    rule = AttentionRule(scale=0.2, window_tokens=window, softcap=softcap)
    out = attention.prepare(sequences)(q, keys, values, rule)
    expected = ReferenceAttention().prepare(sequences)(q, keys, values, rule)
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_every_kv_group_has_its_own_lengths_and_blocks(flash: Flash) -> None:
    attention, device, dtype = flash
    shorter = tuple(
        [min(length, 260) if count == 1 else length for count, length in zip(QUERY_LENGTHS, KV_LENGTHS, strict=True)]
    )
    groups = [make_tables(lengths, block_size=256, num_blocks=20, device=device) for lengths in (KV_LENGTHS, shorter)]
    sequences = make_sequences(*groups, block_size=256, device=device)
    q, keys, values = random_tensors(20, 256, device, dtype)
    attend, expect = attention.prepare(sequences), ReferenceAttention().prepare(sequences)
    for group, window in ((0, None), (1, 200), (0, None)):
        rule = AttentionRule(scale=0.2, window_tokens=window, group=group)
        torch.testing.assert_close(
            attend(q, keys, values, rule), expect(q, keys, values, rule), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )


def test_small_blocks_are_for_the_third_generation() -> None:
    tables = make_tables(KV_LENGTHS, block_size=16, num_blocks=150, device=CPU)
    sequences = make_sequences(tables, block_size=16, device=CPU)
    q, keys, values = random_tensors(150, 16, CPU, torch.float32)
    rule = AttentionRule(scale=0.2, window_tokens=None)
    out = FlashAttention3(stand_in.flash_attn_with_kvcache).prepare(sequences)(q, keys, values, rule)
    torch.testing.assert_close(
        out, ReferenceAttention().prepare(sequences)(q, keys, values, rule), rtol=1e-4, atol=1e-5
    )
    assert FlashAttention2(stand_in.flash_attn_varlen_func).block_size_multiple == 256


@pytest.mark.gpu
def test_the_library_has_the_signature_of_the_stand_in() -> None:
    found = find_flash_attention(CUDA)
    assert not isinstance(found, str), found
    pairs: dict[type[FlashAttention], tuple[str, Callable[..., Tensor]]] = {
        FlashAttention2: ("varlen_func", stand_in.flash_attn_varlen_func),
        FlashAttention3: ("kvcache_func", stand_in.flash_attn_with_kvcache),
    }
    name, own = pairs[type(found)]
    real = inspect.signature(getattr(found, name)).parameters
    assert inspect.signature(own).parameters.keys() <= real.keys()


def test_what_it_cannot_compute_is_told() -> None:
    assert reason_against(128, torch.bfloat16) is None
    assert "float32" in str(reason_against(128, torch.float32))
    assert "head_dim 320" in str(reason_against(320, torch.bfloat16))
    assert "CUDA" in str(find_flash_attention(CPU))


def test_without_a_gpu_it_is_refused_by_name(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match="--attention-backend flash_attn: flash-attn is for CUDA devices"):
        load_model(tiny_settings(tiny_folder("llama"), attention_backend="flash_attn"))
