"""Real weights behind real processes: what a client reads is what transformers' own generate() gives, and what
a seed says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stallfree_loadtest.client import CompletionRequest, CompletionStream, Server
from stallfree_loadtest.cluster import ClusterSettings, LocalCluster
from tests.support.clusters import wait_idle, wait_usable
from tests.support.samples import scrape
from tests.support.tiny_models import build_tiny_model

NUM_TOKENS = 48
PROMPTS = ["The keeper of the light", "a", "Rain over the harbour, and the boats come in one by one. " * 4]


def _expected(folder: Path) -> list[tuple[list[int], str]]:
    """Greedy output tokens of each prompt, and their text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[tuple[list[int], str]] = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        new = [int(token_id) for token_id in output[0, ids.shape[1] :]]
        found.append((new, str(tokenizer.decode(new, skip_special_tokens=True))))
    return found


def _two_workers(folder: Path) -> ClusterSettings:
    return ClusterSettings(
        model=str(folder),
        num_workers=2,
        dtype="float32",
        worker_args=("--served-model-name=tiny", "--token-budget=16", "--kv-cache-memory=8MiB"),
        start_timeout_seconds=120.0,
    )


async def test_texts_through_the_router_are_those_of_generate(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "tiny", family="llama")
    async with LocalCluster(_two_workers(folder)) as cluster:
        server = Server(url=cluster.router_urls[0], model="tiny", silence_timeout_seconds=30.0)
        requests = [
            CompletionRequest(request_id=f"{number}-{copy}", prompt=prompt, max_tokens=NUM_TOKENS)
            for copy in range(3)
            for number, prompt in enumerate(PROMPTS)
        ]
        traces = await asyncio.gather(*(CompletionStream(server, request).run() for request in requests))
        await wait_idle(cluster)
    expected = _expected(folder)
    for number, trace in enumerate(traces):
        token_ids, text = expected[number % len(PROMPTS)]
        assert (trace.error, trace.finish_reason) == (None, "length")
        assert trace.completion_tokens == trace.num_tokens == len(token_ids)
        assert trace.text.rstrip("\ufffd") == text.rstrip(
            "\ufffd"
        )  # a character that is not whole at the end is held back


async def test_a44_a_seed_gives_the_same_answer_on_every_worker_and_without_one_answers_differ(tmp_path: Path) -> None:
    async with (
        LocalCluster(_two_workers(build_tiny_model(tmp_path / "tiny", family="llama"))) as cluster,
        httpx.AsyncClient(base_url=cluster.router_urls[0], trust_env=False, timeout=60) as client,
    ):

        async def draw(seed: int | None) -> tuple[int, ...]:
            fields = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0.8, "seed": seed}
            response = await client.post("/v1/completions", json={**fields, "return_token_ids": True})
            return tuple(response.json()["choices"][0]["token_ids"])

        async def have_all_served() -> bool:
            pages = [await scrape(worker.url) for worker in cluster.workers]
            return min(page.total("stallfree_worker_requests_total") for page in pages) > 0

        await wait_usable(cluster)
        seeds = [1] * 8 + [0] * 4 + [2] + [None] * 3
        answers = await asyncio.gather(*map(draw, seeds))
        repeated = {answers[0]}
        async with asyncio.timeout(60):
            while not await have_all_served():
                repeated.update(await asyncio.gather(*map(draw, [1] * 16)))
        await wait_idle(cluster)
    assert len(set(answers[:8]) | repeated) == 1
    assert len(set(answers[8:12])) == 1
    assert len(set(answers)) == 6  # of seed 1, 0 and 2, and three without
