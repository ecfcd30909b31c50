"""`stallfree-loadtest stalls | ablation | follow` from their options to their files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from stallfree_loadtest.experiments import ABLATION_CONFIGURATIONS, STALLS_CONFIGURATIONS, long_tail
from stallfree_loadtest.fleet import RULES, configuration
from stallfree_loadtest.prompts import LongTail
from tests.loadtest.test_main import loadtest
from tests.loadtest.test_picture import texts_of
from tests.support.tiny_models import build_tiny_model


def test_the_stalls_of_every_rule_are_measured_unless_asked_otherwise() -> None:
    assert {configuration(name).rule for name in STALLS_CONFIGURATIONS} == set(RULES)
    budgets = {configuration(name).budget for name in STALLS_CONFIGURATIONS if name.startswith("sarathi")}
    assert budgets == {"128", "256", "512", "by-position"}  # and auto, for each target


def test_the_ablation_holds_mixing_alone_chunks_alone_and_both() -> None:
    assert {configuration(name).rule for name in ABLATION_CONFIGURATIONS} == {"orca", "chunked_only", "sarathi"}


def test_defect_9_the_lengths_that_are_asked_for_are_those_of_the_load() -> None:
    assert long_tail("432:1424:4096") == LongTail(median=432, p90=1424, most=4096)


@pytest.mark.parametrize("text", ["", "432", "432:1424", "1424:432:4096", "432:4096:1424", "0:1:2", "a:b:c", "1:1:1"])
def test_lengths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        long_tail(text)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("stalls", "--configurations", "orca,fifo"), "--configurations: 'fifo' is none of"),
        (("stalls", "--targets", "0.1,0"), "--targets"),
        (("stalls", "--out", "/does/not/exist"), "--out: [Errno 2]"),
        (("ablation", "--prompt-lengths", "5:4:3"), "--prompt-lengths"),
        (("bench", "--temperature", "-0.1"), "--temperature: must be a number from 0 up, and '-0.1' is not"),
        (("follow", "--table", "/does/not/exist"), "--table: [Errno 2]"),
    ],
)
async def test_a_wrong_option_is_status_2_and_is_named(arguments: tuple[str, ...], told: str) -> None:
    status, _, errors = await loadtest(*arguments)
    assert status == 2
    assert told in errors.splitlines()[-1]
    assert "Traceback" not in errors


async def test_an_empty_vocabulary_is_refused_before_anything_starts() -> None:
    status, out, errors = await loadtest("stalls", "--vocab-low", "9", "--vocab-high", "9")
    assert (status, out) == (1, "")
    assert "--vocab-high (9) must be above --vocab-low (9)" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("stalls", "--configurations", "vllm", "--peer", "vllm=serve {port}"),
        ("bench", "--peer", "other=serve {port}", "--peer", "other=serve {port}"),
    ],
)
async def test_two_contenders_of_one_name_are_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    status, out, errors = await loadtest(*arguments)
    assert (status, out) == (1, "")
    assert "have the same name" in errors


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """For a model whose steps take some milliseconds: streams of a smaller one are through before their client has
    noticed that they began."""
    model = build_tiny_model(tmp_path / "small", hidden_size=512, intermediate_size=1024, num_hidden_layers=16)
    return (
        "--model", str(model), "--dtype", "float32", "--kv-cache-memory", "512MiB", "--tbt-target", "0.5",
        "--vocab-low", "10", "--vocab-high", "300", "--out", str(tmp_path / "out"), "--table", str(tmp_path / "table"),
    )  # fmt: skip


@pytest.mark.slow
async def test_the_stalls_of_a_real_model_are_measured(options: tuple[str, ...], tmp_path: Path) -> None:
    status, _, errors = await loadtest(
        "stalls", *options, "--configurations", "faster_transformer,sarathi:64",
        "--targets", "0.5", "--rounds", "2", "--context-tokens", "32", "--stream-tokens", "400",
        "--long-tokens", "2000", "--seconds-before", "0.1", "--picture", str(tmp_path / "picture"), seconds=300,
    )  # fmt: skip
    assert (status, errors) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    names = ["faster_transformer", "sarathi:64", "sarathi:auto@0.5"]
    assert [row["contender"] for row in rows] == names * 2
    assert [row["streams_ended"] for row in rows] == [8, 0, 0] * 2
    assert all(name in (tmp_path / "table").read_text() for name in names)
    texts = texts_of((tmp_path / "picture").read_text())
    assert set(names) <= set(texts)
    assert any(text and "prompt is read: small," in text for text in texts)  # and not where it lies


@pytest.mark.slow
async def test_the_other_experiments_measure_a_real_model(options: tuple[str, ...], tmp_path: Path) -> None:
    status, _, errors = await loadtest(
        "ablation", *options, "--configurations", "orca,chunked_only:64,sarathi:64", "--requests", "10", "--rate", "10",
        "--prompt-lengths", "50:200:400", "--output-lengths", "10:20:40", seconds=300,
    )  # fmt: skip
    assert (status, errors) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(row["num_finished"], row["num_miscounted"]) for row in rows] == [(10, 0)] * 3

    status, _, errors = await loadtest(
        "follow", *options, "--many-streams", "6", "--long-context-streams", "2", "--long-context", "1000",
        "--trickle-tokens", "100", "--phase-seconds", "1", seconds=300,
    )  # fmt: skip
    assert (status, errors) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["kind"] for row in rows[:6]] == [*["phase"] * 5, "errors"]
    assert [row["num_streams"] for row in rows[:5]] == [2, 6, 4, 4, 4]
    assert rows[5]["num_steps"] > 50
