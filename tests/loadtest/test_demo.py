"""The demo from its start to its result, with stand-ins for the services. The real ones are tried in tests/e2e."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from stallfree_loadtest.cluster import ClusterError, ClusterSettings
from stallfree_loadtest.demo import DemoError, DemoSettings, run_demo
from stallfree_loadtest.demo_report import demo_report
from tests.loadtest.test_cluster import DOUBLE

SERVICE = (sys.executable, str(Path(__file__).with_name("service_double.py")))


def settings_for(tmp_path: Path, *, service: tuple[str, ...] = SERVICE) -> DemoSettings:
    cluster = ClusterSettings(model="m", worker_command=service, router_command=service, log_dir=tmp_path)
    return DemoSettings(
        cluster=cluster,
        num_streams=3,
        long_tokens=4000,
        tbt_target_seconds=0.2,
        seconds_before=0.3,
        seconds_after=0.3,
        timeout_seconds=20.0,
    )


async def test_the_demo_measures_streams_around_the_long_prompt(tmp_path: Path) -> None:
    lines: list[str] = []
    settings = settings_for(tmp_path)
    result = await run_demo(settings, say=lines.append)
    assert [stream.outcome for stream in result.streams] == ["dropped"] * 3
    assert result.long.outcome == "finished"
    assert result.long.prompt_tokens == pytest.approx(4000, rel=0.02)
    assert all(len(part) > 10 for part in (result.windows.before, result.windows.during, result.windows.after))
    assert [(share.name, share.num_streams) for share in result.workers] == [("worker-1", 4), ("worker-2", 4)]
    assert list(result.phase_seconds)[-1] == "stop of the cluster"
    assert any("long prompt" in line for line in lines)
    assert any("stopping everything" in line for line in lines)
    assert "during its prefill" in demo_report(result, settings)


async def test_a_stream_that_breaks_fails_the_demo_with_the_reason(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, service=(*SERVICE, "breaks-streams"))
    with pytest.raises(DemoError, match=r"stream-\d failed after 21 tokens: .*the worker is gone") as caught:
        await run_demo(settings, say=list[str]().append)
    assert str(caught.value).endswith(f"all logs are in {tmp_path}")  # and no log of a part that is well


async def test_streams_of_a_fast_model_last_to_the_end_of_the_demo(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, service=(*SERVICE, "hurries"))
    result = await run_demo(settings, say=list[str]().append)
    assert [stream.outcome for stream in result.streams] == ["dropped"] * 3
    assert max(stream.num_tokens for stream in result.streams) > 2000


async def test_a_demo_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    settings = dataclasses.replace(settings_for(tmp_path), seconds_before=60.0, timeout_seconds=1.0)
    with pytest.raises(DemoError, match="not done within 1 s"):
        await run_demo(settings, say=list[str]().append)


async def test_a_cluster_that_does_not_start_fails_the_demo(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, service=(*DOUBLE, "dies-at-start"))
    with pytest.raises(ClusterError, match="the disk is full"):
        await run_demo(settings, say=list[str]().append)
