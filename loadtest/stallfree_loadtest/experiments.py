"""The commands that measure rules, budgets and servers against each other: `stalls`, `ablation`, `follow`, `bench`.

Each starts its own workers on this machine, one after another busy, never two at once. Here are their options, and
what is written where; what they do stands in modules of their names.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from stallfree_loadtest import ablation, bench, follow_report, stalls_report
from stallfree_loadtest.ablation import AblationLoad, AblationRun, run_ablation
from stallfree_loadtest.cluster import ClusterSettings
from stallfree_loadtest.contenders import OwnCluster
from stallfree_loadtest.fleet import Fleet, NotIdleError, configuration
from stallfree_loadtest.follow import FollowLoad, run_follow
from stallfree_loadtest.limits import LimitsError, measure_limits
from stallfree_loadtest.live import RequestFailedError
from stallfree_loadtest.measures import Targets
from stallfree_loadtest.options import (
    HelpFormatter,
    add_prompt_options,
    count,
    listed,
    non_negative,
    positive,
    writable_file,
)
from stallfree_loadtest.pages import PageError
from stallfree_loadtest.parts import num_cores
from stallfree_loadtest.peers import OURS, Peer, PeerError, peer
from stallfree_loadtest.prompts import LongTail, Vocabulary
from stallfree_loadtest.report import seconds_text, write_rows
from stallfree_loadtest.stalls import StallLoad, StallRun, run_stalls

STALLS_CONFIGURATIONS = (
    "faster_transformer", "orca", "vllm", "chunked_only:128", "chunked_only:256", "chunked_only:512", "sarathi:128",
    "sarathi:256", "sarathi:512", "sarathi:by-position",
)  # fmt: skip
ABLATION_CONFIGURATIONS = ("orca", "chunked_only:256", "sarathi:256", "sarathi:auto")
Say = Callable[[str], None]


class ExperimentError(Exception):
    """An experiment cannot go on; the message says why."""


async def run_experiment(options: argparse.Namespace, *, say: Say) -> None:
    """Runs the experiment that `options.command` names.

    Raises:
        ClusterError: a worker or router could not be started.
        ExperimentError: a request failed, or a service did not answer as it should.
    """
    try:
        await _EXPERIMENTS[options.command](options, say)
    except (LimitsError, NotIdleError, PageError, PeerError, RequestFailedError) as error:
        raise ExperimentError(str(error)) from error


async def _stalls(options: argparse.Namespace, say: Say) -> None:
    load = StallLoad(
        num_streams=options.streams,
        context_tokens=options.context_tokens,
        stream_tokens=options.stream_tokens,
        long_tokens=options.long_tokens,
        seconds_before=options.seconds_before,
        patience_seconds=options.patience,
        vocabulary=_vocabulary(options),
        seed=options.seed,
    )
    autos = [configuration(f"sarathi:auto@{target:g}") for target in options.targets]
    configurations = [*options.configurations, *autos]
    peers = _peers(options, beside=[each.name for each in configurations])
    runs: list[StallRun] = []

    def on_run(run: StallRun) -> None:
        runs.append(run)
        ttft = "no first token" if run.ttft_seconds is None else f"first token after {seconds_text(run.ttft_seconds)}"
        say(f"round {run.round_number}: {run.contender}: {ttft}")
        _write_rows(options, [stalls_report.run_row(each, tbt_target_seconds=options.tbt_target) for each in runs])

    async with _fleet(options, max_model_len=load.max_model_len, say=say) as fleet:
        ours = [OwnCluster(name=each.name, fleet=fleet, configuration=each) for each in configurations]
        await run_stalls([*ours, *peers], load, rounds=options.rounds, on_run=on_run)
    _write_report(options, stalls_report.stalls_report(runs, load, tbt_target_seconds=options.tbt_target), say)
    title = _title("Streams while a long prompt is read", options)
    picture = stalls_report.stalls_picture(runs, load, tbt_target_seconds=options.tbt_target, title=title)
    _write_picture(options, picture)


async def _ablation(options: argparse.Namespace, say: Say) -> None:
    load = AblationLoad(
        num_requests=options.requests,
        rate_per_second=options.rate,
        prompts=options.prompt_lengths,
        outputs=options.output_lengths,
        vocabulary=_vocabulary(options),
        seed=options.seed,
    )
    targets = Targets(tbt_seconds=options.tbt_target)
    runs: list[AblationRun] = []

    def on_run(run: AblationRun) -> None:
        runs.append(run)
        say(f"round {run.round_number}: {run.configuration.name}: {seconds_text(run.summary.seconds)}")
        _write_rows(options, [ablation.run_row(each) for each in runs])

    async with _fleet(options, max_model_len=load.max_model_len, say=say) as fleet:
        await run_ablation(fleet, options.configurations, load, rounds=options.rounds, targets=targets, on_run=on_run)
    _write_report(options, ablation.ablation_report(runs, load, tbt_target_seconds=options.tbt_target), say)
    title = _title("Mixing, chunking, and both", options)
    _write_picture(options, ablation.ablation_picture(runs, title=title))


async def _follow(options: argparse.Namespace, say: Say) -> None:
    load = FollowLoad(
        few_streams=options.few_streams,
        many_streams=options.many_streams,
        short_context_tokens=options.short_context,
        long_context_streams=options.long_context_streams,
        long_context_tokens=options.long_context,
        trickle_tokens=options.trickle_tokens,
        phase_seconds=options.phase_seconds,
        vocabulary=_vocabulary(options),
        seed=options.seed,
    )
    async with (
        _fleet(options, max_model_len=None, say=say) as fleet,
        fleet.serving(configuration("sarathi:auto")) as serving,
    ):
        result = await run_follow(serving, load, report=say)
    settings = {"tbt_target_seconds": options.tbt_target, "window_steps": options.window_steps}
    _write_rows(options, follow_report.result_rows(result, **settings))
    _write_report(options, follow_report.follow_report(result, load, **settings), say)


async def _bench(options: argparse.Namespace, say: Say) -> None:
    load = bench.BenchLoad(
        prefill_tokens=options.prefill,
        decode_streams=options.decode,
        context_tokens=options.context_tokens,
        decode_tokens=options.decode_tokens,
        vocabulary=_vocabulary(options),
        seed=options.seed,
        temperature=options.temperature,
    )
    runs: list[bench.BenchRun] = []

    def on_run(run: bench.BenchRun) -> None:
        runs.append(run)
        say(f"round {run.round_number}: {run.contender}: {run.measure}: {run.tokens_per_second:,.0f} tokens a second")
        _write_rows(options, [bench.run_row(each) for each in runs])

    async with _fleet(options, max_model_len=load.max_model_len, say=say) as fleet:
        ours = OwnCluster(name=OURS, fleet=fleet, configuration=configuration("sarathi:auto"))
        await bench.run_bench(
            [ours, *_peers(options, beside=[])],
            load,
            rounds=options.rounds,
            on_run=on_run,
            find_limits=partial(measure_limits, options.model) if options.limits else None,
        )
    _write_report(options, bench.bench_report(runs, load), say)
    title = _title("Prefill and decode", options)
    _write_picture(options, bench.bench_picture(runs, load, title=title))


_EXPERIMENTS: Mapping[str, Callable[[argparse.Namespace, Say], Awaitable[None]]] = {
    "stalls": _stalls,
    "ablation": _ablation,
    "follow": _follow,
    "bench": _bench,
}


def _fleet(options: argparse.Namespace, *, max_model_len: int | None, say: Say) -> Fleet:
    limit = () if max_model_len is None else (f"--max-model-len={max_model_len}",)
    base = ClusterSettings(
        model=options.model,
        num_workers=1,
        dtype=options.dtype,
        worker_args=(*limit, f"--kv-cache-memory={options.kv_cache_memory}", *options.worker_arg),
    )
    return Fleet(base, tbt_target_seconds=options.tbt_target, keeps_warm=options.keep_warm, report=say)


def _peers(options: argparse.Namespace, *, beside: Sequence[str]) -> Sequence[Peer]:
    """Raises ExperimentError where two of them, or one and a configuration of ours, have the same name."""
    names = [*beside, *[each.name for each in options.peer]]
    if options.peer and len(set(names)) < len(names):
        raise ExperimentError(f"--peer: two of {', '.join(names)} have the same name")
    peers: Sequence[Peer] = options.peer
    return peers


def _title(what: str, options: argparse.Namespace) -> str:
    """Of a picture. A model that is a file or a folder is told by its name alone: pictures are shown to others."""
    path = Path(options.model)
    return f"{what}: {path.resolve().name if path.exists() else options.model}, {num_cores()} cores"


def _vocabulary(options: argparse.Namespace) -> Vocabulary:
    if options.vocab_high <= options.vocab_low:
        raise ExperimentError(f"--vocab-high ({options.vocab_high}) must be above --vocab-low ({options.vocab_low})")
    return Vocabulary(low=options.vocab_low, high=options.vocab_high)


def _write_rows(options: argparse.Namespace, rows: Iterable[Mapping[str, object]]) -> None:
    if options.out is not None:
        write_rows(options.out, rows)


def _write_report(options: argparse.Namespace, report: str, say: Say) -> None:
    say(f"\n{report}")
    if options.table is not None:
        options.table.write_text(f"{report}\n", encoding="utf-8")


def _write_picture(options: argparse.Namespace, picture: str) -> None:
    if options.picture is not None:
        options.picture.write_text(picture, encoding="utf-8")


def add_experiments(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the commands to those of `stallfree-loadtest`."""
    for name, add_options, about in (
        (
            "stalls",
            _add_stalls_options,
            "let a long prompt arrive among streams, for one rule and budget after another",
        ),
        ("ablation", _add_ablation_options, "serve the same load with mixed steps, with chunks, and with both"),
        ("bench", _add_bench_options, "measure prefill and decode speed, beside other servers of the same model"),
        ("follow", _add_follow_options, "change the load and count the steps that the token budget needs to follow"),
    ):
        parser = add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}. Starts its own workers here, each with all cores, and stops "
            "them; nothing else should run on this machine meanwhile.",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        _add_common_options(parser)
        add_options(parser)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo:gemma3-270m", help="what to serve: a folder, a GGUF file, a hub id, or the demo model")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="number format of the weights")
    add("--tbt-target", type=positive, default=0.2, metavar="SECONDS", help="a wait beyond it is a stall; what auto "
        "keeps to where it has no target of its own")  # fmt: skip
    add_prompt_options(parser)
    add("--worker-arg", action="append", default=[], metavar="ARG", help="passed on to every worker, such as "
        "--worker-arg=--block-size=32; may be given several times")  # fmt: skip
    add("--out", type=writable_file, metavar="FILE", help="write what was measured as JSON lines")
    add("--table", type=writable_file, metavar="FILE", help="write the printed report there too, as Markdown")


def _add_fleet_options(parser: argparse.ArgumentParser, *, configurations: Sequence[str], rounds: int) -> None:
    add = parser.add_argument
    add(
        "--configurations",
        type=listed(configuration),
        default=",".join(configurations),
        metavar="NAME,…",
        help="what to compare: RULE, RULE:TOKENS, RULE:by-position, RULE:auto or RULE:auto@TARGET",
    )
    add("--rounds", type=count(least=1), default=rounds, metavar="N", help="times that each of them is measured")
    add("--keep-warm", action="store_true", help="keep every worker for the next round, which takes the memory of all "
        "of them, some 2.5 GiB each; by default every run starts a fresh one")  # fmt: skip
    add("--picture", type=writable_file, metavar="FILE", help="write an SVG of the result")


def _add_peer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=COMMAND", help="another server "
        "of the same model; {port} in the command is where it must listen, {threads} the number of cores; may be given "
        "several times")  # fmt: skip


def _add_stalls_options(parser: argparse.ArgumentParser) -> None:
    _add_fleet_options(parser, configurations=STALLS_CONFIGURATIONS, rounds=5)
    _add_peer_option(parser)
    add = parser.add_argument
    add("--targets", type=listed(positive), default="0.1,0.2,0.5", metavar="SECONDS,…", help="TBT targets for which "
        "sarathi:auto is measured besides")  # fmt: skip
    add("--streams", type=count(least=1), default=8, metavar="N", help="streams that decode when the prompt arrives")
    add("--context-tokens", type=count(least=1), default=512, metavar="N", help="tokens in each stream's prompt")
    add("--stream-tokens", type=count(least=1), default=512, metavar="N", help="tokens that each stream writes, more "
        "than it gets during the prefill; request-level batching lets the prompt wait for all of them")  # fmt: skip
    add("--long-tokens", type=count(least=1), default=4096, metavar="N", help="tokens in the long prompt")
    add("--seconds-before", type=positive, default=2.0, metavar="SECONDS", help="how long all streams decode before it")
    add("--patience", type=positive, default=120.0, metavar="SECONDS", help="most seconds until its first token")
    add("--kv-cache-memory", default="1GiB", metavar="BYTES", help="memory of each worker for keys and values")


def _add_ablation_options(parser: argparse.ArgumentParser) -> None:
    _add_fleet_options(parser, configurations=ABLATION_CONFIGURATIONS, rounds=1)
    add = parser.add_argument
    add("--requests", type=count(least=1), default=80, metavar="N", help="requests in a run")
    add("--rate", type=positive, default=0.6, metavar="R", help="requests a second, on average: busy, not overloaded")
    add("--prompt-lengths", type=long_tail, default="432:1424:4096", metavar="MEDIAN:P90:MOST",
        help="tokens in prompts")  # fmt: skip
    add("--output-lengths", type=long_tail, default="104:208:512", metavar="MEDIAN:P90:MOST",
        help="tokens in answers")  # fmt: skip
    add("--kv-cache-memory", default="3GiB", metavar="BYTES", help="memory of each worker for keys and values: enough "
        "for Orca, which reserves it for the longest request that there may be")  # fmt: skip


def _add_follow_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--few-streams", type=count(least=1), default=2, metavar="N", help="streams that decode at first")
    add("--many-streams", type=count(least=1), default=32, metavar="N", help="streams after the first change")
    add("--short-context", type=count(least=1), default=100, metavar="N", help="tokens in their prompts")
    add("--long-context-streams", type=count(least=1), default=8, metavar="N", help="streams that take the place of "
        "all but the few")  # fmt: skip
    add("--long-context", type=count(least=1), default=4000, metavar="N", help="tokens in their prompts")
    add("--trickle-tokens", type=count(least=1), default=1024, metavar="N", help="tokens in the prompts that come one "
        "after the other all the time")  # fmt: skip
    add("--phase-seconds", type=positive, default=15.0, metavar="SECONDS", help="how long each phase goes on once all "
        "its streams decode")  # fmt: skip
    add("--window-steps", type=count(least=1), default=20, metavar="N", help="steps over which the P99 is taken")
    add("--kv-cache-memory", default="2GiB", metavar="BYTES", help="memory of the worker for keys and values")
    parser.set_defaults(keep_warm=False)


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    _add_peer_option(parser)
    add = parser.add_argument
    add("--rounds", type=count(least=1), default=5, metavar="N", help="times that each contender is measured")
    add("--prefill", type=listed(count(least=1)), default="512,2048,4096", metavar="N,…", help="tokens in prompts that "
        "are alone")  # fmt: skip
    add(
        "--decode",
        type=listed(count(least=1)),
        default="1,8,32",
        metavar="N,…",
        help="streams that decode side by side",
    )
    add("--context-tokens", type=count(least=1), default=512, metavar="N", help="tokens in each stream's prompt")
    add("--decode-tokens", type=count(least=1), default=64, metavar="N", help="tokens that each stream gets while it "
        "is measured")  # fmt: skip
    add("--temperature", type=non_negative, default=0.0, metavar="T", help="how tokens are drawn; 0: the likeliest")
    add("--limits", action=argparse.BooleanOptionalAction, default=True, help="measure too what the machine could do "
        "at most, which takes our compiled kernels")  # fmt: skip
    add("--kv-cache-memory", default="2GiB", metavar="BYTES", help="memory of our worker for keys and values")
    add("--picture", type=writable_file, metavar="FILE", help="write an SVG of the result")
    parser.set_defaults(keep_warm=False)


def long_tail(text: str) -> LongTail:
    """`432:1424:4096` → lengths with this median and P90, cut at the last.

    Raises:
        argparse.ArgumentTypeError: it is not three whole numbers that grow.
    """
    try:
        median, p90, most = (int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MEDIAN:P90:MOST") from None
    if not 1 <= median < p90 <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: the numbers must grow from 1 on")
    return LongTail(median=median, p90=p90, most=most)
