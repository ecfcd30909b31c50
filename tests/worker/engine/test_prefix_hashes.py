from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stallfree_worker.engine.prefix_hashes import PrefixHashes

TOKENS = st.lists(st.integers(0, 2), max_size=12)
SALTS = st.sampled_from(["", "a", "b"])


@given(one=TOKENS, other=TOKENS, salts=st.tuples(SALTS, SALTS), block_size=st.integers(1, 4))
def test_b22_two_chains_agree_exactly_as_far_as_salt_and_full_blocks_do(
    one: list[int], other: list[int], salts: tuple[str, str], block_size: int
) -> None:
    chains = [
        PrefixHashes(tuple(tokens), block_size=block_size, salt=salt)
        for tokens, salt in zip((one, other), salts, strict=True)
    ]
    assert [len(chain) for chain in chains] == [len(one) // block_size, len(other) // block_size]
    for index in range(min(map(len, chains))):
        end = (index + 1) * block_size
        is_same = salts[0] == salts[1] and one[:end] == other[:end]
        assert (chains[0][index] == chains[1][index]) == is_same


@given(tokens=TOKENS, num_first=st.integers(0, 12), block_size=st.integers(1, 4))
def test_a_chain_that_grew_token_by_token_is_the_one_made_at_once(
    tokens: list[int], num_first: int, block_size: int
) -> None:
    whole = PrefixHashes(tuple(tokens), block_size=block_size)
    grown = PrefixHashes(tuple(tokens[:num_first]), block_size=block_size)
    for token in tokens[num_first:]:
        grown.append(token)
    assert list(grown.between(0, len(grown))) == list(whole.between(0, len(whole)))


def test_b22_a_salt_cannot_pass_for_a_block() -> None:
    plain = PrefixHashes((1, 2, 3, 4), block_size=2)
    root_and_block = plain.between(-1, 0)[0] + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    disguised = PrefixHashes((3, 4), block_size=2, salt=root_and_block.decode("latin-1"))
    assert disguised[0] != plain[1]
