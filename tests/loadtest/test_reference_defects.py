"""Defects of the reference's load generator and harness; those of its engine: `tests/worker`."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stallfree_loadtest import arrivals
from tests.loadtest.scripted_server import serving
from tests.loadtest.test_main import answer, loadtest

MANY = 40_000


@pytest.mark.parametrize(
    "make",
    [
        lambda rate: arrivals.poisson(rate, seed=11),
        lambda rate: arrivals.gamma(rate, coefficient_of_variation=1.0, seed=11),
        lambda rate: arrivals.gamma(rate, coefficient_of_variation=2.0, seed=11),
    ],
    ids=["poisson", "gamma", "bursts"],
)
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_defect_8_offered_load_is_the_asked_one_because_no_gap_is_clipped(
    make: Callable[[float], Iterator[float]], rate: float
) -> None:
    """Clipped at three mean gaps, Poisson arrivals offer 5.2 % more than asked."""
    instants = list(itertools.islice(make(rate), MANY))
    assert MANY / instants[-1] == pytest.approx(rate, rel=0.025)
    gaps = [later - earlier for earlier, later in itertools.pairwise(instants)]
    clipped = statistics.fmean(min(gap, 3 / rate) for gap in gaps)
    assert statistics.fmean(gaps) > 1.03 * clipped, "there are gaps beyond three means"


@pytest.mark.parametrize(
    "options",
    [
        ("--arrivals", "poisson", "--rate", "400"),
        ("--arrivals", "gamma", "--rate", "400", "--burstiness", "1.5"),
        ("--arrivals", "fixed", "--rate", "400"),
        ("--trace", "FILE"),
        ("--rate", "400", "--prompt-mix", "3:0.5,5:0.5"),
    ],
    ids=lambda options: " ".join(options[:2]),
)
async def test_defect_9_every_generator_runs_against_one_server_and_against_several(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """In the reference, two length and trace generators read fields that do not exist, and adding up the figures of
    several replicas raised TypeError."""
    (tmp_path / "trace").write_text("".join(f"{number * 0.002}\n" for number in range(12)))
    options = tuple(str(tmp_path / "trace") if option == "FILE" else option for option in options)
    async with serving(answer) as one, serving(answer) as two, serving(answer) as three:
        for urls in ((one,), (one, two, three)):
            out = tmp_path / f"{len(urls)}.jsonl"
            servers = [part for url in urls for part in ("--url", url)]
            status, report, errors = await loadtest(
                "run", *servers, "--model", "m", "--requests", "12", "--output-tokens", "3", "--out", str(out), *options
            )
            assert (status, errors) == (0, "")
            assert "12 of 12 finished" in report
            summary = json.loads(out.read_text().splitlines()[-1])
            assert summary["ttft_seconds"]["count"] == 12
            assert summary["gaps"]["tbt_seconds"]["count"] == 12 * 2, (
                "no sample for first tokens, none lost in adding up"
            )


async def test_defect_9_help_names_no_file_or_service_that_the_load_test_needs_besides_the_server() -> None:
    status, text, _ = await loadtest("run", "--help")
    assert status == 0
    assert all(word not in text.lower() for word in (".yml", ".yaml", "wandb", "w&b"))
