"""Folders and files in the cache that are made once, also when several workers start at the same moment."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Calls `build` with a path beside `target`, and moves what it wrote to `target` in one piece.

    Others that want the same target wait for it. A build that fails leaves nothing behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            workplace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                build(workplace / target.name)
                (workplace / target.name).rename(target)
            finally:
                shutil.rmtree(workplace)
    return target
