"""The compiled kernels against the plain torch decoder, and what they promise besides."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stallfree_worker.engine.step import BlockTables, StepPlan
from stallfree_worker.model.batch_inputs import make_batch_inputs
from stallfree_worker.model.cpu.decoder import CpuDecoder
from stallfree_worker.model.cpu.packed import PackedMatrix
from stallfree_worker.model.decoder import TorchDecoder
from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import ModelRunner
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, build_tiny_model
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.engine_driver import EngineDriver
from tests.worker.model.kernels import needs_kernels
from tests.worker.model.texts import STEPS, Texts

pytestmark = needs_kernels
FORMATS = ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"})


def load(folder: Path, backend: str, **overrides: object) -> ModelRunner:
    settings = tiny_settings(folder, attention_backend=backend, kv_cache_memory="16MiB", **overrides)
    runner = load_model(settings).runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._decoder, CpuDecoder if backend == "cpu" else TorchDecoder)
    return runner


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_plain_torch(tiny_folder: Callable[[str], Path], family: str) -> None:
    own, reference = (Texts(load(tiny_folder(family), backend)) for backend in ("cpu", "reference"))
    for chunks in STEPS:
        torch.testing.assert_close(own.step(chunks), reference.step(chunks), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_any_size_and_any_number_of_threads(
    tiny_folder: Callable[[str], Path], block_size: int, threads: int
) -> None:
    folder = tiny_folder("gemma3")
    own = Texts(load(folder, "cpu", block_size=block_size, threads=threads))
    reference = Texts(load(folder, "reference", block_size=block_size))
    for chunks in STEPS:
        torch.testing.assert_close(own.step(chunks), reference.step(chunks), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("head_dim", [16, 48, 80])
def test_far_positions_are_turned_as_plain_torch_turns_them(tmp_path: Path, head_dim: int) -> None:
    """Positions count tenthousandfold, so angles grow to millions, in every quarter of a turn."""
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 1e-4}
    folder = build_tiny_model(tmp_path / "far", rope_parameters=rope, head_dim=head_dim)
    own, reference = (Texts(load(folder, backend)) for backend in ("cpu", "reference"))
    for chunks in STEPS:
        torch.testing.assert_close(own.step(chunks), reference.step(chunks), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "gemma3"])
def test_bfloat16_is_as_close_to_float32_as_plain_torch_is(tiny_folder: Callable[[str], Path], family: str) -> None:
    exact = Texts(load(tiny_folder(family), "reference"))
    own, reference = (Texts(load(tiny_folder(family), name, dtype="bfloat16")) for name in ("cpu", "reference"))
    for chunks in STEPS:
        truth = exact.step(chunks)
        error, error_of_torch = (
            (texts.step(chunks).float() - truth).square().mean().sqrt().item() for texts in (own, reference)
        )
        assert 0 < error < 1.1 * error_of_torch


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_is_the_same_to_the_bit_in_every_batch(
    tiny_folder: Callable[[str], Path], family: str, formats: dict[str, str]
) -> None:
    runner = load(tiny_folder(family), "cpu", threads=2, **formats)
    alone = {}
    for name in "abcde":
        texts = Texts(runner)
        texts.step({name: 40})
        alone[name] = texts.step({name: 1})
    for others in ("b", "bc", "bcde"):
        texts = Texts(runner)
        texts.step(dict.fromkeys("a" + others, 40))
        together = texts.step(dict.fromkeys("a" + others, 1))
        for row, name in enumerate("a" + others):
            assert torch.equal(together[row], alone[name][0])


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_row_is_the_same_to_the_bit_however_its_prompt_was_cut(
    tiny_folder: Callable[[str], Path], family: str, formats: dict[str, str]
) -> None:
    runner = load(tiny_folder(family), "cpu", threads=2, **formats)
    last = []
    for cuts, forgets in (((300,), False), ((300,), True), ((130, 100, 70), True), ((1, 250, 49), True)):
        texts = Texts(runner, forgets=forgets)
        for count in cuts:
            texts.step({"a": count})
        last.append(torch.cat([texts.step({"a": 1}), texts.step({"a": 1})]))
    assert all(torch.equal(one, last[0]) for one in last)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_is_the_same_to_the_bit_whatever_other_rows_are_wanted(
    tiny_folder: Callable[[str], Path], family: str, formats: dict[str, str]
) -> None:
    """Those of a step that has chunks of 1, 1, 70 and 130 tokens, in that order; and of the step after it, which reads
    keys and values of all rows."""
    runner = load(tiny_folder(family), "cpu", threads=2, **formats)
    before, step, after = {"a": 9, "b": 300}, {"c": 70, "a": 1, "d": 130, "b": 1}, dict.fromkeys("abcd", 1)
    whole = Texts(runner)
    whole.step(before)
    expected, expected_after = whole.step(step), whole.step(after)
    for rows in ([0], [201], [0, 1, 71, 201], [2, 3, 40], [5, 71, 72, 150], list(range(202))):
        texts = Texts(runner)
        texts.step(before, rows=[308])
        assert torch.equal(texts.step(step, rows=rows), expected[rows])
        assert torch.equal(texts.step(after), expected_after)


def test_what_others_share_is_not_written(tiny_folder: Callable[[str], Path]) -> None:
    """Every slot of the cache holds a number that no key or value is; after a step of 40 tokens of which 20 are shared,
    so do those of the first 20 still, and those of the others no longer."""
    runner = load(tiny_folder("llama"), "cpu", block_size=16)
    cache = runner._cache
    for cached in cache.layer(0):
        cached.fill_(77)
    chunk = Texts(runner)._chunk("a", 40, cache)._replace(num_shared_tokens=20)
    plan = StepPlan(step_id=0, chunks=(chunk,), num_decode_tokens=0, num_prefill_tokens=40)
    runner._decoder.forward(make_batch_inputs(plan, block_size=cache.block_size), cache)
    blocks = list(chunk.block_tables[0].blocks[:3])
    for cached in cache.layer(0):
        num_left = [int((cached[block] == 77).sum()) for block in blocks]
        whole = cached[0].numel()
        assert num_left == [whole, whole // 16 * 4, 0]  # the last block is cleared before it is begun


def test_other_numbers_of_block_tables_than_groups_are_refused(tiny_folder: Callable[[str], Path]) -> None:
    runner = load(tiny_folder("gemma3"), "cpu")
    cache = runner._cache
    chunk = Texts(runner)._chunk("a", 40, cache)
    plan = StepPlan(
        step_id=0,
        chunks=(chunk, chunk._replace(block_tables=BlockTables(chunk.block_tables[:1]))),
        num_decode_tokens=0,
        num_prefill_tokens=80,
    )
    with pytest.raises(ValueError, match=f"block tables, not {len(cache.layers.groups)} for each of 2"):
        runner._decoder.forward(make_batch_inputs(plan, block_size=cache.block_size), cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_step_whose_rows_nobody_wants_writes_its_keys_and_values(
    tiny_folder: Callable[[str], Path], family: str
) -> None:
    runner = load(tiny_folder(family), "cpu", threads=2)
    prompt = tuple(random.Random(5).choices(range(VOCAB_SIZE), k=150))
    outputs = [EngineDriver(runner, token_budget=budget).generate([prompt], num_tokens=8) for budget in (512, 32)]
    assert outputs[0] == outputs[1]


def test_a_model_of_odd_sizes_is_left_to_plain_torch(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "odd", hidden_size=72, num_attention_heads=4, head_dim=16)
    runner = load(folder, "reference")
    with pytest.raises(ModelLoadError, match=r"--attention-backend cpu: .*hidden_size 72 is no multiple of 16"):
        load(folder, "cpu")
    left = load_model(tiny_settings(folder, attention_backend="auto")).runner
    assert isinstance(left, ModelRunner)
    assert type(left._decoder) is type(runner._decoder)


def test_more_query_heads_on_a_key_than_a_task_holds_are_left_to_plain_torch(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "many", num_attention_heads=64, num_key_value_heads=1, head_dim=16)
    with pytest.raises(ModelLoadError, match="num_attention_heads 64 is more than 48 for each key-value head"):
        load(folder, "cpu")


def test_as_many_as_it_holds_are_computed(tmp_path: Path) -> None:
    folder = build_tiny_model(
        tmp_path / "some", hidden_size=96, num_attention_heads=48, num_key_value_heads=1, head_dim=16
    )
    own, reference = (Texts(load(folder, backend)) for backend in ("cpu", "reference"))
    for chunks in STEPS[:3]:
        torch.testing.assert_close(own.step(chunks), reference.step(chunks), rtol=1e-4, atol=2e-4)


def test_a_block_size_without_whole_tiles_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match="--block-size 24 is none of 16, 32, 64, 128"):
        load(tiny_folder("llama"), "cpu", block_size=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_outputs", [16, 48, 50])
def test_a_packed_matrix_holds_every_weight_once(dtype: torch.dtype, num_outputs: int) -> None:
    weight = torch.arange(num_outputs * 32).view(num_outputs, 32).to(dtype)
    packed = PackedMatrix(weight, torch.ones(num_outputs))
    per_lane = 4 // dtype.itemsize
    for row, column in ((0, 0), (3, 17), (num_outputs - 1, 31)):
        found = packed.tiles[row // 16, column // per_lane, row % 16, column % per_lane]
        assert found == weight[row, column]
    assert packed.tiles.count_nonzero() == weight.count_nonzero()
    assert packed.bias is not None
    assert packed.bias.count_nonzero() == num_outputs


@pytest.mark.parametrize("num_outputs", [16, 50])
def test_integer_weights_are_off_by_half_a_step_at_most(num_outputs: int) -> None:
    torch.manual_seed(4)
    weight = torch.randn(num_outputs, 32).to(torch.bfloat16)
    weight[1] = 0
    packed = PackedMatrix.quantized(weight)
    restored = _restored(packed)
    assert packed.scales is not None
    assert ((restored - weight.float()).abs() <= 0.501 * packed.scales[:num_outputs, None]).all()
    assert restored[1].count_nonzero() == 0


def _restored(packed: PackedMatrix) -> Tensor:
    """The weights that a packed matrix of integers stands for: float32 [num_outputs, num_inputs]."""
    assert packed.scales is not None
    rows = packed.tiles.transpose(1, 2).flatten(2).flatten(0, 1)
    return ((rows.float() - 128) * packed.scales[:, None])[: packed.num_outputs]


def _rounded(x: Tensor) -> Tensor:
    """What inputs are rounded to before they are multiplied with integers: 64 at a time, to 127 steps each way."""
    parts = []
    for part in torch.split(x, 64, dim=1):
        step = part.abs().amax(dim=1, keepdim=True) / 127
        parts.append(torch.where(step > 0, (part / step).round() * step, 0.0))
    return torch.cat(parts, dim=1)


def quantized_decoder(folder: Path) -> CpuDecoder:
    decoder = load(folder, "cpu", dtype="bfloat16", quantization="int8", threads=2)._decoder
    assert isinstance(decoder, CpuDecoder)
    return decoder


@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("hidden_size", [48, 64, 80, 192])
def test_integers_are_computed_with_as_what_they_stand_for(tmp_path: Path, hidden_size: int, num_rows: int) -> None:
    folder = build_tiny_model(tmp_path / "model", hidden_size=hidden_size, num_attention_heads=4, head_dim=16)
    decoder = quantized_decoder(folder)
    torch.manual_seed(num_rows)
    magnitudes = torch.logspace(-2, 2, hidden_size)[torch.randperm(hidden_size)]
    hidden = torch.randn(num_rows, hidden_size) * magnitudes
    hidden[-1, :20] = 0
    norm = decoder._weights.final_norm
    normed = torch.nn.functional.rms_norm(hidden, norm.shape, norm, 1e-6).to(torch.bfloat16).float()
    expected = _rounded(normed) @ _restored(decoder._weights.head).T
    found = decoder.logits(hidden, NumberList.of(range(num_rows))).values
    unrounded = normed @ _restored(decoder._weights.head).T
    assert (found - expected).norm() < 0.25 * (unrounded - expected).norm()  # some inputs lie between two steps


def test_layers_of_integers_whose_last_inputs_are_no_whole_group_are_as_good_as_others(tmp_path: Path) -> None:
    """80 and 176 are no multiples of the 64 inputs that are rounded together: what a product left out, or took twice,
    would be as large as the logits themselves."""
    folder = build_tiny_model(
        tmp_path / "odd", hidden_size=80, intermediate_size=176, num_attention_heads=4, head_dim=16
    )
    own = Texts(load(folder, "cpu", dtype="bfloat16", quantization="int8", threads=2))
    plain, exact = (Texts(load(folder, "reference", dtype=dtype)) for dtype in ("bfloat16", "float32"))
    for chunks in STEPS:
        truth = exact.step(chunks)
        error, error_of_bfloat16 = (
            (texts.step(chunks).float() - truth).square().mean().sqrt() for texts in (own, plain)
        )
        assert error_of_bfloat16 < error < 4 * error_of_bfloat16


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_its_own_row_of_integers_and_no_other(
    tiny_folder: Callable[[str], Path], bad: float
) -> None:
    decoder = quantized_decoder(tiny_folder("llama"))
    torch.manual_seed(0)
    hidden = torch.randn(3, 64)
    whole = decoder.logits(hidden, NumberList.of(range(3))).values.clone()
    hidden[1, 7] = bad
    found = decoder.logits(hidden, NumberList.of(range(3))).values
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


def test_a_row_of_zeros_gives_zeros_with_integers(tiny_folder: Callable[[str], Path]) -> None:
    decoder = quantized_decoder(tiny_folder("llama"))
    assert decoder.logits(torch.zeros(2, 64), NumberList.of(range(2))).values.count_nonzero() == 0


@pytest.mark.parametrize("family", ["llama-bias", "gemma3"])
def test_a_model_of_integer_weights_is_close_to_the_exact_one(tiny_folder: Callable[[str], Path], family: str) -> None:
    exact = Texts(load(tiny_folder(family), "reference"))
    quantized = Texts(load(tiny_folder(family), "cpu", dtype="bfloat16", quantization="int8"))
    for chunks in STEPS:
        truth = exact.step(chunks)
        error = (quantized.step(chunks) - truth).square().mean().sqrt()
        assert error < 0.1 * truth.square().mean().sqrt()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"dtype": "float32"}, "activations must be bfloat16, and --dtype gives float32"),
        ({"dtype": "bfloat16", "attention_backend": "reference"}, "--attention-backend reference does not know it"),
        ({"dtype": "bfloat16", "block_size": 24}, "--block-size 24"),
    ],
)
def test_integer_weights_that_cannot_be_had_are_refused(
    tiny_folder: Callable[[str], Path], overrides: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"--quantization int8: .*{reason}"):
        load_model(tiny_settings(tiny_folder("llama"), quantization="int8", **overrides))


@pytest.mark.slow
def test_fewer_threads_than_asked_compute_the_same(tiny_folder: Callable[[str], Path]) -> None:
    """OpenMP may be told to give a call fewer threads than it asks for."""
    program = (
        "import sys, torch; from pathlib import Path; from tests.worker.model.test_cpu_decoder import load; "
        "from tests.worker.model.texts import STEPS, Texts; "
        "texts = Texts(load(Path(sys.argv[1]), 'cpu', threads=3)); "
        "torch.save([texts.step(chunks) for chunks in STEPS], sys.argv[2])"
    )
    folder = tiny_folder("gemma3")
    found = []
    for limit in ("1", "2", "8"):
        output = folder.parent / f"threads-{limit}.pt"
        environment = {**os.environ, "OMP_THREAD_LIMIT": limit}
        subprocess.run([sys.executable, "-c", program, str(folder), str(output)], check=True, env=environment)
        found.append(torch.load(output))
    for others in found[1:]:
        assert all(torch.equal(own, other) for own, other in zip(found[0], others, strict=True))
