"""Greedy tokens in float32 against `generate()` of the transformers library, on the same weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stallfree_worker.loaded_model import LoadedModel
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE
from tests.worker.model.step_driver import WHOLE, StepDriver

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


@pytest.mark.parametrize("budget", [1, 7, 16, 64, WHOLE])
@pytest.mark.parametrize("family", FAMILIES)
def test_b10_b12_each_prompt_alone_gives_the_tokens_of_generate(
    family: str,
    budget: int,
    tiny_model: Callable[[str], LoadedModel],
    expected: Callable[[str], list[list[int]]],
) -> None:
    driver = StepDriver(tiny_model(family).runner, token_budget=budget)
    outputs = [driver.generate([prompt], num_tokens=NUM_TOKENS)[0] for prompt in PROMPTS]
    assert outputs == expected(family)


@pytest.mark.parametrize("budget", [7, 16, 64, WHOLE])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_one_hybrid_batch_give_the_tokens_of_generate(
    family: str,
    budget: int,
    tiny_model: Callable[[str], LoadedModel],
    expected: Callable[[str], list[list[int]]],
) -> None:
    driver = StepDriver(tiny_model(family).runner, token_budget=budget)
    assert driver.generate(PROMPTS, num_tokens=NUM_TOKENS) == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_do_not_repeat_themselves(family: str, expected: Callable[[str], list[list[int]]]) -> None:
    assert all(len(set(output)) > NUM_TOKENS // 4 for output in expected(family))


B07_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192, 193)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_b07_lengths_around_block_and_chunk_borders(
    family: str, tiny_model: Callable[[str], LoadedModel], reference: Callable[[str], Reference]
) -> None:
    prompts = [make_prompt(length, seed=3) for length in B07_LENGTHS]
    for pair in zip(prompts, reversed(prompts), strict=True):
        outputs = StepDriver(tiny_model(family).runner, token_budget=64).generate(pair, num_tokens=17)
        for prompt, output in zip(pair, outputs, strict=True):
            assert reference(family).follows_greedily(prompt, output), len(prompt)


@pytest.mark.parametrize("family", ["mistral", "qwen2-sliding", "gemma3"])
@pytest.mark.parametrize("budget", [32, 64, 128])
def test_b12_two_hundred_tokens_past_the_window_stay_right(
    family: str,
    budget: int,
    tiny_model: Callable[[str], LoadedModel],
    reference: Callable[[str], Reference],
) -> None:
    prompts = [make_prompt(length, seed=4) for length in (25, 31, 32, 33, 50, 75)]
    outputs = StepDriver(tiny_model(family).runner, token_budget=budget).generate(prompts, num_tokens=200)
    assert all(map(reference(family).follows_greedily, prompts, outputs))
