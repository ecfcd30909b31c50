"""B32: what many requests leave behind in the memory of router, worker and engine, read from outside."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stallfree_loadtest.cluster import LocalCluster
from tests.support.clusters import SCRIPTED, scripted_cluster, wait_idle
from tests.support.raw_http import RawConnection, request_bytes
from tests.support.samples import scrape
from tests.support.scripted import FAIL_ROW

PATH = "/v1/completions"
NUM_BETWEEN_LOOKS = 2_000
NUM_LOOKS = 5
"""The last ones, through which the line is laid."""
MAX_REQUESTS = 50_000
NUM_AT_ONCE = 16
MAX_BYTES_PER_REQUEST = 50.0


async def _send_one(connection: RawConnection, number: int) -> bool:
    """One request of a kind that the number chooses; False where the connection was left in the midst of an answer."""
    headers = f"X-Request-Id: request-{number}\r\n"
    kind = number % 10
    is_left = kind == 0
    fields, status = _KINDS[kind]
    await connection.send(request_bytes(PATH, {"model": SCRIPTED, "user": f"u{number}", **fields}, headers=headers))
    if is_left:
        await connection.read_until(b"data:")
        return False
    head, body = await connection.read_response()
    assert head.split()[1] == status, (head, body)
    return True


_Kind = tuple[Mapping[str, object], bytes]
"""Fields of the body, and the status of the answer."""
_PLAIN: _Kind = ({"prompt": "AB"}, b"200")
_STREAMED: _Kind = ({"prompt": "AB", "stream": True}, b"200")
_LEFT: _Kind = ({"prompt": "A" * 400, "stream": True, "max_tokens": 400}, b"200")
_INVALID: _Kind = ({"prompt": "A", "temperature": -1}, b"400")
_FAILED: _Kind = ({"prompt": [72, FAIL_ROW]}, b"500")
_KINDS = (
    _LEFT, _PLAIN, _STREAMED, _INVALID, _PLAIN, _FAILED, _STREAMED, _PLAIN, _INVALID, _STREAMED,
)  # fmt: skip


async def _send(port: int, count: int, serial: itertools.count[int]) -> None:
    left = iter(range(count))

    async def send_some() -> None:
        while True:
            async with RawConnection.open(port) as connection:
                for _ in left:
                    if not await _send_one(connection, next(serial)):
                        break
                else:
                    return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_AT_ONCE):
            tasks.create_task(send_some())


def _processes(cluster: LocalCluster) -> dict[str, int]:
    """Name → process id, of all that serve: the parts, and what they started."""
    found: dict[str, int] = {}
    for part in (*cluster.workers, *cluster.routers):
        found[part.name] = part.pid
        children = Path(f"/proc/{part.pid}/task/{part.pid}/children").read_text().split()
        found.update({f"{part.name}'s child {number}": int(pid) for number, pid in enumerate(children)})
    return found


def _memory_bytes(pid: int) -> int:
    """What is in memory and nobody else's."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))


def _bytes_per_request(sizes: Sequence[int]) -> float:
    """The median slope of all pairs of looks: one jump, up or down, does not decide."""
    pairs = itertools.combinations(enumerate(sizes), 2)
    return statistics.median((later - earlier) / (b - a) for (a, earlier), (b, later) in pairs) / NUM_BETWEEN_LOOKS


@pytest.mark.slow
async def test_b32_memory_does_not_grow_with_the_number_of_requests() -> None:
    """Plain, streamed, aborted, invalid and failed requests. Memory may grow at first, until all that is bounded is
    full; then it must stand still, in every process at once."""
    serial = itertools.count()
    async with scripted_cluster(num_workers=1) as cluster:
        port = int(cluster.router_urls[0].rpartition(":")[2])
        await _send(port, NUM_BETWEEN_LOOKS, serial)
        pids = _processes(cluster)
        assert len(pids) == 3, "a router, a worker, its engine"
        looks: dict[str, list[int]] = {name: [] for name in pids}
        slopes = dict.fromkeys(pids, float("inf"))
        for _ in range(MAX_REQUESTS // NUM_BETWEEN_LOOKS):
            await _send(port, NUM_BETWEEN_LOOKS, serial)
            await wait_idle(cluster)
            for name, pid in pids.items():
                looks[name].append(_memory_bytes(pid))
                if len(looks[name]) >= NUM_LOOKS:
                    slopes[name] = _bytes_per_request(looks[name][-NUM_LOOKS:])
            if max(slopes.values()) < MAX_BYTES_PER_REQUEST:
                break
        told = json.dumps({"bytes per request": slopes, "bytes after each 2,000 requests": looks})
        assert max(slopes.values()) < MAX_BYTES_PER_REQUEST, told
        assert len((await scrape(cluster.router_urls[0])).names()) < 500, "series do not come with users or requests"
