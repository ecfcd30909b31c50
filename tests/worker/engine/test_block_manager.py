from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import IntegrityError

A, B = RequestId("a"), RequestId("b")


def test_a_table_has_a_block_for_every_begun_block_size() -> None:
    blocks = BlockManager(num_blocks=8, block_size=16)
    blocks.allocate(A, 33)
    assert len(blocks.block_table(A)) == 3
    assert blocks.num_free_blocks == 5


def test_spare_blocks_are_left_alone() -> None:
    blocks = BlockManager(num_blocks=4, block_size=16)
    assert blocks.can_allocate(48, num_spare_blocks=1)
    assert not blocks.can_allocate(49, num_spare_blocks=1)


def test_a_table_grows_only_where_a_token_has_no_slot() -> None:
    blocks = BlockManager(num_blocks=1, block_size=16)
    blocks.allocate(A, 1)
    assert blocks.can_append(A, 16)
    blocks.append(A, 16)
    assert len(blocks.block_table(A)) == 1
    assert not blocks.can_append(A, 17)
    with pytest.raises(IntegrityError):
        blocks.append(A, 17)


def test_two_tables_share_no_block_and_freeing_returns_them_all() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.allocate(A, 10)
    blocks.allocate(B, 10)
    assert not set(blocks.block_table(A)) & set(blocks.block_table(B))
    blocks.free(A)
    blocks.free(B)
    assert blocks.num_free_blocks == 8
    assert not blocks.owners
    blocks.check_integrity()


def test_an_owner_cannot_allocate_again() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.allocate(A, 1)
    with pytest.raises(IntegrityError):
        blocks.allocate(A, 1)


def test_the_self_check_finds_a_leak_and_a_double_owner() -> None:
    leaking = BlockManager(num_blocks=4, block_size=4)
    leaking._free.pop()
    with pytest.raises(IntegrityError, match="lost"):
        leaking.check_integrity()
    shared = BlockManager(num_blocks=4, block_size=4)
    shared.allocate(A, 4)
    shared._table_by_id[B] = shared.block_table(A)
    with pytest.raises(IntegrityError, match="reference count"):
        shared.check_integrity()


@given(
    num_blocks=st.integers(1, 20),
    block_size=st.integers(1, 8),
    moves=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 40)), max_size=40),
)
def test_any_order_of_moves_keeps_every_block_in_one_place(
    num_blocks: int, block_size: int, moves: list[tuple[str, int]]
) -> None:
    blocks = BlockManager(num_blocks=num_blocks, block_size=block_size)
    for name, num_tokens in moves:
        owner = RequestId(name)
        if owner not in blocks.owners:
            if blocks.can_allocate(num_tokens, num_spare_blocks=0):
                blocks.allocate(owner, num_tokens)
        elif num_tokens % 3 == 0:
            blocks.free(owner)
        elif blocks.can_append(owner, num_tokens):
            blocks.append(owner, num_tokens)
            assert len(blocks.block_table(owner)) * block_size >= num_tokens
        blocks.check_integrity()
