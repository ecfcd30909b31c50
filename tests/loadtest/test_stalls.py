"""The stall experiment with stand-ins for the services, and its report from made-up gaps."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from stallfree_loadtest.contenders import Contender, OwnCluster
from stallfree_loadtest.fleet import Fleet, configuration
from stallfree_loadtest.live import RequestFailedError
from stallfree_loadtest.measures import Gap
from stallfree_loadtest.prompts import Vocabulary
from stallfree_loadtest.stalls import StallLoad, StallRun, run_stalls
from stallfree_loadtest.stalls_report import run_row, stalls_picture, stalls_report
from tests.loadtest.test_fleet import fleet, peer_double
from tests.loadtest.test_picture import texts_of

LOAD = StallLoad(
    num_streams=3,
    context_tokens=20,
    stream_tokens=2000,
    long_tokens=3000,
    seconds_before=0.2,
    patience_seconds=20.0,
    vocabulary=Vocabulary(),
    seed=0,
)


def ours(fleet: Fleet, name: str) -> OwnCluster:
    return OwnCluster(name=name, fleet=fleet, configuration=configuration(name))


async def test_every_round_measures_each_contender_once() -> None:
    told: list[StallRun] = []
    names = ["orca", "sarathi:256", "other"]
    async with fleet() as made:
        contenders: list[Contender] = [ours(made, "orca"), ours(made, "sarathi:256"), peer_double()]
        runs = await run_stalls(contenders, LOAD, rounds=2, on_run=told.append)
    assert runs == told
    assert [(run.round_number, run.contender) for run in runs] == [
        (number, name) for number in (1, 2) for name in names
    ]
    assert [run.configuration for run in runs[:3]] == [configuration("orca"), configuration("sarathi:256"), None]
    for run in runs:
        assert run.ttft_seconds is not None
        assert run.ttft_seconds >= 0.3  # what the stand-in takes for a long prompt
        assert len(run.before) > 10
        assert run.num_tokens_during == pytest.approx(len(run.during), abs=2 * LOAD.num_streams)
        assert run.num_tokens_during > 20
        assert run.num_streams_ended == 0


async def test_a_long_prompt_that_waits_for_the_streams_says_how_many_ended() -> None:
    load = dataclasses.replace(LOAD, stream_tokens=60, seconds_before=0.5)
    async with fleet() as made:
        (run,) = await run_stalls([ours(made, "orca")], load, rounds=1, on_run=lambda _: None)
    assert run.num_streams_ended == load.num_streams


async def test_patience_bounds_the_wait_for_the_first_token() -> None:
    load = dataclasses.replace(LOAD, patience_seconds=0.1)
    async with fleet() as made:
        (run,) = await run_stalls([ours(made, "orca")], load, rounds=1, on_run=lambda _: None)
    assert run.ttft_seconds is None
    assert run.num_tokens_during > 0


async def test_a_stream_that_breaks_ends_the_experiment_with_its_reason() -> None:
    async with fleet("breaks-streams") as made:
        with pytest.raises(RequestFailedError, match=r"failed after 21 tokens: .*the worker is gone"):
            await run_stalls([ours(made, "orca")], LOAD, rounds=1, on_run=lambda _: None)


def run_of(
    name: str, number: int, *, gap: float, ttft: float | None, ended: int = 0, is_peer: bool = False
) -> StallRun:
    return StallRun(
        contender=name,
        configuration=None if is_peer else configuration(name),
        round_number=number,
        before=(Gap(began_at=0.0, ended_at=0.04),),
        during=(Gap(began_at=1.0, ended_at=1.0 + gap), Gap(began_at=1.0, ended_at=1.0 + gap)),
        num_tokens_during=2,
        num_streams_ended=ended,
        ttft_seconds=ttft,
    )


RUNS = [
    *(run_of("faster_transformer", number, gap=0.05, ttft=None, ended=3) for number in (1, 2, 3)),
    *(run_of("orca", number, gap=4.0, ttft=4.0) for number in (1, 2, 3)),
    *(run_of("sarathi:128", number, gap=0.15, ttft=6.0) for number in (1, 2, 3)),
    *(run_of("sarathi:512", number, gap=0.6, ttft=4.2) for number in (1, 2, 3)),
    *(run_of("sarathi:auto@0.2", number, gap=0.17 + 0.01 * number, ttft=4.0 + number / 2) for number in (1, 2, 3)),
    *(run_of("sarathi:auto@0.1", number, gap=0.09 + 0.01 * number, ttft=8.0, ended=2) for number in (1, 2, 3)),
]


def test_the_report_gives_medians_with_their_spread() -> None:
    report = stalls_report(RUNS, LOAD, tbt_target_seconds=0.2)
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in report.splitlines()
        if (cells := line.split("|"))[1:]
    }
    assert rows["orca"] == ["40", "4,000", "4,000", "7.60", "2", "4.00"]
    assert rows["sarathi:auto@0.2"] == ["40", "190 [180..200]", "190 [180..200]", "0.00", "2", "5.00 [4.50..5.50]"]
    assert rows["faster_transformer"][-1] == ">20"


def test_the_report_holds_auto_against_its_target_and_the_alternatives() -> None:
    lines = stalls_report(RUNS, LOAD, tbt_target_seconds=0.2).splitlines()
    price = "TTFT 0.83 x sarathi:128, the best number that keeps it, 1.25 x unchunked"
    assert f"- sarathi:auto@0.2: target kept in every run; {price}" in lines
    assert "- sarathi:auto@0.1: target not kept: P99 up to 120 ms; TTFT 2.00 x unchunked" in lines
    assert any(line.startswith("faster_transformer admits nothing") for line in lines)
    assert any(line.startswith("Careful: with sarathi:auto@0.1, 2 streams ended") for line in lines)


def test_auto_is_held_against_the_peers_that_keep_its_target() -> None:
    peers = [
        run_of(name, 1, gap=gap, ttft=ttft, is_peer=True)
        for name, gap, ttft in (("slow", 0.1, 10.0), ("better", 0.19, 8.0), ("stalling", 0.3, 3.0))
    ]
    auto = run_of("sarathi:auto@0.2", 1, gap=0.2, ttft=4.0)
    lines = stalls_report([*peers, auto], LOAD, tbt_target_seconds=0.2).splitlines()
    price = "TTFT 0.50 x better, the best peer that keeps it"
    assert f"- sarathi:auto@0.2: target kept in every run; {price}" in lines


def test_the_picture_is_an_svg_with_every_configuration_in_it() -> None:
    svg = stalls_picture(RUNS, LOAD, tbt_target_seconds=0.2, title="Streams & a prompt")
    texts = texts_of(svg)
    assert texts[0] == "Streams & a prompt"
    assert {run.contender for run in RUNS} <= set(texts)
    assert {"0.1 s", "0.2 s", "beyond →"} <= set(texts)


def test_a_run_is_written_as_json() -> None:
    row = json.loads(json.dumps(run_row(RUNS[0], tbt_target_seconds=0.2)))
    assert (row["contender"], row["round"], row["ttft_seconds"]) == ("faster_transformer", 1, None)
    assert row["gap_seconds_during"] == pytest.approx([0.05, 0.05])
    assert math.isclose(row["during"]["tbt_seconds"]["p99"], 0.05)
