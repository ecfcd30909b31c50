"""Texts that a decoder computes chunk by chunk, without an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import BlockTable, BlockTables, Chunk, StepPlan
from stallfree_worker.model.batch_inputs import make_batch_inputs
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.kv_cache import KVCache
from stallfree_worker.model.runner import ModelRunner
from tests.support.tiny_models import VOCAB_SIZE
from tests.worker.model.engine_driver import GREEDY


@dataclass(slots=True)
class Texts:
    """Some texts of random tokens that are computed chunk by chunk, in blocks of their own."""

    runner: ModelRunner
    seed: int = 3
    forgets: bool = False
    """Whether windows give back the blocks behind them."""
    lengths: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def step(self, chunks: dict[str, int], *, rows: Sequence[int] | None = None) -> Tensor:
        """Computes so many more tokens of each text, and gives the logits behind all of them, or of those `rows` (one
        at least) that alone are wanted then."""
        cache = self.runner._cache
        plan = StepPlan(
            step_id=0,
            chunks=tuple([self._chunk(name, count, cache) for name, count in chunks.items()]),
            num_decode_tokens=0,
            num_prefill_tokens=0,
        )
        with torch.inference_mode():
            inputs = make_batch_inputs(plan, block_size=cache.block_size)
            wanted = NumberList.of(range(len(inputs.token_ids)) if rows is None else rows)
            hidden = self.runner._decoder.forward(inputs._replace(wanted_rows=wanted), cache)
            return self.runner._decoder.logits(hidden, wanted).values.clone()

    def _chunk(self, name: str, count: int, cache: KVCache) -> Chunk:
        start = self.lengths.get(name, 0)
        self.lengths[name] = start + count
        if name not in self.blocks:
            of_text = range(len(self.blocks), cache.num_blocks, 7)  # far apart, and in no handy order
            groups = len(cache.layers.groups)
            shuffled = random.Random(self.seed).sample(of_text, len(of_text))
            self.blocks[name] = tuple([tuple(shuffled[group::groups]) for group in range(groups)])
        tokens = random.Random(f"{self.seed} {name}").choices(range(VOCAB_SIZE), k=2000)
        return Chunk(
            request_id=RequestId(name),
            token_ids=tuple(tokens[start : start + count]),
            num_computed_tokens=start,
            block_tables=BlockTables(
                [self._table(blocks, group, start) for group, blocks in enumerate(self.blocks[name])]
            ),
            sampling=GREEDY,
            output_index=0,
        )

    def _table(self, blocks: tuple[int, ...], group: int, start: int) -> BlockTable:
        window = self.runner.kv_groups[group].window_tokens
        first = 0 if window is None or not self.forgets else max(0, start - window + 1) // self.runner.block_size
        return BlockTable(blocks=blocks[first:], num_forgotten=first)


STEPS: Sequence[dict[str, int]] = (
    {"a": 5},
    {"a": 1, "b": 70, "c": 1},
    {"a": 1, "c": 300, "b": 1, "d": 17},
    {"a": 1, "b": 1, "c": 1, "d": 1, "e": 130},
    {"e": 260, "a": 13, "d": 2},
    {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "g": 1},
)
