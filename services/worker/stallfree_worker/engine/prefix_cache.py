"""What the cached blocks are worth to a request: the longest prefix it can share, and whose work it should wait for.

Used by the block manager only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.block_pool import BlockPool
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.prefix_hashes import PrefixHashes
from stallfree_worker.engine.step import BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """What the cache has of a request's tokens, at one instant: valid until any request gets or loses a block."""

    num_tokens: int
    """Tokens in shared blocks. They are not written again."""
    num_computed_tokens: int
    """Tokens that need not be computed: those, or all but the last one where the cache has everything."""
    tables: tuple[BlockTable, ...]
    """By KV group, the shared blocks."""


def longest_prefix(pool: BlockPool, layout: KVLayout, hashes: PrefixHashes, num_tokens: int) -> CachedPrefix:
    """The longest prefix of a request's `num_tokens` tokens of which every KV group has what it needs: a group without
    a window all blocks, one with a window those that the first token to compute looks back at."""
    num_blocks = _num_usable_blocks(pool, layout, hashes, num_tokens)
    num_computed = _num_computed(layout, num_blocks, num_tokens)
    tables = []
    for group in range(layout.num_groups):
        first = layout.first_needed_block(group, num_computed)
        block_of = pool.cached(group).__getitem__
        blocks = tuple(map(block_of, hashes.between(first, num_blocks)))
        tables.append(BlockTable(blocks=blocks, num_forgotten=first))
    return CachedPrefix(
        num_tokens=num_blocks * layout.block_size, num_computed_tokens=num_computed, tables=tuple(tables)
    )


def no_prefix(layout: KVLayout) -> CachedPrefix:
    return CachedPrefix(num_tokens=0, num_computed_tokens=0, tables=(BlockTable(blocks=()),) * layout.num_groups)


def _num_computed(layout: KVLayout, num_blocks: int, num_tokens: int) -> int:
    return min(num_blocks * layout.block_size, num_tokens - 1)


def _num_usable_blocks(pool: BlockPool, layout: KVLayout, hashes: PrefixHashes, num_tokens: int) -> int:
    """Groups without a window bound the prefix, from the front. From there the search goes back to where every window
    is whole. Looks at no block of a group twice."""
    limit = num_tokens // layout.block_size
    for group in layout.full_groups:
        cached = pool.cached(group)
        limit = next((at for at, digest in enumerate(hashes.between(0, limit)) if digest not in cached), limit)
    index = limit - 1
    while limit > 0:
        start = _num_computed(layout, limit, num_tokens)
        firsts = {group: layout.first_needed_block(group, start) for group in layout.window_groups}
        lowest = min(firsts.values(), default=limit)
        while index >= lowest and all(hashes[index] in pool.cached(g) for g in firsts if index >= firsts[g]):
            index -= 1
        if index < lowest:
            return limit
        limit, index = index, index - 1  # a shorter prefix needs no later block, so it must end before the missing one
    return 0


class PrefixPromises:
    """Which prefixes running requests are computing now. A promise ends when it is kept, or with the request."""

    def __init__(self) -> None:
        self._owner_by_digest: dict[bytes, RequestId] = {}

    def owner(self, digest: bytes) -> RequestId | None:
        """Who is computing this prefix."""
        return self._owner_by_digest.get(digest)

    def give(self, digests: Iterable[bytes], request_id: RequestId) -> None:
        """The request will compute these, except where another one is at it already."""
        for digest in digests:
            self._owner_by_digest.setdefault(digest, request_id)

    def keep(self, digest: bytes) -> None:
        """Somebody has computed this."""
        self._owner_by_digest.pop(digest, None)

    def withdraw(self, digests: Iterable[bytes], request_id: RequestId) -> None:
        """The request is no longer running."""
        for digest in digests:
            if self._owner_by_digest.get(digest) == request_id:
                del self._owner_by_digest[digest]

    def check_integrity(self, promised: AbstractSet[bytes]) -> None:
        """Raises IntegrityError where a promise is open that is not among those that running requests will keep."""
        require(self._owner_by_digest.keys() <= promised, "a promise that nobody keeps")
