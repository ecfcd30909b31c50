"""The block manager by hand: tables, windows, sharing, claims. `test_block_manager_model` tries it at random."""

from __future__ import annotations

import pytest

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.integrity import IntegrityError
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.prefix_hashes import PrefixHashes
from stallfree_worker.engine.step import KVGroup

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
BLOCK = 4


def make_manager(num_blocks: int = 32, *windows: int | None, chunk: int = 64) -> BlockManager:
    groups = [KVGroup(window_tokens=window) for window in windows or (None,)]
    layout = KVLayout(groups, block_size=BLOCK, largest_chunk_tokens=chunk)
    return BlockManager(num_blocks=num_blocks, layout=layout)


def hashes_of(tokens: range, salt: str = "") -> PrefixHashes:
    return PrefixHashes(tuple(tokens), block_size=BLOCK, salt=salt)


def admit(blocks: BlockManager, request_id: RequestId, tokens: range, *, salt: str = "", spare: int = 0) -> int:
    """Admits a request → tokens that it need not compute."""
    hashes = hashes_of(tokens, salt)
    prefix = blocks.find_prefix(hashes, len(tokens))
    assert blocks.can_allocate(prefix, len(tokens), num_spare_blocks=spare)
    blocks.allocate(request_id, prefix, len(tokens), hashes=hashes)
    return prefix.num_computed_tokens


def compute(blocks: BlockManager, request_id: RequestId, start: int, end: int) -> None:
    blocks.advance(request_id, start, end)
    blocks.commit(request_id, end)
    blocks.check_integrity()


def serve(blocks: BlockManager, request_id: RequestId, tokens: range, *, salt: str = "") -> int:
    """A request from admission to its end, in one chunk → tokens that it had to compute."""
    start = admit(blocks, request_id, tokens, salt=salt)
    compute(blocks, request_id, start, len(tokens))
    blocks.free(request_id)
    return len(tokens) - start


def admit_plain(blocks: BlockManager, request_id: RequestId, num_tokens: int) -> None:
    blocks.allocate(request_id, blocks.find_prefix(None, num_tokens), num_tokens)


def test_a_table_has_a_block_for_every_begun_block_size() -> None:
    blocks = make_manager(8)
    admit_plain(blocks, A, 9)
    assert len(blocks.block_tables(A)[0].blocks) == 3
    assert blocks.num_free_blocks == 5


def test_spare_blocks_are_left_alone() -> None:
    blocks = make_manager(4)
    nothing = blocks.find_prefix(None, 12)
    assert blocks.can_allocate(nothing, 12, num_spare_blocks=1)
    assert not blocks.can_allocate(nothing, 13, num_spare_blocks=1)
    assert not blocks.can_allocate(nothing, 4, num_spare_blocks=1, num_reserved_tokens=13)


def test_a_table_grows_only_where_a_token_has_no_slot() -> None:
    blocks = make_manager(1)
    admit_plain(blocks, A, 1)
    assert blocks.append(A, 4)
    tables = blocks.block_tables(A)
    assert len(tables[0].blocks) == 1
    assert not blocks.append(A, 5)
    assert blocks.block_tables(A) is tables
    blocks.check_integrity()


def test_what_is_reserved_for_the_longest_output_holds_for_windows_too() -> None:
    blocks = make_manager(20, None, 8)
    blocks.allocate(A, blocks.find_prefix(None, 4), 4, num_reserved_tokens=40)
    assert blocks.num_free_blocks == 20 - 10 - 3
    blocks.advance(A, 0, 4)
    for num_tokens in range(5, 41):
        assert blocks.append(A, num_tokens)
        assert blocks.num_free_blocks == 20 - 10 - 3
    blocks.check_integrity()


def test_two_tables_share_no_block_that_is_not_cached_and_freeing_returns_them_all() -> None:
    blocks = make_manager(8)
    admit_plain(blocks, A, 10)
    admit_plain(blocks, B, 10)
    assert not set(blocks.block_tables(A)[0].blocks) & set(blocks.block_tables(B)[0].blocks)
    blocks.free(A)
    blocks.free(B)
    assert blocks.num_free_blocks == 8
    assert not blocks.owners
    blocks.check_integrity()


def test_an_owner_cannot_allocate_again() -> None:
    blocks = make_manager(8)
    admit_plain(blocks, A, 1)
    with pytest.raises(IntegrityError):
        admit_plain(blocks, A, 1)


def test_a_repeated_prompt_computes_one_token_and_takes_no_block() -> None:
    blocks = make_manager(8)
    assert serve(blocks, A, range(16)) == 16
    assert admit(blocks, B, range(16)) == 15
    assert blocks.num_free_blocks == 4
    assert blocks.num_cached_blocks == 4


def test_b09_a_repeated_prompt_with_a_begun_block_computes_that_block_only() -> None:
    blocks = make_manager(32)
    start = admit(blocks, A, range(40))
    for end in range(start + 16, 41, 8):
        compute(blocks, A, end - 8, end)
    blocks.free(A)
    assert serve(blocks, B, range(40)) == 1
    assert serve(blocks, C, range(43)) == 3


def test_blocks_are_shared_as_soon_as_they_are_computed_and_not_before() -> None:
    blocks = make_manager(32)
    admit(blocks, A, range(16))
    compute(blocks, A, 0, 11)
    assert blocks.find_prefix(hashes_of(range(16)), 16).num_tokens == 8
    assert admit(blocks, B, range(8)) == 7
    assert blocks.block_tables(B)[0].blocks == blocks.block_tables(A)[0].blocks[:2]
    assert blocks.num_free_blocks == 28
    blocks.check_integrity()


def test_b22_no_salt_and_no_other_beginning_hits_a_cached_block() -> None:
    blocks = make_manager(32)
    serve(blocks, A, range(16), salt="x")
    assert blocks.find_prefix(hashes_of(range(16), "y"), 16).num_tokens == 0
    assert blocks.find_prefix(hashes_of(range(16)), 16).num_tokens == 0
    assert blocks.find_prefix(hashes_of(range(4, 16), "x"), 12).num_tokens == 0
    assert blocks.find_prefix(hashes_of(range(16), "x"), 16).num_tokens == 16


def test_b23_a_request_that_ends_in_the_midst_leaves_only_its_computed_full_blocks() -> None:
    blocks = make_manager(32)
    admit(blocks, A, range(40))
    compute(blocks, A, 0, 13)
    blocks.advance(A, 13, 30)
    blocks.free(A)
    assert blocks.find_prefix(hashes_of(range(40)), 40).num_tokens == 12


def test_b23_what_a_failed_request_computed_or_read_is_forgotten_in_every_group() -> None:
    blocks = make_manager(64, None, 8)
    hashes = hashes_of(range(40))
    blocks.allocate(A, blocks.find_prefix(hashes, 40), 40, hashes=hashes)
    compute(blocks, A, 0, 30)
    admit(blocks, B, range(12))
    blocks.forget(hashes)
    blocks.free(A)
    assert blocks.num_cached_blocks == 0
    blocks.free(B)
    assert blocks.num_free_blocks == 64
    blocks.check_integrity()


def test_the_end_of_the_longest_unused_text_is_evicted_first() -> None:
    blocks = make_manager(6)
    serve(blocks, A, range(12))
    serve(blocks, B, range(100, 112))
    serve(blocks, C, range(200, 208))
    assert blocks.find_prefix(hashes_of(range(12)), 12).num_tokens == 4
    assert blocks.find_prefix(hashes_of(range(100, 112)), 12).num_tokens == 12


def test_a_hit_makes_a_text_the_last_to_be_evicted() -> None:
    blocks = make_manager(6)
    serve(blocks, A, range(12))
    serve(blocks, B, range(100, 112))
    serve(blocks, A, range(12))
    serve(blocks, C, range(200, 208))
    assert blocks.find_prefix(hashes_of(range(12)), 12).num_tokens == 12


def test_without_hashes_nothing_is_read_written_or_awaited() -> None:
    blocks = make_manager(32)
    admit_plain(blocks, A, 16)
    compute(blocks, A, 0, 16)
    assert blocks.num_cached_blocks == 0
    prefix = blocks.find_prefix(hashes_of(range(16)), 16)
    assert blocks.computing_owner(hashes_of(range(16)), prefix, 16) is None
    assert blocks.find_prefix(None, 16).num_tokens == 0


def test_whoever_begins_alike_waits_until_the_last_common_block_is_computed() -> None:
    blocks = make_manager(64)
    admit(blocks, A, range(20))
    twin = PrefixHashes((*range(12), *range(50, 62)), block_size=BLOCK)
    for start, end in ((0, 8), (8, 11)):
        assert blocks.computing_owner(twin, blocks.find_prefix(twin, 24), 24) == A
        compute(blocks, A, start, end)
    assert blocks.computing_owner(twin, blocks.find_prefix(twin, 24), 24) == A
    compute(blocks, A, 11, 13)
    prefix = blocks.find_prefix(twin, 24)
    assert prefix.num_tokens == 12
    assert blocks.computing_owner(twin, prefix, 24) is None


def test_nobody_waits_for_a_block_that_it_does_not_fill() -> None:
    blocks = make_manager(64)
    admit(blocks, A, range(20))
    short = hashes_of(range(3))
    assert blocks.computing_owner(short, blocks.find_prefix(short, 3), 3) is None


def test_a_promise_ends_with_its_owner() -> None:
    blocks = make_manager(64)
    admit(blocks, A, range(20))
    twin = hashes_of(range(20))
    assert blocks.computing_owner(twin, blocks.find_prefix(twin, 20), 20) == A
    blocks.free(A)
    assert blocks.computing_owner(twin, blocks.find_prefix(twin, 20), 20) is None


def test_b12_a_window_forgets_what_lies_wholly_behind_it() -> None:
    blocks = make_manager(64, None, 8)
    admit_plain(blocks, A, 40)
    for start in range(0, 40, 10):
        blocks.advance(A, start, start + 10)
    full, window = blocks.block_tables(A)
    assert (len(full.blocks), full.num_forgotten) == (10, 0)
    assert (len(window.blocks), window.num_forgotten) == (5, 5)  # the chunk from 30 on looks back at 23
    assert blocks.append(A, 41)
    assert blocks.block_tables(A)[1].num_forgotten == 8  # position 40 looks back at 33
    blocks.check_integrity()


def test_b13_a_window_needs_no_memory_for_what_lies_behind_it() -> None:
    blocks = make_manager(32, 128 // BLOCK, chunk=16)
    assert blocks.layout.blocks_of_request(1500) == 13
    admit_plain(blocks, A, 1500)
    for start in range(0, 1500, 16):
        blocks.advance(A, start, min(start + 16, 1500))
        blocks.check_integrity()
    for num_tokens in range(1501, 1700):
        assert blocks.append(A, num_tokens)
    assert blocks.num_free_blocks == 32 - 9


def test_b13_chunks_are_shortened_until_a_whole_context_fits() -> None:
    groups = (KVGroup(window_tokens=128),)
    layout = KVLayout.fitting(groups, block_size=16, largest_chunk_tokens=2048, num_blocks=32, num_tokens=2048)
    assert layout.largest_chunk_tokens == 256
    assert layout.most_tokens(32, limit=2048) == 2048
    too_small = KVLayout.fitting(groups, block_size=16, largest_chunk_tokens=2048, num_blocks=8, num_tokens=2048)
    assert too_small.most_tokens(8, limit=2048) == 128


def test_b01_the_longest_request_is_what_all_groups_together_can_hold() -> None:
    groups = (KVGroup(), KVGroup(window_tokens=32), KVGroup(window_tokens=32))
    layout = KVLayout(groups, block_size=16, largest_chunk_tokens=32)
    longest = layout.most_tokens(64, limit=5000)
    assert longest == 16 * (64 - 2 * 5)
    assert layout.blocks_of_request(longest) <= 64 < layout.blocks_of_request(longest + 1)


def test_a_window_hits_where_its_own_width_is_cached_even_if_the_beginning_is_gone() -> None:
    blocks = make_manager(12, 8, chunk=8)
    admit(blocks, A, range(40))
    for start in range(0, 40, 8):
        compute(blocks, A, start, start + 8)
    blocks.free(A)
    admit_plain(blocks, B, 12)  # takes two free blocks and evicts one, the longest unused
    blocks.advance(B, 0, 8)
    blocks.advance(B, 8, 12)
    prefix = blocks.find_prefix(hashes_of(range(40)), 40)
    assert (prefix.num_tokens, prefix.num_computed_tokens) == (40, 39)
    assert prefix.tables[0].num_forgotten == 8
    assert len(prefix.tables[0].blocks) == 2


def test_a_shared_block_of_a_window_is_claimed_by_each_table_so_that_no_prefill_lacks_one() -> None:
    blocks = make_manager(16, 8, chunk=8)
    assert serve(blocks, A, range(8)) == 8
    num_admitted = 0
    for index in range(16):
        tokens = range(8 + 4 * index)
        hashes = PrefixHashes((*range(8), *(100 * index + token for token in tokens)), block_size=BLOCK)
        prefix = blocks.find_prefix(hashes, 8 + len(tokens))
        if not blocks.can_allocate(prefix, 8 + len(tokens), num_spare_blocks=0):
            break
        blocks.allocate(RequestId(str(index)), prefix, 8 + len(tokens))
        num_admitted += 1
    for index in range(num_admitted):
        for start in range(8, 16 + 4 * index, 4):
            blocks.advance(RequestId(str(index)), start, start + 4)
            blocks.check_integrity()
    assert num_admitted > 2


def test_a_request_counts_as_kept_what_others_hold_too() -> None:
    blocks = make_manager(32)
    admit(blocks, A, range(16))
    compute(blocks, A, 0, 16)
    assert blocks.num_kept_tokens(A) == 0
    admit(blocks, B, range(10))
    assert blocks.num_kept_tokens(A) == 8
    assert blocks.num_kept_tokens(B) == 8


def test_the_self_check_finds_a_leak_a_double_owner_and_a_wrong_claim() -> None:
    leaking = make_manager(4)
    leaking._pool._free.pop()
    with pytest.raises(IntegrityError, match="lost"):
        leaking.check_integrity()
    shared = make_manager(4)
    admit_plain(shared, A, 4)
    admit_plain(shared, B, 4)
    shared._holding_by_id[B].tables = shared.block_tables(A)
    with pytest.raises(IntegrityError, match="reference count"):
        shared.check_integrity()
    generous = make_manager(4, 8)
    admit_plain(generous, A, 4)
    generous._num_claimed -= 1
    with pytest.raises(IntegrityError, match="claimed"):
        generous.check_integrity()
