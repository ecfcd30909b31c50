"""Defects of the reference implementation that concern the model's side; the others: `tests/worker/engine`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stallfree_shared.wire import SamplingParams
from stallfree_worker.loaded_model import LoadedModel
from tests.support.tiny_models import build_tiny_model
from tests.worker.model.engine_driver import GREEDY, EngineDriver
from tests.worker.model.test_token_equality import Reference, make_prompt

NUM_TOKENS = 24
PROMPTS = [make_prompt(length, seed=3) for length in (5, 40, 17, 33)]
HOT = SamplingParams(max_tokens=1, temperature=1.5, seed=7)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the library's own `generate()` gives without sampling."""
    library = Reference(build_tiny_model(tmp_path_factory.mktemp("greedy") / "llama"))
    return [library.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("hot_rows", [(), (0,), (3,), (0, 2), (1, 3), (0, 1, 2)])
def test_defect_1_temperature_0_is_greedy_in_every_place_of_a_mixed_batch(
    tiny_model: Callable[[str], LoadedModel], greedy: list[list[int]], hot_rows: tuple[int, ...]
) -> None:
    sampling = [HOT if row in hot_rows else GREEDY for row in range(len(PROMPTS))]
    for _ in range(2):
        driver = EngineDriver(tiny_model("llama").runner, token_budget=32)
        outputs = driver.generate(PROMPTS, num_tokens=NUM_TOKENS, sampling=sampling)
        for row, output in enumerate(outputs):
            assert (output == greedy[row]) == (row not in hot_rows), "a greedy row was drawn, or rows were exchanged"


def test_defect_1_rows_keep_their_order_in_every_order(
    tiny_model: Callable[[str], LoadedModel], greedy: list[list[int]]
) -> None:
    for order in itertools.permutations(range(len(PROMPTS))):
        driver = EngineDriver(tiny_model("llama").runner)
        sampling = [HOT if row == 1 else GREEDY for row in order]
        outputs = driver.generate([PROMPTS[row] for row in order], num_tokens=4, sampling=sampling)
        told = dict(zip(order, outputs, strict=True))
        assert all(told[row] == greedy[row][:4] for row in order if row != 1)


def test_defect_13_runner_never_synchronises_the_device_of_its_own_accord() -> None:
    """Nothing may call `synchronize`, for timers least of all; the tokens' own way to the host is wait enough."""
    package = Path(__file__).parents[3] / "services" / "worker"
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    assert len(sources) > 40
    assert hasattr(torch.cuda, "synchronize"), "the name that is looked for"
    assert [str(path) for path, text in sources.items() if "synchronize(" in text] == []
