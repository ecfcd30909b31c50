"""The compiled kernel's draws, row by row."""

from __future__ import annotations

import contextlib
import math
import os
import random
from pathlib import Path

import pytest
import torch

from stallfree_worker.model.cpu.decoder import CpuDecoder
from stallfree_worker.model.cpu.draws import can_draw, draw_plainly
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.id_masks import mask_of, unpack
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import ModelRunner
from tests.support.tiny_models import build_tiny_model
from tests.worker.model.conftest import tiny_settings

pytestmark = pytest.mark.skipif(not can_draw(), reason="the compiled kernels cannot be used")
NOTHING = -1


def make_row(num_ids: int, seed: int) -> torch.Tensor:
    return torch.randn(num_ids, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("num_ids", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_the_likeliest_is_the_first_of_the_largest(num_ids: int) -> None:
    rows = torch.stack([make_row(num_ids, seed).round() for seed in range(5)])  # rounded: many are equal
    tokens = draw_plainly(rows, [0.0] * 5, [0.0] * 5, [None] * 5)
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in rows]


@pytest.mark.parametrize("num_ids", [3, 16, 1000, 1024, 3001])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_share_of_the_distribution_is_found_where_its_running_sum_passes_it(num_ids: int, temperature: float) -> None:
    row = make_row(num_ids, 7)
    ends = (row.double() / temperature).softmax(-1).cumsum(-1)
    shares = [random.Random(number).random() for number in range(200)]
    tokens = draw_plainly(row.expand(200, -1).contiguous(), [temperature] * 200, shares, [None] * 200).tolist()
    for token, share in zip(tokens, shares, strict=True):
        below = float(ends[token - 1]) if token > 0 else 0.0
        assert below - 1e-5 <= share <= float(ends[token]) + 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_is_drawn(temperature: float) -> None:
    num_ids = 2050
    row = make_row(num_ids, 3)
    for seed, ids in enumerate(([5], [2049], range(100, 110), range(0, num_ids, 7))):
        mask = torch.from_numpy(mask_of(ids, num_ids=num_ids))
        assert unpack(mask, num_ids=num_ids).nonzero().flatten().tolist() == list(ids)
        among = torch.full((num_ids,), -math.inf)
        among[list(ids)] = row[list(ids)]
        shares = [random.Random(100 * seed + number).random() for number in range(50)]
        rows = [one.expand(50, -1).contiguous() for one in (row, among)]
        own, expected = (
            draw_plainly(one, [temperature] * 50, shares, [allowed] * 50).tolist()
            for one, allowed in zip(rows, (mask, None), strict=True)
        )
        assert own == expected
        assert set(own) <= set(ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_a_row_that_went_wrong(temperature: float) -> None:
    row = make_row(300, 1)
    broken = [row.clone() for _ in range(4)]
    broken[0][299] = math.nan
    broken[1][0] = math.inf
    broken[2][:] = -math.inf
    broken[3][17] = math.nan
    only_sound = torch.from_numpy(mask_of(range(18, 299), num_ids=300))
    nobody = torch.from_numpy(mask_of([], num_ids=300))
    rows = torch.stack([*broken, row, row])
    tokens = draw_plainly(rows, [temperature] * 6, [0.5] * 6, [None, None, None, only_sound, nobody, None]).tolist()
    assert tokens[:5] == [NOTHING] * 5
    assert 0 <= tokens[5] < 300


@pytest.mark.parametrize("num_rows", [1, 6, 7, 8, 9, 40])
@pytest.mark.parametrize("vocab_size", [290, 304, 320])
def test_maxima_that_the_output_layer_found_change_no_draw(tmp_path: Path, vocab_size: int, num_rows: int) -> None:
    """The same rows are drawn from with them and without, rows that went wrong and rows of equal logits too."""
    runner = load_model(tiny_settings(build_tiny_model(tmp_path / "model", vocab_size=vocab_size))).runner
    assert isinstance(runner, ModelRunner)
    decoder = runner._decoder
    assert isinstance(decoder, CpuDecoder)
    hidden = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(num_rows))
    hidden[-1] = 0  # all logits are equal
    hidden[num_rows // 2, 3] = math.nan
    values, maxima = decoder.logits(hidden, NumberList.of(range(num_rows)))
    assert maxima is not None
    mask = torch.from_numpy(mask_of(range(1, vocab_size, 3), num_ids=vocab_size))
    temperatures = [0.0 if row % 3 else 0.7 for row in range(num_rows)]
    shares = [random.Random(row).random() for row in range(num_rows)]
    for allowed in (None, mask):
        found, expected = (
            draw_plainly(values, temperatures, shares, [allowed] * num_rows, maxima=known).tolist()
            for known in (maxima, None)
        )
        assert found == expected
        assert found[num_rows // 2] == NOTHING
        if num_rows > 2 and temperatures[-1] == 0:
            assert found[-1] == (0 if allowed is None else 1)


def test_a_mask_for_other_logits_is_refused() -> None:
    mask = torch.from_numpy(mask_of([1], num_ids=300))
    with pytest.raises(ValueError, match="is not for 400 ids"):
        draw_plainly(torch.zeros(1, 400), [0.0], [0.0], [mask])


def test_threads_keep_to_their_cores_for_a_call_only() -> None:
    """The call has as many threads as there are cores, so each has one of its own meanwhile."""
    cores = os.sched_getaffinity(0)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    try:
        rows = torch.stack([make_row(50_000, seed) for seed in range(2 * len(cores))])
        draw_plainly(rows, [1.0] * len(rows), [0.5] * len(rows), [None] * len(rows))
    finally:
        torch.set_num_threads(threads_before)
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread of another test that has just ended
            found.add(frozenset(os.sched_getaffinity(int(task.name))))
    assert found == {frozenset(cores)}


def test_what_cannot_come_is_never_drawn_at_the_ends_of_the_shares() -> None:
    row = torch.full((40,), -math.inf)
    row[[3, 20]] = torch.tensor([0.0, 1.0])
    rows = row.expand(2, -1).contiguous()
    assert draw_plainly(rows, [1.0] * 2, [0.0, math.nextafter(1.0, 0.0)], [None] * 2).tolist() == [3, 20]
