"""One child process: its process group and its log file. Knows nothing of what runs in it. Used by `parts`.

Every child leads a session of its own, so that a Ctrl-C in the terminal reaches the cluster alone, and so that the
whole group (a worker and its engine) can be ended together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stallfree_loadtest.log_lines import last_error, readable

POLL_SECONDS = 0.05
_LISTENING = re.compile(rb"^listening (\S+)\r?$", re.MULTILINE)
_TAIL_BYTES = 64 * 1024


class ChildProcess:
    """Owns one process from its start to the end of its whole group."""

    def __init__(self, command: Sequence[str], *, log_path: Path) -> None:
        self.log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        launcher = (sys.executable, "-m", "stallfree_loadtest.launcher", str(os.getpid()))
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(  # noqa: S603 - the command is ours
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_status(self) -> int | None:
        """None while it runs; then its exit status, negative for the signal that ended it. What is left of the group
        when the leader has gone is killed first, while the leader's id cannot yet belong to another process."""
        if self._popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._kill_group()
            self._popen.wait()
        return self._popen.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process itself, not its group. Nothing happens when it has ended."""
        if self.exit_status() is None:
            os.kill(self.pid, number)

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        while (status := self.exit_status()) is None:  # noqa: ASYNC110 - a process tells nobody that it has ended
            await asyncio.sleep(POLL_SECONDS)
        return status

    def kill(self) -> None:
        """Ends the whole group at once."""
        if self._popen.returncode is None:
            self._kill_group()
            self._popen.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def listening_url(self) -> str | None:
        """The URL of its line `listening URL`, once it has written one."""
        found = _LISTENING.search(self._log())
        return found.group(1).decode() if found else None

    def log_tail(self, *, num_lines: int = 15) -> str:
        """The last lines that this run wrote, made readable; a traceback counts as one line."""
        return "\n".join(readable(line) for line in self._last_lines()[-num_lines:])

    def last_error(self) -> str | None:
        """The last error that this run logged."""
        return last_error(self._last_lines())

    def _last_lines(self) -> list[str]:
        return self._log()[-_TAIL_BYTES:].decode(errors="replace").splitlines()

    def _log(self) -> bytes:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read()


def describe_exit(status: int) -> str:
    """An exit status in words: `exited with status 3`, `was ended by SIGKILL`."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was ended by {signal.Signals(-status).name}"


def child_pids(pid: int) -> tuple[int, ...]:
    """Direct children of a process, by Linux's /proc; nothing elsewhere."""
    found: set[int] = set()
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(int(child) for child in listing.read_text().split())
    return tuple(sorted(found))


def command_line(pid: int) -> str:
    """What a process was started with, or nothing when it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
