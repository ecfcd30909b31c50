"""Which CPU cores this process may use, and how many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from stallfree_worker.model.errors import ModelLoadError

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_NODES = Path("/sys/devices/system/node")


def usable_cores(quota_path: Path = _CGROUP_QUOTA) -> int:
    """Those that this thread may run on, or as many whole ones as its container may use the time of: threads beyond it
    would be stopped for part of every period, in the midst of a step. Limits of cgroup version 1 are not seen."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_path.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return cores


def keep_to_numa_node(node: Literal["auto", "all"] | int, nodes_path: Path = _NODES) -> None:
    """Lets this thread, and those that it starts from now on, run on the cores of one NUMA node only. The system takes
    memory from the node of the core that touches it first, so weights and cache come to lie there too.

    `auto` is the node that has most of the cores this thread may run on, the first of equals. Raises `ModelLoadError`
    where none of a node's cores may be used.
    """
    cores_by_node = _usable_cores_by_node(nodes_path)
    if node == "all" or (node == "auto" and len(cores_by_node) <= 1):
        return
    chosen = max(cores_by_node, key=lambda number: (len(cores_by_node[number]), -number)) if node == "auto" else node
    if chosen not in cores_by_node:
        usable = ", ".join(map(str, sorted(cores_by_node))) or "none"
        raise ModelLoadError(f"--numa-node {chosen}: no core of it may be used here; nodes with usable cores: {usable}")
    os.sched_setaffinity(0, cores_by_node[chosen])


def _usable_cores_by_node(nodes_path: Path) -> dict[int, set[int]]:
    """Nodes with none of them left out; nothing where the system does not tell."""
    usable = os.sched_getaffinity(0)
    cores_by_node = {
        int(path.parent.name.removeprefix("node")): _cores_in(path.read_text(encoding="ascii")) & usable
        for path in nodes_path.glob("node[0-9]*/cpulist")
    }
    return {node: cores for node, cores in cores_by_node.items() if cores}


def _cores_in(cpulist: str) -> set[int]:
    """Of what the kernel writes as `0-3,8,10-11`; nothing for a node without cores."""
    cores: set[int] = set()
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
