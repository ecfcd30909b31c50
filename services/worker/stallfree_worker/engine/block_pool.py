"""The blocks themselves: which are free, how many tables refer to each, and which hold what the prefix cache knows.

Owned by the block manager, its only caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from stallfree_worker.engine.integrity import require


class BlockPool:
    """A block is free, or cached and referred to by nobody, or in as many tables as its count says, cached or not.

    Cached blocks that nobody refers to are taken again, the longest unused first, once no free one is left.
    """

    def __init__(self, num_blocks: int, *, num_groups: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._cached = tuple([dict[bytes, int]() for _ in range(num_groups)])
        self._key_by_block: dict[int, tuple[int, bytes]] = {}
        """Of cached blocks, the KV group and the digest: the same tokens have one block in every group."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Cached, referred to by nobody; the longest unused first."""

    @property
    def num_cached_blocks(self) -> int:
        return len(self._key_by_block)

    def references(self, block: int) -> int:
        return self._references[block]

    def cached(self, group: int) -> Mapping[bytes, int]:
        """By the digests of cached prefixes, their blocks in this KV group. It changes as the pool does."""
        return self._cached[group]

    def take(self, count: int) -> tuple[int, ...]:
        """Blocks for new tokens, each referred to once."""
        require(count <= len(self._free) + len(self._unused), f"{count} blocks asked for, and there are not as many")
        blocks = tuple([self._free.pop() if self._free else self._evict() for _ in range(count)])
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more table refers to these cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unused[block]
            self._references[block] += 1

    def release(self, block: int) -> bool:
        """One table less refers to the block; whether it was the last one."""
        self._references[block] -= 1
        if self._references[block] > 0:
            return False
        if block in self._key_by_block:
            self._unused[block] = None
        else:
            self._free.append(block)
        return True

    def register(self, group: int, digest: bytes, block: int) -> None:
        """The block now holds this prefix in full. Where the cache has a block for it already, that one stays."""
        if digest not in self._cached[group]:
            require(block not in self._key_by_block, f"block {block}: two prefixes")
            self._cached[group][digest] = block
            self._key_by_block[block] = (group, digest)

    def forget(self, group: int, digest: bytes) -> None:
        """Takes a prefix out of the cache, if it is there. Tables that refer to its block keep it."""
        block = self._cached[group].pop(digest, None)
        if block is not None:
            del self._key_by_block[block]
            if self._references[block] == 0:
                del self._unused[block]
                self._free.append(block)

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Raises IntegrityError where a block is lost, stands in two places or is counted wrongly. `references` are
        the true counts of the blocks that tables refer to."""
        free = set(self._free)
        require(len(free) == len(self._free), "a block is free twice")
        for block in range(self.num_blocks):
            count = references.get(block, 0)
            require(self._references[block] == count, f"block {block}: reference count is wrong")
            places = (block in free) + (block in self._unused) + (count > 0)
            require(places == 1, f"block {block}: lost, or in two places")
        require(references.keys() | free | self._unused.keys() == set(range(self.num_blocks)), "an unknown block")
        require(self._unused.keys() <= self._key_by_block.keys(), "an unused block without a prefix")
        require(not free & self._key_by_block.keys(), "a free block with a prefix")
        keys = [(block, (group, key)) for group, cached in enumerate(self._cached) for key, block in cached.items()]
        require(dict(keys) == self._key_by_block and len(keys) == len(self._key_by_block), "the cache is contradictory")

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        group, digest = self._key_by_block.pop(block)
        del self._cached[group][digest]
        return block
