"""Sole owner of the KV blocks: who holds which, and which are free.

It knows numbers of blocks and never touches the cache itself. The scheduler and the batch it composes are its callers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.integrity import require


class BlockManager:
    """A free list, a reference count per block, and a block table per request.

    A table is a tuple that is replaced when it grows, so plans can carry it without a copy.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._table_by_id: dict[RequestId, tuple[int, ...]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def owners(self) -> AbstractSet[RequestId]:
        """The requests that hold blocks."""
        return self._table_by_id.keys()

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        return self._table_by_id[request_id]

    def can_allocate(self, num_tokens: int, *, num_spare_blocks: int) -> bool:
        """Whether a new owner of `num_tokens` tokens would leave `num_spare_blocks` free."""
        return len(self._free) - self._blocks_for(num_tokens) >= num_spare_blocks

    def allocate(self, request_id: RequestId, num_tokens: int) -> None:
        """Makes the request an owner, with blocks for `num_tokens` tokens. Ask `can_allocate` first."""
        require(request_id not in self._table_by_id, f"{request_id} holds blocks already")
        self._table_by_id[request_id] = self._take(self._blocks_for(num_tokens))

    def can_append(self, request_id: RequestId, num_tokens: int) -> bool:
        """Whether the table can hold `num_tokens` tokens; always true where it needs no new block for that."""
        return self._missing_blocks(request_id, num_tokens) <= len(self._free)

    def append(self, request_id: RequestId, num_tokens: int) -> None:
        """Lets the table grow until it holds `num_tokens` tokens. Ask `can_append` first."""
        missing = self._missing_blocks(request_id, num_tokens)
        if missing > 0:
            self._table_by_id[request_id] += self._take(missing)

    def free(self, request_id: RequestId) -> None:
        """Takes all blocks from the request. Those that nobody else refers to are free at once."""
        for block in reversed(self._table_by_id.pop(request_id)):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raises IntegrityError where a block is lost, is free and owned, or is counted wrongly."""
        held = Counter(block for table in self._table_by_id.values() for block in table)
        free = Counter(self._free)
        for block in range(self.num_blocks):
            require(self._references[block] == held[block], f"block {block}: reference count is wrong")
            require(free[block] == (1 if held[block] == 0 else 0), f"block {block}: lost, or free and owned")
        require(held.keys() | free.keys() == set(range(self.num_blocks)), "a block that does not exist")
        for request_id, table in self._table_by_id.items():
            require(len(set(table)) == len(table), f"{request_id}: a block stands twice in its table")

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing_blocks(self, request_id: RequestId, num_tokens: int) -> int:
        return self._blocks_for(num_tokens) - len(self._table_by_id[request_id])

    def _take(self, count: int) -> tuple[int, ...]:
        require(count <= len(self._free), f"{count} blocks asked for, {len(self._free)} are free")
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self._references[block] += 1
        return blocks
