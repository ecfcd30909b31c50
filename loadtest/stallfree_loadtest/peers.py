"""Other servers of the same model, to be measured beside ours: one command each.

A peer is written `NAME=COMMAND`, where `{port}` in the command is the port that it must listen on (127.0.0.1) and
`{threads}` the number of cores. It must speak OpenAI's completions, streamed, with token ids for prompts and with
`ignore_eos`; and it must run in the process that the command starts, or in children of it. Used by `bench` and by
`stalls`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.pages import PageError, model_name
from stallfree_loadtest.parts import free_port, num_cores
from stallfree_loadtest.process import ChildProcess, describe_exit

OURS = "stallfree"
_POLL_SECONDS = 0.25


class PeerError(Exception):
    """A peer could not be started; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    command: str
    start_timeout_seconds: float = 600.0
    configuration: None = None
    """It is none of ours."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        """Starts it, and kills it in the end.

        Raises:
            PeerError: it ended, or did not tell its model in time.
        """
        port = free_port()
        values = {"{port}": str(port), "{threads}": str(num_cores())}
        words = [_filled(word, values) for word in shlex.split(self.command)]
        with tempfile.TemporaryDirectory(prefix="stallfree-peer-") as folder:
            process = ChildProcess(words, log_path=Path(folder) / "log")
            try:
                url = f"http://127.0.0.1:{port}"
                yield Server(url=url, model=await self._model(process, url))
            finally:
                process.kill()

    async def _model(self, process: ChildProcess, url: str) -> str:
        try:
            async with asyncio.timeout(self.start_timeout_seconds):
                while True:
                    status = process.exit_status()
                    if status is not None:
                        raise PeerError(f"{self.name} {describe_exit(status)}:\n{process.log_tail()}")
                    with contextlib.suppress(PageError):
                        model = await model_name(url)
                        if await _completes(Server(url=url, model=model)):
                            return model
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise PeerError(
                f"{self.name} completes nothing within {self.start_timeout_seconds:g} s:\n{process.log_tail()}"
            ) from None


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Other braces stay: they may be JSON."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


async def _completes(server: Server) -> bool:
    """Some servers tell their model before they have loaded it."""
    request = CompletionRequest(request_id="ready", prompt=(1000, 1001), max_tokens=1)
    return (await CompletionStream(server, request).run()).outcome == "finished"


def peer(text: str) -> Peer:
    """Raises argparse.ArgumentTypeError for what is no `NAME=COMMAND`."""
    name, _, command = text.partition("=")
    if not name or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in it")
    if name == OURS:
        raise argparse.ArgumentTypeError(f"{text!r}: {OURS} is the name of ours")
    return Peer(name=name, command=command)
