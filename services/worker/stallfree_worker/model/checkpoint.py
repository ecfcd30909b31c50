"""The tensors of a folder in Hugging Face format: one safetensors file, or many with an index."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import torch
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stallfree_worker.model.config_reader import JsonObject
from stallfree_worker.model.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> JsonObject:
    """Raises `ModelLoadError` where the file is missing, is no JSON or holds no object. The standard library
    would take a second for the 30 MB of a large tokenizer."""
    try:
        value: object = from_json(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


class _OpenFile(Protocol):
    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """Open files and which tensor is in which. Tensors are read when asked for, from memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_by_name: dict[str, _OpenFile] = {}

    def __enter__(self) -> Self:
        for path in _weight_files(self._folder):
            try:
                file = cast("_OpenFile", self._stack.enter_context(safe_open(path, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
            self._file_by_name.update(dict.fromkeys(file.keys(), file))
        if not self._file_by_name:
            raise ModelLoadError(f"{self._folder}: its weight files hold no tensor")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_by_name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor, in the order of names."""
        return self.tensor(min(self._file_by_name)).dtype

    def tensor(self, name: str) -> Tensor:
        return self._file_by_name[name].get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelLoadError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ModelLoadError(f"{index_path} has no weight_map")
    paths = sorted({folder / str(file) for file in weight_map.values()})
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ModelLoadError(f"{index_path} names files that are missing: {', '.join(missing)}")
    return paths
