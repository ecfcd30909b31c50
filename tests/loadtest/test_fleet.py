"""How configurations are written, and which workers a fleet starts for them."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast, get_args

import httpx
import pytest

from stallfree_loadtest.cluster import ClusterSettings
from stallfree_loadtest.fleet import RULES, Configuration, Fleet, configuration
from stallfree_loadtest.peers import Peer
from stallfree_worker.settings import BatchingName

SERVICE = (sys.executable, str(Path(__file__).with_name("service_double.py")), "tells-it-is-idle")


@pytest.mark.parametrize(
    ("text", "rule", "budget", "target"),
    [
        ("orca", "orca", None, None),
        ("sarathi:256", "sarathi", "256", None),
        ("chunked_only:by-position", "chunked_only", "by-position", None),
        ("sarathi:auto", "sarathi", "auto", None),
        ("sarathi:auto@0.2", "sarathi", "auto", 0.2),
    ],
)
def test_a_configuration_is_a_rule_a_budget_and_a_target(
    text: str, rule: str, budget: str | None, target: float | None
) -> None:
    assert configuration(text) == Configuration(name=text, rule=rule, budget=budget, tbt_target_seconds=target)


@pytest.mark.parametrize(
    "text", ["", "fifo", "sarathi:0", "sarathi:many", "sarathi:-1", "sarathi:256@0.2", "sarathi:auto@0", "orca:auto@x"]
)
def test_a_configuration_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        configuration(text)


def test_every_rule_of_the_worker_can_be_measured() -> None:
    assert set(RULES) == set(get_args(BatchingName))


def peer_double(*words: str) -> Peer:
    """A stand-in for another server, named `other`."""
    command = shlex.join(SERVICE[:2])
    return Peer(name="other", command=f"{command} port={{port}} {' '.join(words)}", start_timeout_seconds=20)


@asynccontextmanager
async def fleet(*words: str, keeps_warm: bool = False) -> AsyncIterator[Fleet]:
    """Of stand-ins; `words` are for them."""
    service = (*SERVICE, *words)
    base = ClusterSettings(
        model="m", num_workers=1, worker_command=service, router_command=service, worker_args=("--shared=1",)
    )
    async with Fleet(base, tbt_target_seconds=0.3, keeps_warm=keeps_warm, report=lambda _: None) as made:
        yield made


async def worker_arguments(url: str) -> tuple[int, list[str]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        page = json.loads((await client.get(f"{url}/arguments")).text)
    return cast("int", page["pid"]), cast("list[str]", page["arguments"])


async def test_a_worker_is_started_with_what_its_configuration_says_and_can_stay_warm() -> None:
    async with fleet(keeps_warm=True) as made:
        async with made.serving(configuration("sarathi:auto@0.1")) as serving:
            first_pid, arguments = await worker_arguments(serving.worker_url)
        assert arguments[-4:] == ["--shared=1", "--batching=sarathi", "--token-budget=auto", "--tbt-target-seconds=0.1"]
        assert (serving.server.model, serving.max_model_len) == ("double", 1_000_000)
        async with made.serving(configuration("orca")) as other:
            other_pid, arguments = await worker_arguments(other.worker_url)
        assert arguments[-3:] == ["--shared=1", "--batching=orca", "--tbt-target-seconds=0.3"]
        async with made.serving(configuration("sarathi:auto@0.1")) as serving:
            again_pid, _ = await worker_arguments(serving.worker_url)
    assert first_pid == again_pid != other_pid


async def test_every_run_has_a_fresh_worker() -> None:
    pids = set()
    async with fleet() as made:
        for _ in range(2):
            async with made.serving(configuration("orca")) as serving:
                pid, _ = await worker_arguments(serving.worker_url)
                pids.add(pid)
    assert len(pids) == 2
