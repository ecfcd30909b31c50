"""`stallfree-local`: the whole cluster in the foreground, until Ctrl-C.

Standard output is for programs: one line `ready URL` a router, or one JSON object. Everything else goes to standard
error. Exits with 0 after SIGINT or SIGTERM, with 1 when the cluster could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from stallfree_loadtest.cluster import ClusterError, ClusterSettings, LocalCluster
from stallfree_loadtest.options import HelpFormatter, count, positive


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        asyncio.run(until_signal(lambda: _serve(options)))
    except ClusterError as error:
        _tell(str(error))
        raise SystemExit(1) from None


async def until_signal(run: Callable[[], Awaitable[None]]) -> bool:
    """Runs to the end, or until SIGINT or SIGTERM cancels it; what it holds is released either way. A second signal
    cancels the release too. Returns whether it came to its end by itself."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run())
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return False
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    return True


async def _serve(options: argparse.Namespace) -> None:
    settings = _settings(options)
    async with LocalCluster(settings, report=_tell) as cluster:
        if options.json:
            _print(json.dumps(cluster.describe()))
        else:
            for url in cluster.router_urls:
                _print(f"ready {url}")
        _tell(f"logs are in {cluster.log_dir}; Ctrl-C stops everything")
        await cluster.supervise(is_restarting=options.restart)


def _settings(options: argparse.Namespace) -> ClusterSettings:
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="stallfree-"))
    commands = {
        name: tuple(value)
        for name, value in (("worker_command", options.worker_command), ("router_command", options.router_command))
        if value
    }
    return ClusterSettings(
        model=options.model,
        num_workers=options.workers,
        num_routers=options.routers,
        host=options.host,
        port=options.port,
        dtype=options.dtype,
        redis_url=options.redis_url,
        worker_args=tuple(options.worker_arg),
        router_args=tuple(options.router_arg),
        log_dir=log_dir,
        start_timeout_seconds=options.start_timeout,
        stop_timeout_seconds=options.stop_timeout,
        **commands,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stallfree-local",
        description="Starts a whole Stallfree on this machine: a store, workers and routers. Prints `ready URL` for "
        "each router when it serves, and stops everything on Ctrl-C.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="what to serve: a folder in Hugging Face format, a GGUF file, a hub id, or demo:gemma3-270m",
    )
    add("--workers", type=count(least=1), default=2, metavar="N", help="number of workers")
    add("--routers", type=count(least=1), default=1, metavar="N", help="number of routers")
    add("--host", default="127.0.0.1", help="address that workers and routers listen on")
    add(
        "--port",
        type=count(least=0, most=65535),
        default=8000,
        metavar="P",
        help="port of the first router, the next ones follow; 0 takes free ones, as workers and store always do",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="number format of the weights; by default the model's own")
    add("--redis-url", metavar="URL", help="a Redis-compatible server; by default one is started and stopped here")
    add(
        "--worker-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to every worker, such as --worker-arg=--token-budget=64; may be given several times",
    )
    add("--router-arg", action="append", default=[], metavar="ARG", help="the same for every router")
    add("--log-dir", type=Path, metavar="DIR", help="folder for one log file a process; by default a new temporary one")
    add("--json", action="store_true", help="print one JSON object with every part's process id and URL instead")
    add("--restart", action="store_true", help="start a part again when it has died; by default it is only reported")
    add("--start-timeout", type=positive, default=1800.0, metavar="SECONDS", help="most seconds until all is ready")
    add(
        "--stop-timeout",
        type=positive,
        default=10.0,
        metavar="SECONDS",
        help="seconds that parts get to end what runs; then they are killed",
    )
    add(
        "--worker-command",
        action="append",
        default=[],
        metavar="WORD",
        help="another program in the worker's place, one word of its command each time; for tests",
    )
    add("--router-command", action="append", default=[], metavar="WORD", help="the same for the router")
    return parser


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _tell(line: str) -> None:
    sys.stderr.write(f"stallfree-local: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
