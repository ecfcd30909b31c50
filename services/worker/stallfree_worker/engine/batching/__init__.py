"""Batching rules: who computes in a step. One file per rule, all behind `rule.BatchingRule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stallfree_worker.engine.batching.chunked_only import ChunkedOnlyRule
from stallfree_worker.engine.batching.faster_transformer import FasterTransformerRule
from stallfree_worker.engine.batching.orca import OrcaRule
from stallfree_worker.engine.batching.rule import BatchingRule
from stallfree_worker.engine.batching.sarathi import SarathiRule
from stallfree_worker.engine.batching.vllm import VllmRule
from stallfree_worker.settings import BatchingName

RULES: Mapping[BatchingName, Callable[[], BatchingRule]] = {
    "sarathi": SarathiRule,
    "orca": OrcaRule,
    "vllm": VllmRule,
    "faster_transformer": FasterTransformerRule,
    "chunked_only": ChunkedOnlyRule,
}
