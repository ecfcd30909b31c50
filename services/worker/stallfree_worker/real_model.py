"""The `ModelLoader` of production. A module of its own because the front names it and only the engine's process, which
calls it, may import torch."""

from __future__ import annotations

from stallfree_worker.loaded_model import LoadedModel, OnTokenizer
from stallfree_worker.settings import WorkerSettings


def load_real_model(settings: WorkerSettings, on_tokenizer: OnTokenizer) -> LoadedModel:
    from stallfree_worker.model.loader import load_model

    return load_model(settings, on_tokenizer)
