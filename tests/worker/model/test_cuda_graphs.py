"""Padded batches in fixed memory against plain ones. Without a GPU a recorder that computes again takes the place of
CUDA's, and a stand-in that of flash-attn; the marker `gpu` brings the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.attention.flash_attn import FlashAttention, FlashAttention2, FlashAttention3
from stallfree_worker.model.cuda_graphs import GraphedDecoder, GraphSize, graph_sizes
from stallfree_worker.model.decoder import TorchDecoder
from stallfree_worker.model.kv_cache import KVCache, KVCacheShape
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import ModelRunner
from tests.support.tiny_models import FAMILIES, MAX_POSITIONS, build_tiny_model
from tests.worker.model import flash_attn_stand_in as stand_in
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.engine_driver import EngineDriver
from tests.worker.model.test_token_equality import PROMPTS
from tests.worker.model.texts import STEPS, Texts

SIZES = graph_sizes(max_num_seqs=10, max_step_tokens=300)
NUM_TOKENS = 7 * 512
"""Room for each of seven texts."""
FLASH: dict[str, FlashAttention] = {
    "2": FlashAttention2(stand_in.flash_attn_varlen_func),
    "3": FlashAttention3(stand_in.flash_attn_with_kvcache),
}


class Recomputing:
    """A recorder whose replays compute once more, with the values on the host as they were when it recorded."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result = compute().clone()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(compute())

        return result, replay


def graphed(folder: Path, flash: FlashAttention) -> tuple[ModelRunner, Recomputing]:
    """A runner of the model in `folder` that replays, with blocks as large as `flash` asks for."""
    plain = load_model(tiny_settings(folder, attention_backend="reference")).runner
    assert isinstance(plain, ModelRunner)
    assert isinstance(plain._decoder, TorchDecoder)
    record = Recomputing()
    config = plain._decoder._config
    decoder = TorchDecoder(config, plain._decoder._weights, flash)
    shape = KVCacheShape.of(config, block_size=flash.block_size_multiple, dtype=torch.float32)
    num_blocks = NUM_TOKENS // shape.block_size * len(shape.layers.groups)
    with torch.inference_mode():
        runner = ModelRunner(
            GraphedDecoder(decoder, SIZES, max_model_len=MAX_POSITIONS, make_recorder=lambda: record),
            KVCache(shape, num_blocks=num_blocks, device=torch.device("cpu")),
            limits=plain._limits,
            structured_outputs=plain._structured_outputs,
        )
    runner.prepare()
    return runner, record


@pytest.mark.parametrize("generation", FLASH)
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_have_the_logits_of_plain_ones(
    tiny_folder: Callable[[str], Path], family: str, generation: str
) -> None:
    folder = tiny_folder(family)
    runner, record = graphed(folder, FLASH[generation])
    reference = load_model(tiny_settings(folder, attention_backend="reference", kv_cache_memory="64MiB")).runner
    assert isinstance(reference, ModelRunner)
    own, plain = Texts(runner), Texts(reference)
    for chunks in STEPS:
        torch.testing.assert_close(own.step(chunks), plain.step(chunks), rtol=1e-4, atol=2e-4)
    fitting = [chunks for chunks in STEPS if sum(chunks.values()) <= 256 and len(chunks) <= 10]
    assert 0 < record.num_replays == len(fitting) < len(STEPS)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_engine_and_replayed_passes_give_the_tokens_of_plain_ones(
    tiny_folder: Callable[[str], Path], tiny_model: Callable[[str], LoadedModel], family: str
) -> None:
    """Batches that shrink and grow: what an earlier one left in the fixed memory is never read."""
    runner, record = graphed(tiny_folder(family), FLASH["3"])
    for budget in (24, 100):
        outputs = EngineDriver(runner, token_budget=budget).generate(PROMPTS, num_tokens=20)
        assert outputs == EngineDriver(tiny_model(family).runner).generate(PROMPTS, num_tokens=20)
    assert record.num_replays > 20


def test_sizes_reach_from_one_decode_to_the_largest_hybrid_batch_that_pays() -> None:
    sizes = graph_sizes(max_num_seqs=100, max_step_tokens=300)
    decodes = [size.num_sequences for size in sizes if not size.has_prefills]
    assert decodes == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100]
    assert [size.num_tokens for size in sizes if size.has_prefills] == [64, 128, 256]
    assert graph_sizes(max_num_seqs=1, max_step_tokens=16) == (
        GraphSize(num_tokens=1, num_sequences=1, has_prefills=False),
    )


@pytest.mark.gpu
def test_on_a_gpu_replayed_passes_have_the_logits_of_launched_ones(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "gemma3", "gemma3")
    values = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flash_attn", "max_num_seqs": 10}
    own, plain = (
        Texts(load_model(tiny_settings(folder, kv_cache_memory="256MiB", cuda_graphs=graphs, **values)).runner)  # type: ignore[arg-type]  # a ModelRunner
        for graphs in (True, False)
    )
    assert isinstance(own.runner._decoder, GraphedDecoder)
    assert own.runner._decoder._passes.keys() == set(graph_sizes(max_num_seqs=10, max_step_tokens=64))
    for chunks in STEPS:
        torch.testing.assert_close(own.step(chunks), plain.step(chunks), rtol=2e-2, atol=2e-2)
