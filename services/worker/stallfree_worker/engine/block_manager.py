"""Sole owner of the KV blocks: who holds which, which are free, and which prefixes are cached.

It knows numbers of blocks and never touches the cache itself. The scheduler and the batch it composes are its callers.

Every KV group of the model has a table of its own for each request, and all take their blocks from one pool. The table
of a group with a window slides along: before each chunk, what lies wholly behind the window is given back, and what the
chunk needs is taken. Full blocks are shared between requests that begin alike; partial ones never are, so no block is
ever copied, or written by two.

Memory is claimed before it is used. What a request may come to hold while its prefill lasts is claimed when it is
admitted, so no prefill ever waits for a block. A block of a group without a window is claimed once, however many tables
refer to it; one of a group with a window is claimed by each table, because the tables leave it at different times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.block_pool import BlockPool
from stallfree_worker.engine.integrity import require
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.prefix_cache import CachedPrefix, PrefixPromises, longest_prefix, no_prefix
from stallfree_worker.engine.prefix_hashes import PrefixHashes
from stallfree_worker.engine.step import BlockTable, BlockTables


@dataclass(slots=True, kw_only=True)
class _Holding:
    """What one request holds."""

    tables: BlockTables
    reserved: tuple[int, ...]
    """By group, blocks that are claimed even while the table is shorter; 0 for groups without a window."""
    reserved_for_decode: tuple[int, ...]
    """What `reserved` becomes when the prefill ends."""
    num_tokens: int
    """Tokens that the request was admitted with: its prefill ends there."""
    num_covered_tokens: int
    """Tokens that every group's table has a slot for."""
    hashes: PrefixHashes | None
    num_committed_blocks: int
    """Blocks of each group that the cache was told of, or that came from it."""
    num_promised_blocks: int
    """Those before this one, and not committed yet, are being computed for everybody."""

    @property
    def promised(self) -> Sequence[bytes]:
        if self.hashes is None:
            return ()
        return self.hashes.between(self.num_committed_blocks, self.num_promised_blocks)


class BlockManager:
    """Free blocks, a table per request and KV group, and the prefix cache. Tables are tuples that are replaced when
    they change, so plans can carry them without a copy."""

    def __init__(self, *, num_blocks: int, layout: KVLayout) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        self._pool = BlockPool(num_blocks, num_groups=layout.num_groups)
        self._promises = PrefixPromises()
        self._num_claimed = 0
        self._holding_by_id: dict[RequestId, _Holding] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody has a claim to. Cached ones that nobody uses are among them."""
        return self.num_blocks - self._num_claimed

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content the prefix cache knows, in use or not."""
        return self._pool.num_cached_blocks

    @property
    def owners(self) -> AbstractSet[RequestId]:
        """The requests that hold blocks."""
        return self._holding_by_id.keys()

    def block_tables(self, request_id: RequestId) -> BlockTables:
        """One for each KV group."""
        return self._holding_by_id[request_id].tables

    def num_covered_tokens(self, request_id: RequestId) -> int:
        """Tokens, from the first one on, that every table of the request has a slot for, or had before its window."""
        return self._holding_by_id[request_id].num_covered_tokens

    def num_shared_tokens(self, request_id: RequestId) -> int:
        """Leading tokens of the request in blocks that others may use too: nobody may write there any more."""
        return self._holding_by_id[request_id].num_committed_blocks * self.layout.block_size

    def find_prefix(self, hashes: PrefixHashes | None, num_tokens: int) -> CachedPrefix:
        """What the cache has of a request's `num_tokens` tokens; nothing without hashes. Costs at most one look-up per
        block and group."""
        if hashes is None:
            return no_prefix(self.layout)
        return longest_prefix(self._pool, self.layout, hashes, num_tokens)

    def computing_owner(self, hashes: PrefixHashes | None, prefix: CachedPrefix, num_tokens: int) -> RequestId | None:
        """Who is computing now the very block that would be the next behind `prefix`. Another request that waits for
        it can share it, and with it whatever else both have in common. The promise ends with the request that gave it,
        so nobody waits for ever."""
        next_block = prefix.num_tokens // self.layout.block_size
        if hashes is None or next_block >= num_tokens // self.layout.block_size:
            return None
        return self._promises.owner(hashes[next_block])

    def can_allocate(
        self,
        prefix: CachedPrefix,
        num_tokens: int,
        *,
        num_spare_blocks: int,
        num_reserved_tokens: int = 0,
        without: Sequence[RequestId] = (),
    ) -> bool:
        """Whether a new owner of `num_tokens` tokens, the first of them those of `prefix`, would leave
        `num_spare_blocks` free once the owners `without` are gone. `num_reserved_tokens` are set aside for it at
        least."""
        longest = max(num_tokens, num_reserved_tokens)
        needed = sum(self._reserved_for_prefill(prefix, num_tokens, longest))
        leaving = [self._holding_by_id[request_id] for request_id in without]
        given_up = Counter(
            [block for one in leaving for g in self.layout.full_groups for block in one.tables[g].blocks]
        )
        for group in self.layout.full_groups:
            shared = prefix.tables[group].blocks
            needed += self.layout.blocks_for(longest) - self._num_used(shared, without=given_up)
        num_gained = sum([self._pool.references(block) == count for block, count in given_up.items()])
        num_gained += sum(map(self._num_claimed_in_windows, leaving))
        return self.num_free_blocks + num_gained - needed >= num_spare_blocks

    def allocate(
        self,
        request_id: RequestId,
        prefix: CachedPrefix,
        num_tokens: int,
        *,
        hashes: PrefixHashes | None = None,
        num_reserved_tokens: int = 0,
    ) -> None:
        """Makes the request an owner, whose first `prefix.num_computed_tokens` tokens are computed. Ask `can_allocate`
        first. With `hashes`, the cache is told of the blocks that it fills, and others may wait for them."""
        require(request_id not in self._holding_by_id, f"{request_id} holds blocks already")
        longest = max(num_tokens, num_reserved_tokens)
        num_shared = prefix.num_tokens // self.layout.block_size
        holding = _Holding(
            tables=BlockTables(prefix.tables),
            reserved=self._reserved_for_prefill(prefix, num_tokens, longest),
            reserved_for_decode=self._reserved_for_decode(longest),
            num_tokens=num_tokens,
            num_covered_tokens=prefix.num_tokens,
            hashes=hashes,
            num_committed_blocks=num_shared,
            num_promised_blocks=num_tokens // self.layout.block_size,
        )
        self._holding_by_id[request_id] = holding
        self._num_claimed += sum(holding.reserved)
        for group, table in enumerate(prefix.tables):
            if group in self.layout.full_groups:
                self._num_claimed += len(table.blocks) - self._num_used(table.blocks)
            self._pool.share(table.blocks)
        self._take_ahead(holding, longest, self.layout.full_groups)
        self._promises.give(holding.promised, request_id)

    def advance(self, request_id: RequestId, start: int, end: int) -> None:
        """Before a chunk of positions `start` to `end - 1` of the prefill: slides the windows. Never lacks a block."""
        holding = self._holding_by_id[request_id]
        require(end <= holding.num_tokens, f"{request_id}: a chunk beyond what was claimed")
        require(end - start <= self.layout.largest_chunk_tokens, f"{request_id}: too large a chunk")
        self._forget_behind(holding, start)
        self._take_ahead(holding, end, self.layout.window_groups)

    def append(self, request_id: RequestId, num_tokens: int) -> bool:
        """Lets the tables grow until they hold `num_tokens` tokens, all but the last of which are computed, and slides
        the windows. False where that needs blocks that are not free; then nothing is changed."""
        holding = self._holding_by_id[request_id]
        is_covered = num_tokens <= holding.num_covered_tokens
        if is_covered and holding.reserved is holding.reserved_for_decode:
            return True
        if not is_covered and self._missing_claims(holding, num_tokens) > self.num_free_blocks:
            return False
        self._forget_behind(holding, num_tokens - 1)
        self._reserve(holding, holding.reserved_for_decode)
        self._take_ahead(holding, num_tokens, range(self.layout.num_groups))
        return True

    def commit(self, request_id: RequestId, num_computed_tokens: int) -> None:
        """Notes that the request's first `num_computed_tokens` tokens are computed: others may share the full blocks.
        Call it after each step, before the windows slide on."""
        holding = self._holding_by_id[request_id]
        num_full = num_computed_tokens // self.layout.block_size
        if holding.hashes is None or num_full <= holding.num_committed_blocks:
            return
        for index in range(holding.num_committed_blocks, num_full):
            digest = holding.hashes[index]
            for group, table in enumerate(holding.tables):
                self._pool.register(group, digest, table.blocks[index - table.num_forgotten])
            self._promises.keep(digest)
        holding.num_committed_blocks = num_full

    def num_kept_tokens(self, request_id: RequestId) -> int:
        """Leading tokens whose blocks others hold too, judged by the first KV group: if this request loses its blocks,
        these tokens stay computed for certain."""
        table = self._holding_by_id[request_id].tables[0]
        num_kept = bisect_left(table.blocks, -1, key=lambda block: -self._pool.references(block))
        return (table.num_forgotten + num_kept) * self.layout.block_size if num_kept else 0

    def free(self, request_id: RequestId) -> None:
        """Takes all blocks from the request, and ends its promises. What the cache knows stays there until the room is
        needed, the end of the text first: a longer prefix is worth nothing without the shorter one."""
        holding = self._holding_by_id.pop(request_id)
        self._promises.withdraw(holding.promised, request_id)
        self._reserve(holding, (0,) * len(holding.tables))
        ends = [table.num_forgotten + len(table.blocks) for table in holding.tables]
        for index in range(max(ends) - 1, -1, -1):
            for group, table in enumerate(holding.tables):
                if table.num_forgotten <= index < ends[group]:
                    is_unused = self._pool.release(table.blocks[index - table.num_forgotten])
                    self._num_claimed -= is_unused or group in self.layout.window_groups

    def forget(self, hashes: PrefixHashes) -> None:
        """Takes all that a request read or computed out of the cache, because its numbers went wrong."""
        for digest in hashes.between(0, len(hashes)):
            for group in range(self.layout.num_groups):
                self._pool.forget(group, digest)

    def check_integrity(self) -> None:
        """Raises IntegrityError where a block is lost or counted wrongly, a claim is not what it should be, or tables
        contradict each other."""
        holdings = self._holding_by_id.values()
        self._pool.check_integrity(Counter(block for one in holdings for table in one.tables for block in table.blocks))
        claims = sum(map(self._num_claimed_in_windows, holdings))
        claims += len({block for one in holdings for g in self.layout.full_groups for block in one.tables[g].blocks})
        require(self._num_claimed == claims, f"{self._num_claimed} blocks are claimed, it should be {claims}")
        require(claims <= self.num_blocks, "more blocks are claimed than there are")
        for request_id, holding in self._holding_by_id.items():
            self._check_tables(request_id, holding)
        self._promises.check_integrity({digest for one in holdings for digest in one.promised})

    def _check_tables(self, request_id: RequestId, holding: _Holding) -> None:
        starts_by_window: dict[int | None, set[int]] = {None: {0}}
        for window, table in zip(self.layout.windows, holding.tables, strict=True):
            require(len(set(table.blocks)) == len(table.blocks), f"{request_id}: a block stands twice in its table")
            starts_by_window.setdefault(window, set()).add(table.num_forgotten)
        require(all(len(starts) == 1 for starts in starts_by_window.values()), f"{request_id}: tables begin unequally")
        num_covered = self.layout.block_size * min(
            [table.num_forgotten + len(table.blocks) for table in holding.tables]
        )
        require(holding.num_covered_tokens == num_covered, f"{request_id}: its slots are miscounted")

    def _num_used(self, blocks: Iterable[int], *, without: Mapping[int, int] = MappingProxyType({})) -> int:
        """How many of the blocks tables refer to, other than as often as `without` says: they are claimed already."""
        return sum([self._pool.references(block) > without.get(block, 0) for block in blocks])

    def _num_claimed_in_windows(self, holding: _Holding) -> int:
        groups = self.layout.window_groups
        return sum([max(len(holding.tables[group].blocks), holding.reserved[group]) for group in groups])

    def _reserved_for_prefill(self, prefix: CachedPrefix, num_tokens: int, longest: int) -> tuple[int, ...]:
        """By group with a window, what the request holds at most at any time of its prefill, or in a decode after."""
        reserved = list(self._reserved_for_decode(longest))
        for group in self.layout.window_groups:
            ahead = self.layout.blocks_for(num_tokens) - prefix.tables[group].num_forgotten
            reserved[group] = max(reserved[group], min(ahead, self.layout.most_blocks(group, num_tokens)))
        return tuple(reserved)

    def _reserved_for_decode(self, longest: int) -> tuple[int, ...]:
        reserved = [0] * self.layout.num_groups
        for group in self.layout.window_groups:
            reserved[group] = self.layout.most_decode_blocks(group, longest)
        return tuple(reserved)

    def _reserve(self, holding: _Holding, reserved: tuple[int, ...]) -> None:
        for group in self.layout.window_groups:
            held = len(holding.tables[group].blocks)
            self._num_claimed += max(held, reserved[group]) - max(held, holding.reserved[group])
        holding.reserved = reserved

    def _missing_claims(self, holding: _Holding, num_tokens: int) -> int:
        """How many more blocks are claimed once the tables hold the last of `num_tokens` tokens."""
        end = self.layout.blocks_for(num_tokens)
        missing = sum([max(0, end - len(holding.tables[group].blocks)) for group in self.layout.full_groups])
        for group in self.layout.window_groups:
            needed = end - self.layout.first_needed_block(group, num_tokens - 1)
            missing += max(needed, holding.reserved_for_decode[group])
            missing -= max(len(holding.tables[group].blocks), holding.reserved[group])
        return missing

    def _forget_behind(self, holding: _Holding, position: int) -> None:
        """Lets windows give back the blocks that no token from `position` on looks back at."""
        shorter: dict[int, BlockTable] = {}
        for group in self.layout.window_groups:
            table = holding.tables[group]
            num_behind = self.layout.first_needed_block(group, position) - table.num_forgotten
            if num_behind > 0:
                for block in table.blocks[:num_behind]:
                    self._pool.release(block)
                forgotten = table.num_forgotten + num_behind
                shorter[group] = BlockTable(blocks=table.blocks[num_behind:], num_forgotten=forgotten)
        self._replace(holding, shorter)

    def _take_ahead(self, holding: _Holding, num_tokens: int, groups: Iterable[int]) -> None:
        """Lets the tables of `groups` reach as far as `num_tokens` tokens do."""
        end = self.layout.blocks_for(num_tokens)
        longer: dict[int, BlockTable] = {}
        for group in groups:
            table = holding.tables[group]
            num_missing = end - table.num_forgotten - len(table.blocks)
            if num_missing > 0:
                blocks = table.blocks + self._pool.take(num_missing)
                longer[group] = BlockTable(blocks=blocks, num_forgotten=table.num_forgotten)
        self._replace(holding, longer)
        holding.num_covered_tokens = holding.tables.num_reached_blocks * self.layout.block_size

    def _replace(self, holding: _Holding, changed: Mapping[int, BlockTable]) -> None:
        """Puts other tables in the place of some groups'. Only what is beyond the reserve is claimed anew."""
        if not changed:
            return
        for group, table in changed.items():
            before, reserved = len(holding.tables[group].blocks), holding.reserved[group]
            self._num_claimed += max(len(table.blocks), reserved) - max(before, reserved)
        require(self._num_claimed <= self.num_blocks, "more blocks are taken than were claimed")
        holding.tables = BlockTables([changed.get(group, table) for group, table in enumerate(holding.tables)])
