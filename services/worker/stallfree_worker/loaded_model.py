"""What loading a model gives: a runner for the engine, and what routers must know of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stallfree_shared.wire import ModelCard
from stallfree_worker.engine.step import Runner
from stallfree_worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    runner: Runner
    card: ModelCard
    """As the model itself has it; the engine process lowers `max_model_len` to what the KV cache can hold."""
    tokenizer_path: Path
    """The tokenizer.json that `card.tokenizer_sha256` is the hash of."""
    kv_cache_bytes: int = 0
    """What the blocks of `runner` take together, in bytes."""
    leaves_host_free: bool = False
    """Whether a core of the host has nothing to do while `runner` computes."""


ModelLoader = Callable[[WorkerSettings], LoadedModel]
"""Runs in the engine's process. A module-level function, so that the process can be spawned with it."""
