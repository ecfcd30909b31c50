"""The likeliest ids without logits: always those of the logits, however close others come."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stallfree_shared.wire import SamplingParams, StructuredOutput
from stallfree_worker.model.card import ModelFolder
from stallfree_worker.model.config_reader import JsonObject
from stallfree_worker.model.cpu.decoder import CpuDecoder
from stallfree_worker.model.cpu.draws import draw_plainly
from stallfree_worker.model.cpu.packed import TILE_ROWS, PackedMatrix
from stallfree_worker.model.families import read_decoder_config
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.id_masks import mask_of
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import NOT_FINITE, NOTHING_LEFT, ModelRunner
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model
from tests.worker.model.arrivals import Answer, Arrival, ArrivalsDriver
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.kernels import needs_kernels
from tests.worker.model.test_token_equality import make_prompt

pytestmark = needs_kernels
POISON = 300
"""A token whose embedding is NaN."""
NOTHING = -1


def load(folder: Path, **overrides: object) -> ModelRunner:
    settings = tiny_settings(folder, **{"dtype": "bfloat16", "attention_backend": "cpu", "threads": 2} | overrides)
    runner = load_model(settings).runner
    assert isinstance(runner, ModelRunner)
    return runner


def decoder_of(runner: ModelRunner) -> CpuDecoder:
    assert isinstance(runner._decoder, CpuDecoder)
    return runner._decoder


def decoder_with_head(folder: Path, matrix: Tensor) -> CpuDecoder:
    """One whose output layer is `matrix`, [num_ids, hidden_size], after a norm that leaves directions alone."""
    num_ids, hidden_size = matrix.shape
    build_tiny_model(folder, hidden_size=hidden_size, num_attention_heads=4, head_dim=16, vocab_size=num_ids)
    weights = decoder_of(load(folder))._weights
    own = dataclasses.replace(
        weights, final_norm=torch.ones(hidden_size), head=PackedMatrix(matrix.to(torch.bfloat16).contiguous())
    )
    config: JsonObject = ModelFolder.read(folder).config
    return CpuDecoder(read_decoder_config(config), own, block_size=16, num_threads=2)


def by_logits(decoder: CpuDecoder, hidden: Tensor, allowed: list[Tensor | None]) -> list[int]:
    num_rows = len(hidden)
    values = decoder.logits(hidden, NumberList.of(range(num_rows))).values
    tokens: list[int] = draw_plainly(values, [0.0] * num_rows, [0.0] * num_rows, allowed).tolist()
    return tokens


def found(decoder: CpuDecoder, hidden: Tensor, allowed: list[Tensor | None]) -> list[int]:
    assert decoder.find_likeliest is not None
    return decoder.find_likeliest(hidden, NumberList.of(range(len(hidden))), allowed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(num_ids: int, hidden_size: int) -> Tensor:
    return normal(num_ids, hidden_size, seed=0)


def crowded(num_ids: int, hidden_size: int) -> Tensor:
    """All outputs are nearly one: a logit of bfloat16 weights tells them apart, 8 bits do not."""
    return normal(1, hidden_size, seed=1) * (1 + 0.004 * normal(num_ids, hidden_size, seed=2))


def doubled(num_ids: int, hidden_size: int) -> Tensor:
    """Each output is there three times."""
    return normal(-(-num_ids // 3), hidden_size, seed=3).repeat(3, 1)[:num_ids]


def of_all_sizes(num_ids: int, hidden_size: int) -> Tensor:
    """From 1e-8 to 1e8, with some of nothing but zeros."""
    sizes = torch.logspace(-8, 8, num_ids)[torch.randperm(num_ids, generator=torch.Generator().manual_seed(4))]
    matrix = normal(num_ids, hidden_size, seed=5) * sizes[:, None]
    matrix[::7] = 0
    return matrix


def with_one_large_input(num_ids: int, hidden_size: int) -> Tensor:
    """Outputs of which one weight leaves nothing but zeros of the others, in 8 bits."""
    matrix = normal(num_ids, hidden_size, seed=6)
    matrix[:, 5] = 1000
    return matrix


def exact_in_8_bits(num_ids: int, hidden_size: int) -> Tensor:
    """Only what inputs are rounded by is in the way, and all outputs are nearly one."""
    matrix = normal(1, hidden_size, seed=8).mul(30).round() + normal(num_ids, hidden_size, seed=9).round()
    matrix[:, 5] = 127
    return matrix.clamp(-127, 127)


def tiny(num_ids: int, hidden_size: int) -> Tensor:
    """What is rounded to zeros altogether."""
    return normal(num_ids, hidden_size, seed=7) * 1e-32


def with_tiny_squares(num_ids: int, hidden_size: int) -> Tensor:
    """What is told apart by 8 bits, and whose squares are zeros."""
    return crowded(num_ids, hidden_size) * 1e-25


MATRICES = (plain, crowded, doubled, of_all_sizes, with_one_large_input, exact_in_8_bits, tiny, with_tiny_squares)


@pytest.mark.parametrize("make_matrix", MATRICES, ids=lambda make: str(make.__name__))
@pytest.mark.parametrize(("num_ids", "hidden_size"), [(1000, 64), (999, 80), (2049, 192)])
def test_it_is_that_of_the_logits_to_the_bit(
    tmp_path: Path, make_matrix: Callable[..., Tensor], num_ids: int, hidden_size: int
) -> None:
    decoder = decoder_with_head(tmp_path / "model", make_matrix(num_ids, hidden_size))
    magnitudes = torch.logspace(-2, 2, hidden_size)
    for num_rows in (1, 2, 8, 9, 70):
        hidden = normal(num_rows, hidden_size, seed=num_rows)
        spread = hidden * magnitudes
        spread[-1] = 0  # all logits are equal
        for rows in (hidden, spread, 1e-27 * hidden):
            everything: list[Tensor | None] = [None] * num_rows
            assert found(decoder, rows, everything) == by_logits(decoder, rows, everything)
            assert_bounds_hold(decoder, rows)


def assert_bounds_hold(decoder: CpuDecoder, hidden: Tensor) -> None:
    """None of 16 neighbouring logits is larger than their bound: those that `found` has just used."""
    logits = decoder.logits(hidden, NumberList.of(range(len(hidden)))).values
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % TILE_ROWS), value=-math.inf)
    tiles = padded.view(len(hidden), -1, TILE_ROWS)
    assert (bounds_of(decoder, tiles.shape[:2]) >= tiles.amax(dim=-1)).all()


def bounds_of(decoder: CpuDecoder, shape: torch.Size) -> Tensor:
    return decoder._bounds._held.view(torch.float32)[: shape.numel()].view(shape)


def test_most_of_the_matrix_is_not_read(tmp_path: Path) -> None:
    """Its bounds leave few ids to be looked at."""
    decoder = decoder_with_head(tmp_path / "model", plain(8000, 192))
    hidden = normal(20, 192, seed=1)
    found(decoder, hidden, [None] * 20)
    best = decoder.logits(hidden, NumberList.of(range(20))).values.amax(dim=1, keepdim=True)
    assert (bounds_of(decoder, torch.Size((20, 500))) >= best).sum(dim=1).double().mean() < 5


@pytest.mark.parametrize("num_allowed", [1, 5, 300, 998])
def test_it_is_among_those_that_are_allowed(tmp_path: Path, num_allowed: int) -> None:
    decoder = decoder_with_head(tmp_path / "model", crowded(999, 64))
    hidden = normal(12, 64, seed=1)
    rng = random.Random(num_allowed)
    masks: list[Tensor | None] = [
        torch.from_numpy(mask_of(rng.sample(range(999), num_allowed), num_ids=999)) if row % 3 else None
        for row in range(12)
    ]
    tokens = found(decoder, hidden, masks)
    assert tokens == by_logits(decoder, hidden, masks)
    assert NOTHING not in tokens


def test_where_nothing_is_allowed_there_is_none(tmp_path: Path) -> None:
    decoder = decoder_with_head(tmp_path / "model", normal(999, 64, seed=0))
    nothing = torch.from_numpy(mask_of([], num_ids=999))
    hidden = normal(2, 64, seed=1)
    assert found(decoder, hidden, [nothing, None]) == [NOTHING, *by_logits(decoder, hidden[1:], [None])]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_went_wrong_has_none_and_spoils_no_other(tmp_path: Path, bad: float) -> None:
    decoder = decoder_with_head(tmp_path / "model", normal(999, 64, seed=0))
    hidden = normal(3, 64, seed=1)
    whole = found(decoder, hidden, [None] * 3)
    hidden[1, 7] = bad
    assert found(decoder, hidden, [None] * 3) == [whole[0], NOTHING, whole[2]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_with_a_weight_that_is_no_number_no_row_has_one(tmp_path: Path, bad: float) -> None:
    matrix = normal(999, 64, seed=0)
    matrix[500, 7] = bad
    decoder = decoder_with_head(tmp_path / "model", matrix)
    assert found(decoder, normal(3, 64, seed=1), [None] * 3) == [NOTHING] * 3


def test_with_a_soft_cap_there_is_no_such_way(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model", "gemma3", final_logit_softcapping=30.0)
    assert decoder_of(load(folder)).find_likeliest is None


def test_masks_for_other_rows_are_refused(tmp_path: Path) -> None:
    decoder = decoder_with_head(tmp_path / "model", plain(999, 64))
    with pytest.raises(ValueError, match="1 masks are not for 2 rows"):
        found(decoder, torch.zeros(2, 64), [None])


@pytest.mark.parametrize(
    "overrides", [{"dtype": "float32"}, {"quantization": "int8"}, {"attention_backend": "reference"}], ids=str
)
def test_others_have_no_such_way(tiny_folder: Callable[[str], Path], overrides: dict[str, object]) -> None:
    assert load(tiny_folder("llama"), **overrides)._decoder.find_likeliest is None


def arrival(number: int, **params: object) -> Arrival:
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True).model_copy(update=params)
    return Arrival(prompt=make_prompt(5 + 11 * number, seed=number), sampling=sampling, at_step=number)


DIGITS = StructuredOutput(kind="regex", definition="[0-9]{3}x[a-f]{5}")
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "structured": {"structured_output": DIGITS, "ignore_eos": False},
    "logprobs": {"logprobs": 2},
    "min_tokens": {"min_tokens": 15},
    "temperature": {"temperature": 0.9},
    "logit_bias": {"logit_bias": {9: 4.0}},
}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_get_the_tokens_that_they_get_by_logits(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, kind: str, overlaps: bool
) -> None:
    """In steps where all want the likeliest alone, and in those where one wants more."""
    runner = load(tiny_folder(family))
    decoder = decoder_of(runner)
    params = KINDS[kind]
    if kind == "min_tokens":  # until then, its likeliest tokens are banned
        plain_answer = ArrivalsDriver(runner).run([dataclasses.replace(arrival(2), at_step=0)])[0]
        params = {**params, "stop_token_ids": frozenset(plain_answer.token_ids)}
    requests = [arrival(number, **(params if number == 2 else {})) for number in range(6)]
    find, compute = Mock(wraps=decoder.find_likeliest), Mock(wraps=decoder.logits)
    monkeypatch.setattr(CpuDecoder, "find_likeliest", find)
    monkeypatch.setattr(decoder, "logits", compute)
    own = [tokens_of(answer) for answer in ArrivalsDriver(runner, token_budget=40, overlaps=overlaps).run(requests)]
    assert find.called
    assert compute.called == (kind not in {"plain", "structured"})
    find.reset_mock()
    monkeypatch.setattr(CpuDecoder, "find_likeliest", None)
    assert own == [tokens_of(answer) for answer in ArrivalsDriver(runner, token_budget=40).run(requests)]
    assert not find.called


def tokens_of(answer: Answer) -> list[int]:
    assert answer.error is None
    return answer.token_ids


def test_a_request_whose_logits_are_not_finite_fails_alone(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    runner = load(folder)
    prompts = ([20, 21, 22], [20, POISON, 22], [40])
    requests = [dataclasses.replace(arrival(number), prompt=prompt) for number, prompt in enumerate(prompts)]
    answers = ArrivalsDriver(runner).run(requests)
    assert answers[1].error is not None
    assert answers[1].error.message == NOT_FINITE
    assert [len(tokens_of(answer)) for answer in (answers[0], answers[2])] == [20, 20]


def test_a_request_that_may_draw_nothing_is_told_why(tiny_folder: Callable[[str], Path]) -> None:
    runner = load(tiny_folder("llama"))
    ids = frozenset(range(VOCAB_SIZE))
    none_left = arrival(1, structured_output=DIGITS, min_tokens=9, stop_token_ids=ids, ignore_eos=False)
    answers = ArrivalsDriver(runner).run([arrival(0), none_left])
    assert answers[1].error is not None
    assert answers[1].error.message == NOTHING_LEFT
    assert len(tokens_of(answers[0])) == 20
