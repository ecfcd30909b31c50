"""The cluster of processes, with small stand-ins for its services and the real embedded store."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from stallfree_loadtest.cluster import ClusterError, ClusterSettings, LocalCluster, Part
from stallfree_loadtest.process import child_pids
from tests.support.waiting import wait_until

DOUBLE = (sys.executable, str(Path(__file__).with_name("part_double.py")))


def settings_for(*, worker: tuple[str, ...] = (), router: tuple[str, ...] = (), **more: Any) -> ClusterSettings:
    return ClusterSettings(
        model="m",
        worker_command=(*DOUBLE, *worker),
        router_command=(*DOUBLE, *router),
        **{"start_timeout_seconds": 20.0, **more},
    )


def exists(pid: int) -> bool:
    """Whether the process is there and not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def arguments_of(part: Part) -> list[str]:
    found = httpx.get(f"{part.url}/arguments", trust_env=False).json()["arguments"]
    assert isinstance(found, list)
    return found


async def is_ready(part: Part) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{part.url}/readyz")).status_code == httpx.codes.OK


async def ping(url: str) -> bool:
    async with redis.asyncio.from_url(url) as client:
        return bool(await client.ping())


async def test_a_cluster_starts_all_parts_and_stops_all_parts() -> None:
    async with LocalCluster(settings_for(num_routers=2)) as cluster:
        pids = [part.pid for part in cluster.parts]
        assert [part.name for part in cluster.parts] == ["store", "worker-1", "worker-2", "router-1", "router-2"]
        assert await ping(cluster.store_url)
        for part in (*cluster.workers, *cluster.routers):
            assert await is_ready(part)
        assert all(exists(pid) for pid in pids)
    assert not any(exists(pid) for pid in pids)


async def test_routers_are_told_the_workers_and_the_store() -> None:
    async with LocalCluster(settings_for(router_args=("--api-key", "k"))) as cluster:
        told = arguments_of(cluster.routers[0])
        assert told[told.index("--worker-urls") + 1] == ",".join(worker.url for worker in cluster.workers)
        assert told[told.index("--redis-url") + 1] == cluster.store_url
        assert told[-2:] == ["--api-key", "k"]


async def test_workers_share_the_cores_unless_told_otherwise() -> None:
    async with LocalCluster(settings_for(redis_url="redis://127.0.0.1:1/0")) as cluster:
        told = arguments_of(cluster.workers[0])
        assert told[told.index("--threads") + 1] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert told[told.index("--model") + 1] == "m"
        assert "--dtype" not in told
    settings = settings_for(worker_args=("--threads=3",), redis_url="redis://127.0.0.1:1/0", dtype="float32")
    async with LocalCluster(settings) as cluster:
        told = arguments_of(cluster.workers[0])
        assert "--threads" not in told
        assert told[told.index("--dtype") + 1] == "float32"


async def test_a_given_store_is_neither_started_nor_stopped() -> None:
    async with LocalCluster(settings_for(redis_url="redis://127.0.0.1:1/0")) as cluster:
        assert cluster.store is None
        assert cluster.store_url == "redis://127.0.0.1:1/0"
        assert [part.role for part in cluster.parts] == ["worker", "worker", "router"]


async def test_a_part_that_dies_at_start_fails_the_start_with_the_tail_of_its_log(tmp_path: Path) -> None:
    cluster = LocalCluster(settings_for(router=("dies-at-start",), log_dir=tmp_path))
    with pytest.raises(ClusterError, match=r"router-1 .* exited with status 3; .*\n(.*\n)*the disk is full"):
        await cluster.__aenter__()
    assert not any(part.is_running for part in cluster.parts)


async def test_a_part_that_never_gets_ready_fails_the_start_in_bounded_time(tmp_path: Path) -> None:
    cluster = LocalCluster(settings_for(worker=("never-ready",), start_timeout_seconds=1.0, log_dir=tmp_path))
    with pytest.raises(ClusterError, match=r"not ready within 1 s: worker-1 .* still runs; .*\n.*listening"):
        await cluster.__aenter__()
    assert not any(part.is_running for part in cluster.parts)


async def test_a_part_that_ignores_sigterm_is_killed() -> None:
    lines: list[str] = []
    settings = settings_for(worker=("ignores-sigterm",), stop_timeout_seconds=0.3)
    async with LocalCluster(settings, report=lines.append) as cluster:
        pids = [part.pid for part in cluster.parts]
    assert not any(exists(pid) for pid in pids)
    assert "worker-1, worker-2 did not leave within 0.3 s: killed" in lines


async def test_what_a_part_has_started_is_stopped_with_it() -> None:
    async with LocalCluster(settings_for(worker=("has-child",))) as cluster:
        worker = cluster.workers[0]
        await wait_until(lambda: len(child_pids(worker.pid)) == 1)
        engine_pid = worker.engine_pid
        assert engine_pid in child_pids(worker.pid)
    assert engine_pid is not None
    await wait_until(lambda: not exists(engine_pid))


async def test_a_killed_worker_comes_back_on_its_port() -> None:
    async with LocalCluster(settings_for(redis_url="redis://127.0.0.1:1/0")) as cluster:
        worker = cluster.workers[0]
        url, pid = worker.url, worker.pid
        cluster.kill(worker, signal.SIGKILL)
        assert await worker.wait_ended() == -signal.SIGKILL
        await cluster.start(worker)
        assert worker.url == url
        assert worker.pid != pid
        assert await is_ready(worker)


async def test_a_stopped_part_exits_with_its_own_status() -> None:
    async with LocalCluster(settings_for(redis_url="redis://127.0.0.1:1/0")) as cluster:
        assert await cluster.stop(cluster.routers[0]) == 0
        assert not cluster.routers[0].is_running
        with pytest.raises(ClusterError, match="runs already"):
            await cluster.start(cluster.workers[0])


async def test_the_store_comes_back_on_its_port() -> None:
    async with LocalCluster(settings_for()) as cluster:
        assert cluster.store is not None
        url = cluster.store_url
        cluster.kill(cluster.store)
        await cluster.store.wait_ended()
        await cluster.start(cluster.store)
        assert cluster.store_url == url
        assert await ping(url)


async def test_temporary_logs_are_removed_after_a_clean_stop_only() -> None:
    async with LocalCluster(settings_for(redis_url="redis://127.0.0.1:1/0")) as cluster:
        assert {path.name for path in cluster.log_dir.iterdir()} == {"worker-1.log", "worker-2.log", "router-1.log"}
    assert not cluster.log_dir.exists()
    cluster = LocalCluster(settings_for(redis_url="redis://127.0.0.1:1/0", worker=("dies-at-start",)))
    with pytest.raises(ClusterError):
        await cluster.__aenter__()
    assert (cluster.log_dir / "worker-1.log").exists()
    shutil.rmtree(cluster.log_dir)


async def test_describe_tells_every_process_and_url() -> None:
    async with LocalCluster(settings_for(num_workers=1)) as cluster:
        assert cluster.store is not None
        assert cluster.describe() == {
            "log_dir": str(cluster.log_dir),
            "store": {"url": cluster.store_url, "pid": cluster.store.pid},
            "workers": [
                {
                    "name": "worker-1",
                    "url": cluster.workers[0].url,
                    "pid": cluster.workers[0].pid,
                    "engine_pid": None,
                    "log": str(cluster.log_dir / "worker-1.log"),
                }
            ],
            "routers": [
                {
                    "name": "router-1",
                    "url": cluster.routers[0].url,
                    "pid": cluster.routers[0].pid,
                    "log": str(cluster.log_dir / "router-1.log"),
                }
            ],
        }
