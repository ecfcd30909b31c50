"""A container's CPU limit is kept to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stallfree_worker.model.cores import usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", ALL), ("10000 100000", 1), ("100000 100000", 1), (f"{ALL}99000 100000", ALL), ("nonsense", ALL)],
)
def test_a_quota_is_rounded_down_to_whole_cores(tmp_path: Path, quota: str, cores: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(f"{quota}\n")
    assert usable_cores(path) == cores


def test_without_a_quota_all_cores_are_used(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "missing") == ALL
