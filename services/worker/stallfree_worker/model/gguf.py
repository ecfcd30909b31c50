"""GGUF files: turned once into a folder in Hugging Face format, with weights in bfloat16, and kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from stallfree_worker.model.build_once import build_once
from stallfree_worker.model.errors import ModelLoadError

_FORMAT_VERSION = 1
"""Part of the key: raise it when a conversion gives another result."""

_logger = logging.getLogger(__name__)


def converted_gguf(path: Path, cache_dir: Path) -> Path:
    """The folder that `path` was converted to, now or by an earlier start.

    Raises `ModelLoadError` where the extra `[gguf]` is missing or the file cannot be converted.
    """
    for package in ("gguf", "transformers"):
        if find_spec(package) is None:
            raise ModelLoadError(f"{path}: a GGUF file needs the extra [gguf]: pip install 'stallfree-worker[gguf]'")
    stat = path.stat()
    facts = f"{_FORMAT_VERSION} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return build_once(cache_dir.expanduser() / "gguf" / f"{path.stem}-{key}", lambda folder: _convert(path, folder))


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    started_at = time.perf_counter()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # untyped there
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]  # type: ignore[no-untyped-call]  # untyped there
    except (OSError, ValueError, KeyError, NotImplementedError, struct.error) as error:
        raise ModelLoadError(f"{path} cannot be converted: {error}") from error
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys) - set(model.all_tied_weights_keys)
    if missing:
        raise ModelLoadError(f"{path} lacks weights: {', '.join(sorted(missing))}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _logger.info(
        "GGUF file converted",
        extra={"path": str(path), "folder": folder.name, "seconds": time.perf_counter() - started_at},
    )
