"""The speed experiment with stand-ins for all servers, and its report from made-up figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from stallfree_loadtest.bench import (
    LIMIT,
    BenchLoad,
    BenchRun,
    bench_picture,
    bench_report,
    run_bench,
    run_row,
)
from stallfree_loadtest.client import Server
from stallfree_loadtest.contenders import OwnCluster
from stallfree_loadtest.fleet import configuration
from stallfree_loadtest.limits import Limits
from stallfree_loadtest.live import RequestFailedError
from stallfree_loadtest.peers import Peer, PeerError, peer
from stallfree_loadtest.prompts import Vocabulary
from tests.loadtest import scripted_server
from tests.loadtest.test_fleet import fleet, peer_double
from tests.loadtest.test_picture import texts_of

LOAD = BenchLoad(
    prefill_tokens=(300, 3000),
    decode_streams=(1, 4),
    context_tokens=20,
    decode_tokens=20,
    vocabulary=Vocabulary(),
    seed=0,
)


async def test_every_round_measures_each_contender_once() -> None:
    told: list[BenchRun] = []
    async with fleet() as made:
        ours = OwnCluster(name="stallfree", fleet=made, configuration=configuration("sarathi:auto"))
        runs = await run_bench([ours, peer_double()], LOAD, rounds=2, on_run=told.append)
    assert runs == told
    assert [(run.round_number, run.contender, run.measure) for run in runs] == [
        (number, name, measure)
        for number, names in ((1, ("stallfree", "other")), (2, ("other", "stallfree")))
        for name in names
        for measure in ("prefill 300", "prefill 3,000", "decode x 1", "decode x 4")
    ]
    for run in runs:
        match run.measure:
            case "prefill 3,000":
                assert 3000 < run.tokens_per_second < 3000 / 0.3  # the stand-in takes 0.3 s for a long prompt
            case "decode x 1":
                assert 30 < run.tokens_per_second < 101  # one step every 10 ms
            case "decode x 4":
                assert 120 < run.tokens_per_second < 404


class Listening:
    """A contender that notes what it is asked for."""

    name, configuration = "listening", None

    def __init__(self) -> None:
        self.temperatures: set[object] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        async with scripted_server.serving(self._answer) as url:
            yield Server(url=url, model="m")

    async def _answer(self, connection: scripted_server.Connection) -> None:
        self.temperatures.add(connection.body["temperature"])
        await connection.send(scripted_server.HEAD)
        for _ in range(cast("int", connection.body["max_tokens"])):
            await connection.send_events(scripted_server.token_event("a", 1))
        await connection.send_events("[DONE]")
        await connection.send(scripted_server.END)


async def test_tokens_are_drawn_by_the_temperature_that_is_told() -> None:
    listening = Listening()
    load = dataclasses.replace(LOAD, prefill_tokens=(30,), decode_streams=(), temperature=0.7)
    await run_bench([listening], load, rounds=1, on_run=lambda _: None)
    assert listening.temperatures == {0.7}


async def test_a_request_that_fails_ends_the_experiment_with_its_reason() -> None:
    longer = dataclasses.replace(LOAD, decode_tokens=40)  # than any stream lasts
    with pytest.raises(RequestFailedError, match="the worker is gone"):
        await run_bench([peer_double("breaks-streams")], longer, rounds=1, on_run=lambda _: None)


async def test_a_peer_that_ends_is_told_with_its_last_words() -> None:
    with pytest.raises(PeerError, match=r"other exited with status 1:\n.*there is no such model"):
        await run_bench([peer_double("ends-at-once")], LOAD, rounds=1, on_run=lambda _: None)


def test_a_peer_is_a_name_and_a_command_with_a_port() -> None:
    assert peer("vllm=serve m --port {port}") == Peer(name="vllm", command="serve m --port {port}")
    for text in ("vllm", "=serve {port}", "vllm=serve m"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=COMMAND"):
            peer(text)
    with pytest.raises(argparse.ArgumentTypeError, match="stallfree is the name of ours"):
        peer("stallfree=serve {port}")


async def test_other_braces_in_a_command_stay(tmp_path: Path) -> None:
    told = tmp_path / "arguments"
    script = shlex.quote(f"import pathlib, sys; pathlib.Path({str(told)!r}).write_text(sys.argv[1])")
    words = shlex.quote('{"a": {"port": {port}}}')
    one = Peer(name="other", command=f"{sys.executable} -c {script} {words}", start_timeout_seconds=20)
    with pytest.raises(PeerError, match="exited with status 0"):
        async with one.serving():
            pass
    assert json.loads(told.read_text())["a"]["port"] > 0


def runs_of(contender: str, *figures: float) -> list[BenchRun]:
    return [
        BenchRun(contender=contender, round_number=number, measure=measure, tokens_per_second=figure + number)
        for number in (1, 2, 3)
        for measure, figure in zip(LOAD.measures, figures, strict=True)
    ]


RUNS = [
    *runs_of("stallfree", 998, 898, 58, 198),
    *runs_of("slow", 498, 398, 18, 98),
    *runs_of("quick", 698, 298, 28, 398),
]


def test_the_report_holds_ours_against_the_best_other_of_each_row() -> None:
    report = bench_report(RUNS, LOAD)
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in report.splitlines()
        if (cells := line.split("|"))[1:]
    }
    assert rows["prefill 300"] == ["1,000 [999..1,001]", "500 [499..501]", "700 [699..701]", "1.43 x quick"]
    assert rows["prefill 3,000"][-1] == "2.25 x slow"
    assert rows["decode x 4"][-1] == "0.50 x quick"


def test_ratios_are_those_of_each_round() -> None:
    """The machine gives half in the first round: that is no matter of ours or of the other."""
    load = dataclasses.replace(LOAD, prefill_tokens=(), decode_streams=(1,))
    figures = {"stallfree": (50, 150, 90), "quick": (40, 75, 60), LIMIT: (100, 200, 180)}
    runs = [
        BenchRun(contender=name, round_number=number, measure="decode x 1", tokens_per_second=figure)
        for name, of_rounds in figures.items()
        for number, figure in enumerate(of_rounds, 1)
    ]
    cells = bench_report(runs, load).splitlines()[-1].split("|")
    assert [cell.strip() for cell in cells[-3:-1]] == ["1.50 [1.25..2.00] x quick", "0.50 [0.50..0.75]"]


def test_the_limit_is_a_column_of_its_own_and_no_peer() -> None:
    report = bench_report([*runs_of(LIMIT, 1998, 998, 98, 998), *RUNS], LOAD)
    header, _, first, *_ = [line for line in report.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in header.split("|")[2:-1]] == [
        *("stallfree", "slow", "quick", "limit", "stallfree to the best other", "stallfree to the limit")
    ]
    assert [cell.strip() for cell in first.split("|")[-4:-1]] == ["2,000 [1,999..2,001]", "1.43 x quick", "0.50"]


async def test_limits_are_measured_before_every_round() -> None:
    limits = Limits(
        bytes_per_second=1e9,
        operations_per_second=1e10,
        layer_weights=1000,
        last_layer_weights=600,
        head_weights=500,
        query_size=64,
        kv_size=32,
        windows=(None, 16),
    )

    async def find() -> Limits:
        return limits

    runs = await run_bench([peer_double()], LOAD, rounds=1, on_run=lambda _: None, find_limits=find)
    own = {run.measure: run.tokens_per_second for run in runs if run.contender == LIMIT}
    assert list(own) == list(LOAD.measures)
    # 300 tokens: 2 * (400 * 300 + 600 + 500) + 4 * 64 * (300 * 301 / 2 + 16) operations
    assert own["prefill 300"] == pytest.approx(300 / (11804696 / 1e10), rel=1e-3)
    # a context of 30: 2 * (1500 + 4 * 2 * 32 * (30 + 16)) bytes
    assert own["decode x 4"] == pytest.approx(4 / (26552 / 1e9), rel=1e-3)


def test_without_peers_there_is_nothing_to_hold_against() -> None:
    report = bench_report(runs_of("stallfree", 998, 898, 58, 198), LOAD)
    assert "best other" not in report
    assert "1,000 [999..1,001]" in report


def test_the_picture_has_every_measure_and_contender() -> None:
    texts = set(texts_of(bench_picture(RUNS, LOAD, title="Speed & peers")))
    assert {"Speed & peers", *LOAD.measures, "stallfree", "slow", "quick"} <= texts


def test_a_figure_is_written_as_json() -> None:
    row = json.loads(json.dumps(run_row(RUNS[0])))
    assert row == {
        "kind": "figure", "contender": "stallfree", "round": 1, "measure": "prefill 300", "tokens_per_second": 999,
    }  # fmt: skip
