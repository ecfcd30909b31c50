"""How many CPU cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_path: Path = _CGROUP_QUOTA) -> int:
    """Those that this process may run on, or as many whole ones as its container may use the time of: threads beyond it
    would be stopped for part of every period, in the midst of a step. Limits of cgroup version 1 are not seen."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_path.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no quota ("max")
        return cores
