"""`stallfree-loadtest`: `run` loads a server and prints what its clients see; `demo` shows it all on one machine; the
experiments measure rules and budgets against each other."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from stallfree_loadtest import arrivals
from stallfree_loadtest.client import Server
from stallfree_loadtest.cluster import ClusterError, ClusterSettings
from stallfree_loadtest.demo import DemoError, DemoSettings, run_demo
from stallfree_loadtest.demo_report import demo_report
from stallfree_loadtest.experiments import ExperimentError, add_experiments, run_experiment
from stallfree_loadtest.local import until_signal
from stallfree_loadtest.measures import RequestTrace, Targets, summarize
from stallfree_loadtest.open_loop import PromptLength, Workload, run_open_loop
from stallfree_loadtest.options import HelpFormatter, add_prompt_options, base_url, count, positive, writable_file
from stallfree_loadtest.prompts import Vocabulary
from stallfree_loadtest.report import load_report, summary_row, write_json_lines


class NothingFinishedError(Exception):
    """Not one request of a load came to its end."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser, run_parser = _parsers()
    options = parser.parse_args(arguments)
    command = _command(options, run_parser)
    try:
        is_done = asyncio.run(until_signal(command))
    except (ClusterError, DemoError, ExperimentError, NothingFinishedError) as error:
        sys.stderr.write(f"stallfree-loadtest {options.command}: {error}\n")
        raise SystemExit(1) from None
    raise SystemExit(0 if is_done else 130)


def _command(options: argparse.Namespace, run_parser: argparse.ArgumentParser) -> Callable[[], Awaitable[None]]:
    if options.command == "run":
        return _checked_run(options, run_parser)
    if options.command == "demo":
        return lambda: _demo(options)
    return lambda: run_experiment(options, say=_print)


def _checked_run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Callable[[], Awaitable[None]]:
    """The load to run. What is wrong with its options or files ends the process before anything is sent."""
    if options.vocab_high <= options.vocab_low:
        parser.error(f"--vocab-high ({options.vocab_high}) must be above --vocab-low ({options.vocab_low})")
    if options.trace is None and options.requests is None and options.duration is None:
        options.requests = 100
    try:
        instants = _arrivals(options)
    except (OSError, ValueError) as error:
        parser.error(f"argument --trace: {error}")
    return lambda: _run(options, instants)


async def _run(options: argparse.Namespace, instants: Iterator[float]) -> None:
    servers = [
        Server(url=url, model=options.model, api_key=options.api_key, silence_timeout_seconds=options.timeout)
        for url in options.url
    ]
    workload = Workload(
        prompts=options.prompt_mix or (PromptLength(num_tokens=options.prompt_tokens, weight=1.0),),
        output_tokens=options.output_tokens,
        vocabulary=Vocabulary(low=options.vocab_low, high=options.vocab_high),
        seed=options.seed,
    )
    targets = Targets(tbt_seconds=options.tbt_target, ttft_seconds=options.ttft_target)
    traces = await run_open_loop(servers, arrivals=instants, requests=workload.requests(), on_end=_tell_failure)
    if not traces:
        _print("no request was due: nothing was sent")
        return
    summary = summarize(traces, targets)
    _print(load_report(summary, targets))
    if options.out is not None:
        write_json_lines(options.out, traces, summary={"asked": _asked(options), **summary_row(summary)})
    if not summary.num_finished:
        raise NothingFinishedError(f"none of {summary.num_requests} requests finished")


def _asked(options: argparse.Namespace) -> dict[str, object]:
    """The options for JSON, without the key."""
    asked = {name: value for name, value in vars(options).items() if name != "api_key" and value is not None}
    if options.prompt_mix is not None:
        del asked["prompt_tokens"]
        asked["prompt_mix"] = [asdict(prompt) for prompt in options.prompt_mix]
    return {name: str(value) if isinstance(value, Path) else value for name, value in asked.items()}


def _arrivals(options: argparse.Namespace) -> Iterator[float]:
    instants: Iterable[float]
    if options.trace is not None:
        instants = arrivals.trace(options.trace)
    elif options.arrivals == "fixed":
        instants = arrivals.fixed(options.rate)
    elif options.arrivals == "gamma":
        instants = arrivals.gamma(options.rate, coefficient_of_variation=options.burstiness, seed=options.seed)
    else:
        instants = arrivals.poisson(options.rate, seed=options.seed)
    return arrivals.limited(instants, max_requests=options.requests, max_seconds=options.duration)


async def _demo(options: argparse.Namespace) -> None:
    settings = DemoSettings(
        cluster=ClusterSettings(
            model=options.model,
            num_workers=options.workers,
            dtype=options.dtype,
            worker_args=(
                f"--token-budget={options.token_budget}",
                f"--tbt-target-seconds={options.tbt_target}",
                *options.worker_arg,
            ),
        ),
        num_streams=options.streams,
        long_tokens=options.long_tokens,
        tbt_target_seconds=options.tbt_target,
        seconds_before=options.seconds_before,
        seconds_after=options.seconds_after,
        timeout_seconds=options.timeout,
    )
    result = await run_demo(settings, say=_print)
    _print(f"\n{demo_report(result, settings)}")


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="stallfree-loadtest",
        description="Loads a server and prints what its clients see, or shows it all on one machine.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="load a running server and print TTFT, TBT, stalls and throughput",
        description="Sends streaming completions at their own pace, whatever the server does (an open loop), stamps "
        "every token on arrival, and prints TTFT, TBT, stalls and throughput.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    demo = commands.add_parser(
        "demo",
        help="start a cluster here, let a long prompt arrive among running answers, print what the answers felt",
        description="Starts a store, workers and a router, lets completions stream, sends a long prompt, and prints "
        "how the streams fared before, during and after it. Stops everything it started.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    _add_run_options(run)
    _add_demo_options(demo)
    add_experiments(commands.add_parser)
    return parser, run


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        type=base_url,
        action="append",
        required=True,
        help="base URL of a router, such as http://127.0.0.1:8000; given several times, they take turns",
    )
    add("--model", required=True, help="model name that requests ask for")
    add("--api-key", metavar="KEY", help="sent as a bearer token; by default none")
    add(
        "--arrivals",
        choices=("poisson", "gamma", "fixed"),
        default="poisson",
        help="how requests are spread over time: at random, in bursts (--burstiness), or evenly",
    )
    add("--rate", type=positive, default=1.0, metavar="R", help="requests a second, on average")
    add(
        "--burstiness",
        type=positive,
        default=2.0,
        metavar="CV",
        help="for gamma: standard deviation of the gaps between requests over their mean; 1 is Poisson, more comes in "
        "bursts",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="send at the instants in a file, one number of seconds a line, in place of --rate",
    )
    add("--requests", type=count(least=1), metavar="N", help="stop after N requests; 100 if no other end is given")
    add("--duration", type=positive, metavar="SECONDS", help="stop sending after so many seconds")
    add("--prompt-tokens", type=count(least=1), default=256, metavar="N", help="tokens in every prompt")
    add(
        "--prompt-mix",
        type=prompt_mix,
        metavar="N:W,…",
        help="prompt lengths with weights in place of --prompt-tokens, such as 256:0.8,4096:0.2",
    )
    add("--output-tokens", type=count(least=1), default=48, metavar="N", help="tokens in every answer")
    add_prompt_options(parser)
    add(
        "--tbt-target", type=positive, default=0.2, metavar="SECONDS", help="a wait between tokens beyond it is a stall"
    )
    add(
        "--ttft-target",
        type=positive,
        metavar="SECONDS",
        help="for goodput: latest first token; by default none is too late",
    )
    add("--timeout", type=positive, default=120.0, metavar="SECONDS", help="a request fails after so long a silence")
    add(
        "--out",
        type=writable_file,
        metavar="FILE",
        help="write every request with its stamps, then the summary, as JSON lines",
    )


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo:gemma3-270m", help="what to serve: a folder, a GGUF file, a hub id, or the demo model")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="number format of the weights")
    add("--workers", type=count(least=1), default=2, metavar="N", help="number of workers")
    add("--streams", type=count(least=1), default=8, metavar="N", help="answers that are being written when it arrives")
    add(
        "--long-tokens",
        type=count(least=1),
        default=4000,
        metavar="N",
        help="tokens in the long prompt, about this many",
    )
    add(
        "--tbt-target", type=positive, default=0.2, metavar="SECONDS", help="a wait between tokens beyond it is a stall"
    )
    add(
        "--token-budget",
        default="auto",
        metavar="BUDGET",
        help="most tokens that a worker computes in one step: a number, by-position, or auto (by TBT target)",
    )
    add(
        "--seconds-before",
        type=positive,
        default=5.0,
        metavar="SECONDS",
        help="how long the answers run before the long prompt is sent",
    )
    add(
        "--seconds-after",
        type=positive,
        default=5.0,
        metavar="SECONDS",
        help="how long they go on after its first token",
    )
    add(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="SECONDS",
        help="longest the demo may take once the cluster serves",
    )
    add(
        "--worker-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to every worker, such as --worker-arg=--block-size=32; may be given several times",
    )


def prompt_mix(text: str) -> tuple[PromptLength, ...]:
    """`256:0.8,4096:0.2` → lengths with weights.

    Raises:
        argparse.ArgumentTypeError: a part is not LENGTH:WEIGHT, both above 0.
    """
    found = []
    for part in text.split(","):
        length, _, weight = part.partition(":")
        try:
            prompt = PromptLength(num_tokens=int(length), weight=float(weight))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not LENGTH:WEIGHT") from None
        if prompt.num_tokens < 1 or not 0 < prompt.weight < math.inf:
            raise argparse.ArgumentTypeError(f"{part!r}: both numbers must be above 0")
        found.append(prompt)
    return tuple(found)


def _tell_failure(trace: RequestTrace) -> None:
    if trace.outcome == "error":
        sys.stderr.write(f"{trace.request_id}: {trace.error}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
