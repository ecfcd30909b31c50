"""Greedy tokens in float32 against `generate()` of the transformers library, on the same weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.kv_layout import KVLayout
from stallfree_worker.engine.step import Runner
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.settings import BatchingName
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE
from tests.worker.model.engine_driver import WHOLE, EngineDriver, SmallPool

NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 16, 33, 129, 300)
Generate = Callable[[Sequence[int]], list[int]]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(7, VOCAB_SIZE), k=length)


PROMPTS = [make_prompt(length) for length in PROMPT_LENGTHS]


class Reference:
    """The library's own model."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None

    def generate(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        return list(out[0, len(prompt) :].tolist())

    def follows_greedily(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether every token of `output` is the likeliest after what came before: one pass, no cache."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *output]])).logits[0]
        return bool(logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(output))


@pytest.fixture(scope="module")
def reference(tiny_folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    loaded: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        return loaded.setdefault(family, Reference(tiny_folder(family))) if family not in loaded else loaded[family]

    return get


@pytest.fixture(scope="module")
def expected(reference: Callable[[str], Reference]) -> Callable[[str], list[list[int]]]:
    outputs: dict[str, list[list[int]]] = {}

    def get(family: str) -> list[list[int]]:
        if family not in outputs:
            outputs[family] = [reference(family).generate(prompt) for prompt in PROMPTS]
        return outputs[family]

    return get


BUDGETS = (1, 7, 16, 64, WHOLE)
POOLS = ("roomy", "tight")
TELLING = {*itertools.product(FAMILIES, (7,), ("tight",)), *itertools.product(("gemma3",), (16,), POOLS)}
"""What every run tries; the marker `slow` brings the rest. A tight pool has both whole prefills, in its first step, and
chunked ones, where preempted requests are computed anew."""
TELLING_ALONE = {(family, 7, "tight") for family in ("llama", "mistral", "qwen2-sliding", "gemma3")}
"""One of each kind of attention: ropes and biases are tried in a batch."""


def whole_matrix(telling: Collection[tuple[str, int, str]]) -> list[object]:
    return [
        case if case in telling else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(FAMILIES, BUDGETS, POOLS)
    ]


RULES: tuple[BatchingName, ...] = ("sarathi", "orca", "vllm", "faster_transformer", "chunked_only")
TELLING_RULES = {("gemma3", "sarathi", "tight"), *itertools.product(("gemma3",), RULES, ("roomy",))}
LONGEST_FIRST = (4, 0, 1, 2, 3)
"""The others are admitted beside it, and have to go when it grows."""
NEIGHBOUR = 2
"""Which of the prompts runs beside the others, one at a time, to squeeze them out of a tight pool."""


def blocks_of(runner: Runner, num_tokens: int) -> int:
    """What a request needs at most, with chunks as short as a window."""
    return KVLayout(runner.kv_groups, block_size=16, largest_chunk_tokens=32).blocks_of_request(num_tokens)


def tight_blocks(runner: Runner, *, num_spare: int = 4) -> int:
    """Enough for the longest of `PROMPTS` with its output, and for little beside it."""
    return blocks_of(runner, max(PROMPT_LENGTHS) + NUM_TOKENS) + num_spare


def grows_for_ever(runner: Runner) -> bool:
    """Whether requests need ever more memory: not where all layers have a window."""
    return any(group.window_tokens is None for group in runner.kv_groups)


def driver_of(runner: Runner, budget: int, num_blocks: int | None = None, *, overlaps: bool = False) -> EngineDriver:
    """In a tight pool the first step has a budget that admits all who fit: with a budget of 1 no two requests would
    ever run at once, and so none would be preempted."""
    if num_blocks is None:
        return EngineDriver(runner, token_budget=budget, overlaps=overlaps)
    pool = SmallPool(runner=runner, num_blocks=num_blocks)
    return EngineDriver(pool, token_budget=budget, first_budget=WHOLE, overlaps=overlaps)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("family", "budget", "pool"), whole_matrix(TELLING))
def test_b10_b12_prompts_in_one_hybrid_batch_give_the_tokens_of_generate(
    family: str,
    budget: int,
    pool: str,
    tiny_model: Callable[[str], LoadedModel],
    expected: Callable[[str], list[list[int]]],
    *,
    overlaps: bool,
) -> None:
    runner = tiny_model(family).runner
    driver = driver_of(runner, budget, tight_blocks(runner) if pool == "tight" else None, overlaps=overlaps)
    outputs = driver.generate([PROMPTS[index] for index in LONGEST_FIRST], num_tokens=NUM_TOKENS)
    assert outputs == [expected(family)[index] for index in LONGEST_FIRST]
    assert (driver.num_preemptions > 0) == (pool == "tight") or not grows_for_ever(runner)


@pytest.mark.parametrize(("family", "budget", "pool"), whole_matrix(TELLING_ALONE))
def test_b10_b12_each_prompt_alone_gives_the_tokens_of_generate(
    family: str,
    budget: int,
    pool: str,
    tiny_model: Callable[[str], LoadedModel],
    expected: Callable[[str], list[list[int]]],
) -> None:
    """Nobody is preempted who is alone, so in the tight pool an older request runs beside each."""
    runner, wanted = tiny_model(family).runner, expected(family)
    num_preemptions = 0
    for prompt, output in zip(PROMPTS, wanted, strict=True):
        if pool == "roomy":
            assert driver_of(runner, budget).generate([prompt], num_tokens=NUM_TOKENS) == [output]
            continue
        pair = [PROMPTS[NEIGHBOUR], prompt]
        to_start = sum(blocks_of(runner, len(one)) for one in pair) + 1
        to_end_alone = max(blocks_of(runner, len(one) + NUM_TOKENS) for one in pair)
        driver = driver_of(runner, budget, max(to_start, to_end_alone))
        outputs = driver.generate(pair, num_tokens=NUM_TOKENS)
        assert outputs == [wanted[NEIGHBOUR], output]
        num_preemptions += driver.num_preemptions
    assert (num_preemptions > 0) == (pool == "tight") or not grows_for_ever(runner)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_b05_preempted_seeded_requests_draw_what_they_draw_alone(
    family: str, tiny_model: Callable[[str], LoadedModel]
) -> None:
    runner = tiny_model(family).runner
    prompts = [PROMPTS[index] for index in LONGEST_FIRST]
    sampling = [SamplingParams(max_tokens=1, top_p=0.9, seed=index) for index in LONGEST_FIRST]
    tight = driver_of(runner, 48, tight_blocks(runner))
    together = tight.generate(prompts, num_tokens=NUM_TOKENS, sampling=sampling)
    assert tight.num_preemptions > 0
    assert together == [
        EngineDriver(runner).generate([prompt], num_tokens=NUM_TOKENS, sampling=[params])[0]
        for prompt, params in zip(prompts, sampling, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_do_not_repeat_themselves(family: str, expected: Callable[[str], list[list[int]]]) -> None:
    assert all(len(set(output)) > NUM_TOKENS // 4 for output in expected(family))


B07_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192, 193)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
def test_b07_lengths_around_block_and_chunk_borders(
    family: str, tiny_model: Callable[[str], LoadedModel], reference: Callable[[str], Reference]
) -> None:
    """Each pair twice: computed, then from the cache, whose full blocks end at every place that a prompt can."""
    prompts = [make_prompt(length, seed=3) for length in B07_LENGTHS]
    driver = EngineDriver(tiny_model(family).runner, token_budget=64)
    for pair in zip(prompts, reversed(prompts), strict=True):
        outputs = driver.generate(pair, num_tokens=17)
        for prompt, output in zip(pair, outputs, strict=True):
            assert reference(family).follows_greedily(prompt, output), len(prompt)
        assert driver.generate(pair, num_tokens=17) == outputs
    assert driver.num_cached_tokens > sum(B07_LENGTHS)


@pytest.mark.parametrize("family", ["mistral", "qwen2-sliding", "gemma3"])
@pytest.mark.parametrize("budget", [32, 64, 128])
def test_b12_two_hundred_tokens_past_the_window_stay_right(
    family: str,
    budget: int,
    tiny_model: Callable[[str], LoadedModel],
    reference: Callable[[str], Reference],
) -> None:
    prompts = [make_prompt(length, seed=4) for length in (25, 31, 32, 33, 50, 75)]
    driver = EngineDriver(tiny_model(family).runner, token_budget=budget)
    outputs = driver.generate(prompts, num_tokens=200)
    assert all(map(reference(family).follows_greedily, prompts, outputs))
    talks = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    answers = driver.generate(talks, num_tokens=20)
    assert all(map(reference(family).follows_greedily, talks, answers))
    assert driver.num_cached_tokens >= sum(len(talk) - 16 for talk in talks), "outputs are not found again"


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("family", "rule", "pool"),
    [
        pytest.param(*case, marks=() if case in TELLING_RULES else pytest.mark.slow)
        for case in itertools.product(("llama", "mistral", "qwen2-sliding", "gemma3"), RULES, POOLS)
    ],
)
def test_every_batching_rule_gives_the_tokens_of_generate_computed_and_cached(
    family: str,
    rule: BatchingName,
    pool: str,
    tiny_model: Callable[[str], LoadedModel],
    reference: Callable[[str], Reference],
    expected: Callable[[str], list[list[int]]],
    *,
    overlaps: bool,
) -> None:
    """Prompts that are new, repeated, and half repeated, with room for all and with room for few."""
    runner = tiny_model(family).runner
    if pool == "tight":
        runner = SmallPool(runner=runner, num_blocks=small_pool_of(runner, family, rule))
    driver = EngineDriver(runner, token_budget=48, batching=rule, overlaps=overlaps)
    assert driver.generate(PROMPTS, num_tokens=NUM_TOKENS) == expected(family)
    halves = [[*prompt[: len(prompt) // 2], *make_prompt(20, seed=8)] for prompt in PROMPTS]
    outputs = driver.generate([*halves, *PROMPTS], num_tokens=NUM_TOKENS)
    assert all(map(reference(family).follows_greedily, halves, outputs))
    assert outputs[len(halves) :] == expected(family)
    assert driver.num_cached_tokens > 0 or pool == "tight"
    if pool == "tight" and rule in {"sarathi", "chunked_only"} and grows_for_ever(runner):
        assert driver.num_preemptions > 0


def small_pool_of(runner: Runner, family: str, rule: BatchingName) -> int:
    """Where prompts are whole chunks, a window and a whole prompt must fit at once."""
    if rule in {"sarathi", "chunked_only"}:
        return tight_blocks(runner, num_spare=4 if family == "qwen2-sliding" else 2)
    return len(runner.kv_groups) * (-(-(max(PROMPT_LENGTHS) + NUM_TOKENS) // 16) + 5)


@pytest.mark.parametrize(
    ("family", "pool"),
    [
        pytest.param(*case, marks=() if case == ("gemma3", "tight") else pytest.mark.slow)
        for case in itertools.product(("llama", "mistral", "gemma3"), POOLS)
    ],
)
def test_b37_siblings_of_one_prompt_draw_what_each_draws_alone(
    family: str, pool: str, tiny_model: Callable[[str], LoadedModel]
) -> None:
    runner = tiny_model(family).runner
    sampling = [SamplingParams(max_tokens=1, top_p=0.9, seed=seed) for seed in range(4)]
    for length in (15, 16, 17, 31):
        prompt = make_prompt(length, seed=5)
        num_blocks = blocks_of(runner, length + 32) + 4 if pool == "tight" else None
        driver = driver_of(runner, 24, num_blocks)
        together = driver.generate([prompt] * 4, num_tokens=32, sampling=sampling)
        alone = [
            EngineDriver(runner, has_prefix_cache=False).generate([prompt], num_tokens=32, sampling=[one])[0]
            for one in sampling
        ]
        assert together == alone
        assert len({tuple(output) for output in together}) == 4
        assert (driver.num_cached_tokens > 0) == (length >= 16)
