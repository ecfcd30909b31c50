from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.loader import load_model
from stallfree_worker.settings import WorkerSettings
from tests.support.tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → its tiny model's folder, built once per session."""
    root = tmp_path_factory.mktemp("tiny")

    def get(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else build_tiny_model(folder, family)

    return get


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """Family → the tiny model, loaded by this worker once per session."""
    loaded: dict[str, LoadedModel] = {}

    def get(family: str) -> LoadedModel:
        if family not in loaded:
            loaded[family] = load_model(tiny_settings(tiny_folder(family)))
        return loaded[family]

    return get


def tiny_settings(folder: Path, **overrides: object) -> WorkerSettings:
    """Float32 on one CPU thread with a small cache. The cores of this process stay as they are."""
    defaults = {"device": "cpu", "threads": 1, "numa_node": "all", "kv_cache_memory": "8MiB", "token_budget": 64}
    return WorkerSettings.model_validate({"model": str(folder), **defaults, **overrides})
