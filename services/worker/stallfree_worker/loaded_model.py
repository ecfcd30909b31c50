"""What loading a model gives: first its tokenizer, then a runner for the engine, and what routers must know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stallfree_shared.wire import ModelCard
from stallfree_worker.engine.step import Runner
from stallfree_worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer.json and its hash."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    runner: Runner
    card: ModelCard
    """As the model itself has it; the engine process lowers `max_model_len` to what the KV cache can hold."""
    kv_cache_bytes: int = 0
    """What the blocks of `runner` take together, in bytes."""
    leaves_host_free: bool = False
    """Whether a core of the host has nothing to do while `runner` computes."""


OnTokenizer = Callable[[TokenizerFile], None]

ModelLoader = Callable[[WorkerSettings, OnTokenizer], LoadedModel]
"""Runs in the engine's process, and tells of the tokenizer as soon as it is there: routers can load it while the rest
takes its time. A module-level function, so that the process can be spawned with it."""
