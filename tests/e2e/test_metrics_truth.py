"""/metrics says what the clients saw: TTFT, TBT and stall against stamps taken at the socket."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from stallfree_loadtest.measures import gaps, summarize_gaps, time_to_first_token
from tests.support.clusters import script, scripted_cluster, stream, wait_idle
from tests.support.samples import Samples, scrape
from tests.support.scripted import SLOW

TBT_TARGET_SECONDS = 0.05
LONG_STALL_SECONDS = 0.25
"""Of the two kinds: those of a slow step last nearly twice as long, any other only some milliseconds."""
NUM_STREAMS = 40


def _assert_agree(samples: Samples, name: str, seen: list[float]) -> None:
    """Same count; and the median and what few gaps or requests exceed lie within 10 % of the same bucket."""
    assert samples.buckets(name)[-1][1] == len(seen)
    for ratio in (0.5, 0.997):
        exact = sorted(seen)[math.ceil(ratio * len(seen)) - 1]
        low, high = samples.quantile_bounds(name, ratio)
        assert 0.9 * low < exact <= 1.1 * high, f"P{100 * ratio:g} of {name}"


async def test_ttft_tbt_and_stall_agree_with_the_clients_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 20 ms and now and then half a second more, which is a stall of every stream that runs then: so long
    that what this machine adds between server and client is little beside it."""
    monkeypatch.setenv("SCRIPTED_STEP_SECONDS", "0.02")
    monkeypatch.setenv("SCRIPTED_SLOW_SECONDS", "0.5")
    arguments = (f"--tbt-target-seconds={TBT_TARGET_SECONDS}", "--max-num-seqs=8", "--token-budget=64")
    async with scripted_cluster(num_workers=1, worker_args=arguments) as cluster:
        rng = random.Random(3)
        prompts = [script("w" * rng.randint(20, 60)) for _ in range(NUM_STREAMS)]
        prompts[10] = (*prompts[10][:15], SLOW, *prompts[10][15:])
        prompts[25] = (*prompts[25][:10], SLOW, *prompts[25][10:])
        completions = [stream(cluster, prompt, request_id=str(number)) for number, prompt in enumerate(prompts)]
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(completion.run()) for completion in completions]
        traces = [task.result() for task in running]
        assert {trace.outcome for trace in traces} == {"finished"}
        await wait_idle(cluster)
        router, worker = await scrape(cluster.router_urls[0]), await scrape(cluster.workers[0].url)

    found = [gap for trace in traces for gap in gaps(trace)]
    seconds = [gap.seconds for gap in found]
    num_tokens = sum(trace.completion_tokens or 0 for trace in traces)
    assert len(seconds) == num_tokens - NUM_STREAMS
    first_tokens = [ttft for trace in traces if (ttft := time_to_first_token(trace)) is not None]
    stalls = summarize_gaps(found, tbt_target_seconds=TBT_TARGET_SECONDS)
    for service, samples in (("router", router), ("worker", worker)):
        prefix = f"stallfree_{service}"
        _assert_agree(samples, f"{prefix}_time_between_tokens_seconds", seconds)
        _assert_agree(samples, f"{prefix}_time_to_first_token_seconds", first_tokens)
        assert samples.total(f"{prefix}_stalled_seconds_total") == pytest.approx(stalls.stall_seconds, rel=0.10)
        assert samples.total(f"{prefix}_stall_seconds_sum") == pytest.approx(stalls.stall_seconds, rel=0.10)
        assert samples.total(f"{prefix}_generated_tokens_total") == num_tokens
        assert samples.total(f"{prefix}_prompt_tokens_total") == sum(len(prompt) for prompt in prompts)
    # The machine itself makes short ones now and then, here and there. A long one is whoever's was late for longest.
    num_long = sum(gap.seconds - TBT_TARGET_SECONDS > LONG_STALL_SECONDS for gap in found)
    assert num_long > 5
    assert _num_long(router) == num_long
    assert _num_long(router, cause="worker") >= 0.9 * num_long


def _num_long(samples: Samples, **labels: str) -> float:
    bounds = dict(samples.buckets("stallfree_router_stall_seconds", **labels))
    return bounds[math.inf] - bounds[LONG_STALL_SECONDS]
