"""One step at a time: what a plan becomes, and that a request with bad numbers fails alone."""

from __future__ import annotations

import copy
import math
import pickle
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.step import BlockTable, BlockTables, Chunk, StepPlan
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.batch_inputs import BatchInputs, make_batch_inputs
from stallfree_worker.model.device_inputs import make_device_inputs
from stallfree_worker.model.host_numbers import side_by_side
from stallfree_worker.model.kv_cache import KVCache, KVCacheShape
from stallfree_worker.model.kv_groups import group_layers
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import ModelRunner
from tests.support.tiny_models import build_tiny_model
from tests.worker.model.arrivals import Arrival, ArrivalsDriver, answer_alone
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.engine_driver import GREEDY, EngineDriver
from tests.worker.model.kernels import needs_kernels

POISON = 300
"""A token id whose embedding a test fills with NaN."""


def make_chunk(name: str, token_ids: tuple[int, ...], *, num_computed: int = 0, blocks: tuple[int, ...]) -> Chunk:
    return Chunk(
        request_id=RequestId(name),
        token_ids=token_ids,
        num_computed_tokens=num_computed,
        block_tables=BlockTables([BlockTable(blocks=blocks)]),
        sampling=GREEDY,
        output_index=0,
    )


def make_plan(*chunks: Chunk) -> StepPlan:
    return StepPlan(step_id=5, chunks=chunks, num_decode_tokens=0, num_prefill_tokens=0)


def make_cache(*windows: int | None) -> KVCache:
    """With blocks of 4 tokens, of which 99 can be given away: the null block is 99 and the waste block 100."""
    layers = group_layers(windows or (None,))
    shape = KVCacheShape(layers=layers, block_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    return KVCache(shape, num_blocks=99, device=torch.device("cpu"))


CPU = torch.device("cpu")


def inputs_of(*chunks: Chunk) -> BatchInputs:
    return make_batch_inputs(make_plan(*chunks), block_size=4)


def test_a_plan_becomes_flat_numbers_with_single_tokens_first() -> None:
    prefill = make_chunk("p", (11, 12, 13, 14, 15, 16), num_computed=2, blocks=(7, 3, 9))
    decode = make_chunk("d", (21,), num_computed=4, blocks=(5, 2, 8))._replace(num_shared_tokens=4)
    inputs = inputs_of(prefill, decode)
    assert [chunk.request_id for chunk in inputs.chunks] == ["d", "p"]
    assert inputs.token_ids.tolist() == [21, 11, 12, 13, 14, 15, 16]
    assert inputs.row_starts.tolist() == [0, 1, 7]
    assert (inputs.num_computed.tolist(), inputs.num_shared.tolist()) == ([4, 2], [4, 0])
    assert inputs.logit_rows.tolist() == [0, 6]
    assert [chunk.request_id for chunk in inputs.sampled] == ["d", "p"]


def test_tensors_are_what_follows_from_a_plan() -> None:
    prefill = make_chunk("p", (11, 12, 13, 14, 15, 16), num_computed=2, blocks=(7, 3, 9))
    decode = make_chunk("d", (21,), num_computed=4, blocks=(5, 2, 8))
    inputs = inputs_of(prefill, decode)
    tensors = make_device_inputs(inputs, make_cache(), CPU)
    assert tensors.token_ids.tolist() == [21, 11, 12, 13, 14, 15, 16]
    assert tensors.positions.tolist() == [4, 2, 3, 4, 5, 6, 7]
    assert tensors.slot_mapping.tolist() == [[8, 30, 31, 12, 13, 14, 15]]
    assert tensors.fresh_blocks.tolist() == [2]
    assert tensors.sequences.query_lengths == (1, 6)
    assert tensors.sequences.cu_seqlens_q.tolist() == [0, 1, 7]
    table = tensors.sequences.tables[0]
    assert (table.block_tables.tolist(), table.seqlens_k.tolist()) == ([[5, 2], [7, 3]], [5, 8])
    assert {tensors.token_ids.dtype, tensors.slot_mapping.dtype, inputs.logit_rows.on(CPU).dtype} == {torch.int64}
    assert {table.block_tables.dtype, table.seqlens_k.dtype, tensors.sequences.cu_seqlens_q.dtype} == {torch.int32}


def test_short_tables_are_padded_with_the_null_block() -> None:
    chunks = (make_chunk("a", (1,), blocks=(0, 1, 2)), make_chunk("b", (1,) * 9, blocks=(3, 4, 5)))
    tensors = make_device_inputs(inputs_of(*chunks), make_cache(), CPU)
    assert tensors.sequences.tables[0].block_tables.tolist() == [[0, 99, 99], [3, 4, 5]]


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="b: a block table does not reach to the end of its chunk"):
        inputs_of(make_chunk("a", (1,), blocks=(0,)), make_chunk("b", (1,) * 9, blocks=(3, 4)))


def test_a_group_with_a_window_has_lengths_and_slots_of_its_own() -> None:
    chunk = make_chunk("p", (1, 2, 3), num_computed=10, blocks=(0,))._replace(
        block_tables=BlockTables([BlockTable(blocks=(7, 3, 9, 1)), BlockTable(blocks=(5, 6), num_forgotten=2)]),
    )
    tensors = make_device_inputs(inputs_of(chunk), make_cache(None, 3), CPU)
    assert tensors.positions.tolist() == [10, 11, 12]
    assert tensors.slot_mapping.tolist() == [[38, 39, 4], [22, 23, 24]]
    full, window = tensors.sequences.tables
    assert (full.block_tables.tolist(), full.kv_lengths, full.seqlens_k.tolist()) == ([[7, 3, 9, 1]], (13,), [13])
    assert (window.block_tables.tolist(), window.kv_lengths, window.seqlens_k.tolist()) == ([[5, 6]], (5,), [5])
    assert tensors.fresh_blocks.tolist() == [1, 6]


def test_shared_tokens_are_written_to_the_waste_block_only() -> None:
    chunk = make_chunk("p", (1,), num_computed=7, blocks=(2, 3))._replace(num_shared_tokens=8)
    tensors = make_device_inputs(inputs_of(chunk), make_cache(), CPU)
    assert tensors.slot_mapping.tolist() == [[400]]
    assert tensors.fresh_blocks.tolist() == []


def test_a_copy_of_block_tables_has_addresses_of_its_own() -> None:
    tables = BlockTables([BlockTable(blocks=(7, 3), num_forgotten=2)])
    for copied in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):  # noqa: S301 - our own bytes
        address, num_forgotten = array("q", copied.packed)
        assert (address, num_forgotten) == (copied[0].packed.buffer_info()[0], 2)
        assert address != tables[0].packed.buffer_info()[0]
        assert (copied, copied.num_reached_blocks) == (tables, 4)


def test_lists_of_numbers_stand_side_by_side_in_one_memory() -> None:
    first, empty, last = side_by_side("q", [range(3), (), [2**40, -5]])
    assert (first.tolist(), empty.tolist(), last.tolist()) == ([0, 1, 2], [], [2**40, -5])
    assert (len(empty), last.address - first.address) == (0, 3 * 8)
    assert [part.tolist() for part in (last.part(1, 9), first.part(0, 2), first.part(5, 7))] == [[-5], [0, 1], []]
    assert (last.on(CPU).tolist(), last.part(1, 2).on(CPU).tolist()) == ([2**40, -5], [-5])
    assert last.on(CPU).data_ptr() == last.address
    assert last.part(1, 2).address == last.address + 8


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = build_tiny_model(tmp_path_factory.mktemp("poisoned") / "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_model(tiny_settings(folder, kv_cache_memory="128KiB"))


def test_b24_only_the_request_with_nan_logits_fails(poisoned: LoadedModel) -> None:
    prompts = {"a": (20, 21, 22), "bad": (20, POISON, 22), "c": (40,)}
    chunks = {name: make_chunk(name, ids, blocks=(index,)) for index, (name, ids) in enumerate(prompts.items())}
    result = poisoned.runner.execute(make_plan(*chunks.values()))
    assert set(result.failure_by_request) == result.not_finite_request_ids == {"bad"}
    assert "not finite" in result.failure_by_request[RequestId("bad")]
    alone = [poisoned.runner.execute(make_plan(chunks[name])) for name in ("a", "c")]
    assert result.token_id_by_request == {**alone[0].token_id_by_request, **alone[1].token_id_by_request}


@pytest.mark.parametrize("token_budget", [2, 1000])
def test_b24_a_prompt_that_cannot_be_scored_fails_at_once_and_alone(poisoned: LoadedModel, token_budget: int) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    good = [Arrival(prompt=prompt, sampling=sampling) for prompt in ([20, 21, 22, 23, 24, 25], [40, 41])]
    bad = Arrival(prompt=[20, POISON, 22, 23, 24, 25], sampling=sampling)
    answers = ArrivalsDriver(poisoned.runner, token_budget=token_budget).run([good[0], bad, good[1]])
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert answers[1].error is not None
    assert answers[1].error.code == "step_failed"
    assert answers[1].token_ids == []
    assert len(answers[1].prompt_logprobs) <= 1, "what follows the bad token was told"
    for answer, arrival in zip((answers[0], answers[2]), good, strict=True):
        assert answer.token_ids == answer_alone(poisoned.runner, arrival).token_ids
        assert len(answer.prompt_logprobs) == len(arrival.prompt) - 1


@pytest.mark.parametrize("length", [1, 5, 16, 17, 31, 150])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_kernels), "reference"])
def test_b24_blocks_that_held_nan_do_no_harm_to_their_next_owner(
    tiny_folder: Callable[[str], Path], backend: str, family: str, length: int
) -> None:
    """Kernels and plain torch each clear what a step begins to fill, in every group."""
    settings = tiny_settings(tiny_folder(family), kv_cache_memory="256KiB", attention_backend=backend)
    runner = load_model(settings).runner
    assert isinstance(runner, ModelRunner)
    prompt = list(range(20, 20 + length))
    expected = EngineDriver(runner).generate([prompt, [7]], num_tokens=40)
    for layer in range(len(runner._cache.layers.places)):
        for cached in runner._cache.layer(layer):
            cached[: runner.num_blocks] = math.nan
    assert EngineDriver(runner, token_budget=9).generate([prompt, [7]], num_tokens=40) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("num_tokens", "num_requests"), [(1, 1), (100, 7), (1_000_000, 40)])
def test_the_largest_step_can_be_computed_and_is_never_read(
    family: str, num_tokens: int, num_requests: int, tiny_folder: Callable[[str], Path]
) -> None:
    """A GPU's memory is sized by it, before anybody is served."""
    runner = load_model(tiny_settings(tiny_folder(family), kv_cache_memory="256KiB")).runner
    assert isinstance(runner, ModelRunner)
    prompts = [list(range(20, 60)), [7]]
    expected = EngineDriver(runner).generate(prompts, num_tokens=9)
    runner.compute_largest_step(num_tokens, num_requests=num_requests)
    assert EngineDriver(runner).generate(prompts, num_tokens=9) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_b25_sampled_requests_get_the_same_tokens_alone_and_together(
    family: str, tiny_model: Callable[[str], LoadedModel]
) -> None:
    runner = tiny_model(family).runner
    prompts = [list(range(30, 30 + length)) for length in (3, 20, 50, 7)]
    sampling = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, temperature=1.0, seed=1),
        SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(max_tokens=1, temperature=1.2, top_k=9, min_p=0.05, seed=3),
    ]
    together = EngineDriver(runner, token_budget=16).generate(prompts, num_tokens=32, sampling=sampling)
    alone = [
        EngineDriver(runner).generate([prompt], num_tokens=32, sampling=[params])[0]
        for prompt, params in zip(prompts, sampling, strict=True)
    ]
    assert together == alone


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_runs_and_mostly_agrees_with_float32(
    family: str, tiny_model: Callable[[str], LoadedModel], tiny_folder: Callable[[str], Path]
) -> None:
    prompts = [[token] for token in range(20, 120)]
    exact = EngineDriver(tiny_model(family).runner).generate(prompts, num_tokens=1)
    rounded = EngineDriver(load_model(tiny_settings(tiny_folder(family), dtype="bfloat16")).runner)
    outputs = rounded.generate(prompts, num_tokens=1)
    assert sum(one == other for one, other in zip(exact, outputs, strict=True)) >= 90
