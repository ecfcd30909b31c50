"""Where a model comes from: the setting `model` → a local folder in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from stallfree_worker.model.demo import DEMO_MODEL, demo_model_path
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.gguf import converted_gguf
from stallfree_worker.settings import ModelSettings

_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["original/*", "consolidated*"]
"""The same weights once more, in their authors' own format."""


def model_folder(settings: ModelSettings) -> Path:
    """Raises `ModelLoadError` for a path that is not there, a hub that cannot be reached, or an unknown id."""
    model = settings.model
    if model == DEMO_MODEL:
        return converted_gguf(demo_model_path(settings.cache_dir), settings.cache_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"--model {model}: a file must be a GGUF file; other models are folders or hub ids")
        return converted_gguf(path, settings.cache_dir)
    if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
        raise ModelLoadError(f"--model {model}: no such file or folder")
    return _from_hub(model, settings.cache_dir.expanduser() / "hub")


def _from_hub(model: str, cache_dir: Path) -> Path:
    try:
        return Path(snapshot_download(model, cache_dir=cache_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except HFValidationError as error:
        raise ModelLoadError(f"--model {model}: neither a file, a folder nor a hub id: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"--model {model}: no such folder here, and it could not be had from the Hugging Face hub: {error}"
        ) from error
