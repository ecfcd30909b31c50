"""Compiled kernels of another version are refused: what they compute from today's memory would be nonsense."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stallfree_worker.model.cpu import library
from tests.worker.model.kernels import needs_kernels

_OTHER_VERSIONS = {
    "without a number": "int stallfree_struct_bytes(int number) { return number; }",
    "with another number": "int stallfree_interface(void) { return 1; }",
    "with structures of another size": (
        f"int stallfree_interface(void) {{ return {library._INTERFACE}; }} "
        "int stallfree_struct_bytes(int number) { return 8 + number; }"
    ),
}


@pytest.fixture
def _loaded_anew() -> Iterator[None]:
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@needs_kernels
@pytest.mark.usefixtures("_loaded_anew")
@pytest.mark.parametrize("source", _OTHER_VERSIONS.values(), ids=_OTHER_VERSIONS.keys())
def test_kernels_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
    if not compiler:
        pytest.skip("there is no C compiler: the kernels came with the package")
    (tmp_path / "old.c").write_text(source)
    output = tmp_path / "old.so"
    subprocess.run([*compiler, "-x", "c", "-shared", "-fPIC", str(tmp_path / "old.c"), "-o", str(output)], check=True)
    monkeypatch.setattr(library, "LIBRARY_PATH", output)
    assert library.reason_against(torch.float32) == "they are of another version; install stallfree-worker again"
