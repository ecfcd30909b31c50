"""A container's CPU limit is kept to, and a NUMA node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from stallfree_worker.model.cores import keep_to_numa_node, usable_cores
from stallfree_worker.model.errors import ModelLoadError

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


CORES = sorted(os.sched_getaffinity(0))
FIRST, *REST = CORES


@pytest.fixture
def affinity() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, CORES)


def nodes(folder: Path, cpulists: Mapping[int, str]) -> Path:
    """A folder like the kernel's, with such lists of cores."""
    for number, cpulist in cpulists.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cpulist}\n")
    return folder


def listed(cores: list[int]) -> str:
    return ",".join(map(str, cores))


@pytest.mark.usefixtures("affinity")
@pytest.mark.skipif(not REST, reason="there is one core only")
def test_a_node_that_is_named_is_kept_to(tmp_path: Path) -> None:
    path = nodes(tmp_path, {0: listed(REST), 2: f"{FIRST},9000-9003"})
    keep_to_numa_node(2, path)
    assert os.sched_getaffinity(0) == {FIRST}
    assert usable_cores(tmp_path / "no quota") == 1


@pytest.mark.usefixtures("affinity")
@pytest.mark.skipif(not REST, reason="there is one core only")
def test_auto_takes_the_node_with_most_usable_cores_and_all_takes_all(tmp_path: Path) -> None:
    """With two cores the nodes are equals, and the first of them is taken."""
    path = nodes(tmp_path, {9: f"{FIRST},9000-9999", 4: listed(REST), 1: "", 11: "8000"})
    keep_to_numa_node("all", path)
    assert os.sched_getaffinity(0) == set(CORES)
    keep_to_numa_node("auto", path)
    assert os.sched_getaffinity(0) == set(REST)


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize("cpulists", [{}, {0: listed(CORES)}, {0: listed(CORES), 1: "9000-9003"}, {3: ""}])
def test_where_there_is_one_node_auto_leaves_all_as_it_is(tmp_path: Path, cpulists: Mapping[int, str]) -> None:
    keep_to_numa_node("auto", nodes(tmp_path, cpulists))
    assert os.sched_getaffinity(0) == set(CORES)


def test_a_node_without_usable_cores_is_refused(tmp_path: Path) -> None:
    path = nodes(tmp_path, {0: listed(CORES), 1: "9000-9003"})
    with pytest.raises(ModelLoadError, match=r"--numa-node 1: .*nodes with usable cores: 0$"):
        keep_to_numa_node(1, path)
    with pytest.raises(ModelLoadError, match=r"--numa-node 7: .*nodes with usable cores: none$"):
        keep_to_numa_node(7, tmp_path / "missing")
