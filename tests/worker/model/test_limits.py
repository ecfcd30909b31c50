"""What the machine could do at most, and what a model asks of it at the least."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stallfree_worker.model import limits
from tests.support.tiny_models import SLIDING_WINDOW
from tests.worker.model.kernels import needs_kernels


@needs_kernels
def test_the_machine_reads_and_multiplies() -> None:
    assert limits.measure_read(1, 2**20, seconds=0.01) > 1e8
    assert limits.measure_products(1, 64, seconds=0.01) > 1e7


@needs_kernels
def test_a_models_work_is_that_of_its_weights(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_READ_BYTES", 2**20)
    assert limits.main(["--model", str(tiny_folder("gemma3")), "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("gemma3"), dtype=torch.float32)
    matrices = [weight.numel() for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
    assert found["layer_weights"] == sum(matrices)
    last = {name: weight.numel() for name, weight in model.named_parameters() if ".layers.3." in name}
    for_rows = [
        last[name] for name in last if name.endswith("_proj.weight") and "k_proj" not in name and "v_proj" not in name
    ]
    assert found["last_layer_weights"] == sum(for_rows)
    assert found["windows"] == [SLIDING_WINDOW, SLIDING_WINDOW, None, SLIDING_WINDOW]
    assert (found["query_size"], found["kv_size"]) == (4 * 32, 32)
    assert found["head_weights"] == model.config.vocab_size * model.config.hidden_size
