"""`stallfree-loadtest`: `run` loads a server and prints what its clients see; `demo` shows it all on one machine."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stallfree_loadtest import arrivals
from stallfree_loadtest.client import Server
from stallfree_loadtest.cluster import ClusterError, ClusterSettings
from stallfree_loadtest.demo import DemoError, DemoSettings, run_demo
from stallfree_loadtest.demo_report import demo_report
from stallfree_loadtest.local import until_signal
from stallfree_loadtest.measures import RequestTrace, Targets, summarize
from stallfree_loadtest.open_loop import PromptLength, Workload, run_open_loop
from stallfree_loadtest.options import HelpFormatter, count, positive
from stallfree_loadtest.report import load_report, summary_row, write_json_lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser, run_parser = _parsers()
    options = parser.parse_args(arguments)
    if options.command == "run":
        _check_run(options, run_parser)
        ended = asyncio.run(until_signal(lambda: _run(options)))
    else:
        ended = _demo(options)
    raise SystemExit(0 if ended else 130)


async def _run(options: argparse.Namespace) -> None:
    servers = [
        Server(url=url, model=options.model, api_key=options.api_key, silence_timeout_seconds=options.timeout)
        for url in options.url
    ]
    workload = Workload(
        prompts=options.prompt_mix or (PromptLength(num_tokens=options.prompt_tokens, weight=1.0),),
        output_tokens=options.output_tokens,
        vocab_low=options.vocab_low,
        vocab_high=options.vocab_high,
        seed=options.seed,
    )
    targets = Targets(tbt_seconds=options.tbt_target, ttft_seconds=options.ttft_target)
    traces = await run_open_loop(
        servers, arrivals=_arrivals(options), requests=workload.requests(), on_end=_tell_failure
    )
    if not traces:
        _print("no request was due: nothing was sent")
        return
    summary = summarize(traces, targets)
    _print(load_report(summary, targets))
    if options.out is not None:
        asked = {name: str(value) for name, value in vars(options).items() if name != "api_key" and value is not None}
        write_json_lines(options.out, traces, summary={"asked": asked, **summary_row(summary)})


def _arrivals(options: argparse.Namespace) -> Iterator[float]:
    if options.trace is not None:
        instants = arrivals.trace(options.trace)
    elif options.arrivals == "fixed":
        instants = arrivals.fixed(options.rate)
    elif options.arrivals == "gamma":
        instants = arrivals.gamma(options.rate, coefficient_of_variation=options.burstiness, seed=options.seed)
    else:
        instants = arrivals.poisson(options.rate, seed=options.seed)
    return arrivals.limited(instants, max_requests=options.requests, max_seconds=options.duration)


def _check_run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.vocab_high <= options.vocab_low:
        parser.error(f"--vocab-high ({options.vocab_high}) must be above --vocab-low ({options.vocab_low})")
    if options.trace is None and options.requests is None and options.duration is None:
        options.requests = 100


def _demo(options: argparse.Namespace) -> bool:
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

    async def run() -> None:
        result = await run_demo(settings, say=_print)
        _print(f"\n{demo_report(result, settings)}")

    try:
        return asyncio.run(until_signal(run))
    except (ClusterError, DemoError) as error:
        sys.stderr.write(f"stallfree-loadtest demo: {error}\n")
        raise SystemExit(1) from None


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(prog="stallfree-loadtest", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|demo")
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
    return parser, run


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", action="append", required=True, help="base URL of a router; given several times, they take turns")
    add("--model", required=True, help="model name that requests ask for")
    add("--api-key", help="sent as a bearer token")
    add(
        "--arrivals",
        choices=("poisson", "gamma", "fixed"),
        default="poisson",
        help="how the gaps between requests vary",
    )
    add("--rate", type=positive, default=1.0, metavar="R", help="requests a second, on average")
    add(
        "--burstiness",
        type=positive,
        default=2.0,
        metavar="CV",
        help="for gamma: standard deviation of the gaps over their mean; 1 is Poisson, more is burstier",
    )
    add("--trace", type=Path, metavar="FILE", help="arrival instants from a file, one number of seconds a line")
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
    add("--vocab-low", type=count(least=0), default=1000, metavar="ID", help="lowest token id in prompts")
    add("--vocab-high", type=count(least=1), default=8000, metavar="ID", help="first token id that prompts do not use")
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same prompts and arrivals")
    add(
        "--tbt-target", type=positive, default=0.2, metavar="SECONDS", help="a wait between tokens beyond it is a stall"
    )
    add("--ttft-target", type=positive, metavar="SECONDS", help="for goodput: latest first token; by default none")
    add(
        "--timeout", type=positive, default=120.0, metavar="SECONDS", help="longest silence before a request has failed"
    )
    add("--out", type=Path, metavar="FILE", help="write every request with its stamps, then the summary, as JSON lines")


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo:gemma3-270m", help="what to serve: a folder, a GGUF file, a hub id, or the demo model")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="number format of the weights")
    add("--workers", type=count(least=1), default=2, metavar="N", help="number of workers")
    add("--streams", type=count(least=1), default=8, metavar="N", help="answers that are being written")
    add("--long-tokens", type=count(least=1), default=4000, metavar="N", help="tokens in the long prompt, about")
    add(
        "--tbt-target", type=positive, default=0.2, metavar="SECONDS", help="a wait between tokens beyond it is a stall"
    )
    add(
        "--token-budget",
        type=count(least=1),
        default=48,
        metavar="N",
        help="most tokens that a worker computes in one step",
    )
    add(
        "--seconds-before",
        type=positive,
        default=5.0,
        metavar="SECONDS",
        help="from streams that run to the long prompt",
    )
    add("--seconds-after", type=positive, default=5.0, metavar="SECONDS", help="from its first token to the end")
    add("--timeout", type=positive, default=600.0, metavar="SECONDS", help="most seconds once the cluster serves")
    add("--worker-arg", action="append", default=[], metavar="ARG", help="passed on to every worker, may be repeated")


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
