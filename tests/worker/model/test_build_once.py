"""What two workers that start at once find in the cache."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stallfree_worker.model.build_once import build_once


def test_two_that_want_the_same_folder_build_it_once(tmp_path: Path) -> None:
    target, builds, both_ask = tmp_path / "cache" / "model", [], threading.Barrier(2)

    def build(path: Path) -> None:
        builds.append(path)
        path.mkdir()
        (path / "weights").write_text("all of them")

    def ask() -> str:
        both_ask.wait(timeout=10)
        return (build_once(target, build) / "weights").read_text()

    with ThreadPoolExecutor(2) as pool:
        answers = [future.result() for future in [pool.submit(ask), pool.submit(ask)]]
    assert answers == ["all of them"] * 2
    assert len(builds) == 1
    assert builds[0] != target


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(path: Path) -> None:
        path.write_text("half of it")
        raise RuntimeError("power is out")

    with pytest.raises(RuntimeError, match="power is out"):
        build_once(target, fail)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    assert build_once(target, Path.touch) == target
