"""The open loop sends when a request is due, whatever has come of those before."""

from __future__ import annotations

import asyncio
import itertools

from stallfree_loadtest.client import Server
from stallfree_loadtest.measures import RequestTrace
from stallfree_loadtest.open_loop import PromptLength, Workload, run_open_loop
from stallfree_loadtest.prompts import Vocabulary
from tests.loadtest.scripted_server import END, HEAD, Connection, serving, token_event

WORKLOAD = Workload(prompts=(PromptLength(num_tokens=4, weight=1.0),), output_tokens=1)


async def test_requests_are_sent_without_waiting_for_answers() -> None:
    num_waiting, all_are_there = itertools.count(1), asyncio.Event()

    async def script(connection: Connection) -> None:
        if next(num_waiting) == 5:  # none is answered before the last one is sent
            all_are_there.set()
        await all_are_there.wait()
        await connection.send(HEAD)
        await connection.send_events(token_event("a", 1), "[DONE]")
        await connection.send(END)

    ended: list[RequestTrace] = []
    async with serving(script) as url, asyncio.timeout(10):
        traces = await run_open_loop(
            [Server(url=url, model="m")],
            arrivals=iter([0.0, 0.01, 0.02, 0.02, 0.03]),
            requests=WORKLOAD.requests(),
            on_end=ended.append,
        )
    assert [trace.outcome for trace in traces] == ["finished"] * 5
    assert len(ended) == 5
    assert all(trace.sent_at >= trace.due_at for trace in traces)
    assert [round(trace.due_at - traces[0].due_at, 6) for trace in traces] == [0.0, 0.01, 0.02, 0.02, 0.03]


async def test_servers_take_turns() -> None:
    counts = {"a": 0, "b": 0}

    async def answer(connection: Connection) -> None:
        counts[str(connection.body["model"])] += 1
        await connection.send(HEAD)
        await connection.send_events("[DONE]")
        await connection.send(END)

    async with serving(answer) as one, serving(answer) as two:
        servers = [Server(url=one, model="a"), Server(url=two, model="b")]
        await run_open_loop(servers, arrivals=iter([0.0] * 6), requests=WORKLOAD.requests())
    assert counts == {"a": 3, "b": 3}


def test_a_workload_is_repeated_by_its_seed_and_never_repeats_a_prompt() -> None:
    mix = (PromptLength(num_tokens=3, weight=0.5), PromptLength(num_tokens=9, weight=0.5))
    one, two, other = (
        list(itertools.islice(Workload(prompts=mix, output_tokens=2, seed=seed).requests(), 40)) for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other
    assert {len(request.prompt) for request in one} == {3, 9}
    assert len({request.prompt for request in one}) == 40


def test_prompts_stay_within_the_vocabulary_that_is_asked_for() -> None:
    workload = Workload(
        prompts=(PromptLength(num_tokens=500, weight=1.0),), output_tokens=1, vocabulary=Vocabulary(low=7, high=9)
    )
    assert set(next(workload.requests()).prompt) == {7, 8}
