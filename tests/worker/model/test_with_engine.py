"""The real engine on the real runner: a pool too small for all forces preemptions, and no token changes."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.families import read_decoder_config
from stallfree_worker.model.kv_cache import KVCacheShape
from stallfree_worker.model.loader import load_model
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.step_driver import StepDriver

NUM_TOKENS = 64
PROMPTS = [
    [7 + (index * 31 + length) % (VOCAB_SIZE - 7) for index in range(length)] for length in (1, 60, 120, 150, 300)
]
NUM_BLOCKS = 30


def memory_for(folder: Path) -> int:
    """Bytes for `NUM_BLOCKS` blocks and the null block."""
    config = read_decoder_config(json.loads((folder / "config.json").read_text()))
    return KVCacheShape.of(config, block_size=16, dtype=torch.float32).block_bytes * (NUM_BLOCKS + 1)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_get_the_tokens_they_get_alone(
    family: str,
    sampling: dict[str, float],
    tiny_folder: Callable[[str], Path],
    tiny_model: Callable[[str], LoadedModel],
) -> None:
    params = SamplingParams.model_validate({"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling})
    driver = StepDriver(tiny_model(family).runner)
    expected = [driver.generate([prompt], num_tokens=NUM_TOKENS, sampling=[params])[0] for prompt in PROMPTS]
    settings = tiny_settings(tiny_folder(family), kv_cache_memory=memory_for(tiny_folder(family)), token_budget=48)
    runner = load_model(settings).runner
    assert runner.num_blocks == NUM_BLOCKS
    outputs, num_preemptions = run(Engine(settings, runner, itertools.count().__next__), params)
    assert num_preemptions > 0
    assert outputs == expected


def run(engine: Engine, params: SamplingParams) -> tuple[list[list[int]], int]:
    for index, prompt in enumerate(PROMPTS):
        engine.submit(
            NewRequest(
                request_id=RequestId(str(index)),
                prompt_token_ids=tuple(prompt),
                sampling=params,
                tbt_target_seconds=0.2,
            )
        )
    outputs: dict[str, list[int]] = defaultdict(list)
    num_preemptions = 0
    while engine.has_work:
        report = engine.step()
        num_preemptions += report.num_preemptions
        for event in report.events:
            assert event.token_id is not None
            outputs[event.request_id].append(event.token_id)
    engine.check_integrity()
    assert engine.status().num_free_blocks == NUM_BLOCKS
    return [outputs[str(index)] for index in range(len(PROMPTS))], num_preemptions
