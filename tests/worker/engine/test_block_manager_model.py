"""The block manager at random, against a slow and obvious model of what every block holds.

The model writes down, slot by slot, which beginning of which text a block holds, keeps the cache as a dictionary of
texts and the unused blocks as a list, and tries all lengths of a prefix. Requests live as the scheduler lets them:
admitted, computed in chunks, decoding, ended in any state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.block_manager import BlockManager
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.prefix_hashes import PrefixHashes
from stallfree_worker.engine.step import BlockTable, KVGroup

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (5,), (None, 3), (None, 4, 4), (None, None, 2, 6))
COMMON_TOKENS = (0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0)
Text = tuple[object, ...]
"""A salt and the tokens behind it."""


@dataclass(slots=True, kw_only=True)
class Life:
    salt: str
    tokens: list[int]
    num_prefill: int
    hashes: PrefixHashes | None
    num_computed: int
    num_shared: int

    def text(self, num_tokens: int) -> Text:
        return (self.salt, *self.tokens[:num_tokens])


@dataclass(slots=True, kw_only=True)
class Model:
    """Who holds what, which text is cached where, and in which order unused blocks go."""

    num_blocks: int
    cached: dict[tuple[int, Text], int] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)
    holders: dict[int, int] = field(default_factory=dict)
    """Tables that refer to a block."""

    def num_free(self) -> int:
        return self.num_blocks - len(self.holders) - len(self.unused)

    def take(self, blocks: list[int]) -> None:
        """The manager took these. Free ones come first, then the longest unused."""
        assert not set(blocks) & self.holders.keys(), "a block that somebody holds was given away"
        num_evicted = max(0, len(blocks) - self.num_free())
        evicted = self.unused[:num_evicted]
        assert set(blocks) & set(self.unused) == set(evicted), "not the longest unused block was evicted"
        del self.unused[:num_evicted]
        self.cached = {key: block for key, block in self.cached.items() if block not in evicted}
        self.holders |= dict.fromkeys(blocks, 1)

    def share(self, block: int) -> None:
        if block in self.unused:
            self.unused.remove(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    def release(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            del self.holders[block]
            if block in self.cached.values():
                self.unused.append(block)

    def forget(self, texts: set[Text]) -> None:
        gone = {block for (_, text), block in self.cached.items() if text in texts}
        self.cached = {key: block for key, block in self.cached.items() if block not in gone}
        self.unused = [block for block in self.unused if block not in gone]


class BlockManagerMachine(RuleBasedStateMachine):
    num_hits = 0
    num_evictions = 0
    num_waits = 0

    @initialize(
        windows=st.sampled_from(WINDOWS),
        num_blocks=st.integers(6, 40),
        block_size=st.integers(1, 4),
        chunk=st.integers(1, 8),
    )
    def start(self, windows: tuple[int | None, ...], num_blocks: int, block_size: int, chunk: int) -> None:
        self.windows, self.size = windows, block_size
        groups = [KVGroup(window_tokens=window) for window in windows]
        self.layout = KVLayout(groups, block_size=block_size, largest_chunk_tokens=chunk)
        self.blocks = BlockManager(num_blocks=num_blocks, layout=self.layout)
        self.model = Model(num_blocks=num_blocks)
        self.content: dict[tuple[int, int], tuple[int, Text]] = {}
        """Slot → KV group and text up to the token whose keys and values it holds."""
        self.lives: dict[RequestId, Life] = {}
        self.promises: dict[Text, RequestId] = {}
        """Texts that a running request has yet to compute, and which one."""
        self.num_admitted = 0

    @rule(
        num_common=st.integers(0, 16),
        own=st.lists(st.integers(0, 1), max_size=6),
        salt=st.sampled_from(["", "", "x"]),
        is_cached=st.sampled_from([True, True, True, False]),
    )
    def admit(self, num_common: int, own: list[int], salt: str, *, is_cached: bool) -> None:
        tokens = [*COMMON_TOKENS[:num_common], *own] or [0]
        request_id = RequestId(str(self.num_admitted))
        hashes = PrefixHashes(tuple(tokens), block_size=self.size, salt=salt) if is_cached else None
        prefix = self.blocks.find_prefix(hashes, len(tokens))
        num_cached = self._longest_prefix(tokens, salt) if is_cached else 0
        assert prefix.num_tokens == num_cached * self.size
        assert prefix.num_computed_tokens == min(prefix.num_tokens, len(tokens) - 1)
        owner = self.blocks.computing_owner(hashes, prefix, len(tokens))
        next_text = (salt, *tokens[: prefix.num_tokens + self.size])
        fills_a_block = is_cached and prefix.num_tokens + self.size <= len(tokens)
        assert owner == (self.promises.get(next_text) if fills_a_block else None)
        if owner is not None:
            type(self).num_waits += 1
            return
        can_allocate = self.blocks.can_allocate(prefix, len(tokens), num_spare_blocks=0)
        if not self.lives:
            fits = self.layout.blocks_of_request(len(tokens)) <= self.model.num_blocks
            assert can_allocate or not fits, "a lone request that fits is refused"
        if not can_allocate:
            return
        before = self._no_tables() if not num_cached else prefix.tables
        self._share(prefix.tables, (salt, *tokens))
        self.blocks.allocate(request_id, prefix, len(tokens), hashes=hashes)
        self._note_change(request_id, before)
        self.num_admitted += 1
        type(self).num_hits += num_cached > 0
        self.lives[request_id] = Life(
            salt=salt,
            tokens=tokens,
            num_prefill=len(tokens),
            hashes=hashes,
            num_computed=prefix.num_computed_tokens,
            num_shared=prefix.num_tokens,
        )
        if is_cached:
            for end in range(prefix.num_tokens + self.size, len(tokens) + 1, self.size):
                self.promises.setdefault((salt, *tokens[:end]), request_id)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), count=st.integers(1, 4))
    def compute(self, data: st.DataObject, num_tokens: int, count: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lives)))
        for _ in range(count):
            if request_id in self.lives:
                self._compute_next(request_id, num_tokens)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, *, fails: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lives)))
        hashes = self.lives[request_id].hashes
        if fails and hashes is not None:
            life = self.lives[request_id]
            self.blocks.forget(hashes)
            self.model.forget({life.text(end) for end in range(self.size, len(life.tokens) + 1, self.size)})
        self._free(request_id)

    @invariant()
    def state_is_whole(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.num_cached_blocks == len(self.model.cached)
        assert self.blocks.owners == self.lives.keys()
        assert self.blocks.num_free_blocks <= self.model.num_blocks - len(self.model.holders)
        if not self.lives:
            assert self.blocks.num_free_blocks == self.model.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "lives"):
            for request_id in list(self.lives):
                self._free(request_id)
            self.state_is_whole()

    def _compute_next(self, request_id: RequestId, num_tokens: int) -> None:
        life, before = self.lives[request_id], self.blocks.block_tables(request_id)
        start = life.num_computed
        if start < life.num_prefill:
            end = min(start + min(num_tokens, self.layout.largest_chunk_tokens), life.num_prefill)
            self.blocks.advance(request_id, start, end)
        else:
            life.tokens.append(num_tokens % 2)
            if life.hashes is not None:
                life.hashes.append(num_tokens % 2)
            end = start + 1
            if not self.blocks.append(request_id, end):
                self._free(request_id)
                return
        self._note_change(request_id, before)
        self._write(request_id, start, end)
        self._read(request_id, start, end)
        life.num_computed = end
        self._commit(request_id)

    def _write(self, request_id: RequestId, start: int, end: int) -> None:
        life = self.lives[request_id]
        for group, table in enumerate(self.blocks.block_tables(request_id)):
            for position in range(max(start, life.num_shared), end):
                block, offset = self._slot(table, position)
                assert self.model.holders[block] == 1, "a shared block is written"
                self.content[block, offset] = (group, life.text(position + 1))

    def _read(self, request_id: RequestId, start: int, end: int) -> None:
        life = self.lives[request_id]
        for group, table in enumerate(self.blocks.block_tables(request_id)):
            window = self.windows[group]
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                assert self.content[self._slot(table, position)] == (group, life.text(position + 1))

    def _commit(self, request_id: RequestId) -> None:
        life = self.lives[request_id]
        self.blocks.commit(request_id, life.num_computed)
        if life.hashes is None:
            return
        for index in range(life.num_shared // self.size, life.num_computed // self.size):
            self.promises.pop(life.text((index + 1) * self.size), None)
            for group, table in enumerate(self.blocks.block_tables(request_id)):
                if index >= table.num_forgotten:
                    key = (group, life.text((index + 1) * self.size))
                    self.model.cached.setdefault(key, table.blocks[index - table.num_forgotten])
        life.num_shared = life.num_computed // self.size * self.size
        assert self.blocks.num_shared_tokens(request_id) == life.num_shared

    def _free(self, request_id: RequestId) -> None:
        tables = self.blocks.block_tables(request_id)
        self.blocks.free(request_id)
        del self.lives[request_id]
        self.promises = {text: owner for text, owner in self.promises.items() if owner != request_id}
        ends = [table.num_forgotten + len(table.blocks) for table in tables]
        for index in reversed(range(max(ends))):
            for table, end in zip(tables, ends, strict=True):
                if table.num_forgotten <= index < end:
                    self.model.release(table.blocks[index - table.num_forgotten])

    def _share(self, tables: tuple[BlockTable, ...], text: Text) -> None:
        for group, table in enumerate(tables):
            for index, block in enumerate(table.blocks, table.num_forgotten):
                assert self.model.cached[group, text[: 1 + (index + 1) * self.size]] == block
                self.model.share(block)

    def _note_change(self, request_id: RequestId, before: tuple[BlockTable, ...]) -> None:
        """Tells the model of the blocks that came into a request's tables and left them."""
        after = self.blocks.block_tables(request_id)
        for old, new in zip(before, after, strict=True):
            for block in old.blocks[: new.num_forgotten - old.num_forgotten]:
                self.model.release(block)
        taken = [
            block
            for old, new in zip(before, after, strict=True)
            for block in new.blocks[len(old.blocks) + old.num_forgotten - new.num_forgotten :]
        ]
        type(self).num_evictions += max(0, len(taken) - self.model.num_free())
        self.model.take(taken)

    def _longest_prefix(self, tokens: list[int], salt: str) -> int:
        """By trying all lengths, the longest first."""
        for num_blocks in range(len(tokens) // self.size, 0, -1):
            start = min(num_blocks * self.size, len(tokens) - 1)
            firsts = [0 if window is None else max(0, start - window + 1) // self.size for window in self.windows]
            if all(
                (group, (salt, *tokens[: (index + 1) * self.size])) in self.model.cached
                for group, first in enumerate(firsts)
                for index in range(first, num_blocks)
            ):
                return num_blocks
        return 0

    def _slot(self, table: BlockTable, position: int) -> tuple[int, int]:
        return table.blocks[position // self.size - table.num_forgotten], position % self.size

    def _no_tables(self) -> tuple[BlockTable, ...]:
        return (BlockTable(blocks=()),) * len(self.windows)


def test_b37_the_block_manager_agrees_with_a_slow_model_of_every_block() -> None:
    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert BlockManagerMachine.num_hits > 100
    assert BlockManagerMachine.num_evictions > 100
    assert BlockManagerMachine.num_waits > 100
