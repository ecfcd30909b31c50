"""Becomes the given command, in a process that dies with its parent.

    python -m stallfree_loadtest.launcher PARENT_PID COMMAND ARGUMENT…

A cluster that is killed with SIGKILL cannot stop its parts. On Linux the kernel does it: the parent-death signal is
set here and survives `exec`. Elsewhere this only becomes the command. The kernel ties the signal to the *thread* that
started this process, so parts must be started from a thread that lives as long as the cluster. Called by `process`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        _die_with_parent()
    if os.getppid() != parent_pid:  # it died before the signal was set
        raise SystemExit(1)
    os.execvp(command[0], command)  # noqa: S606 - becoming another command is what this is for


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


if __name__ == "__main__":
    main()
