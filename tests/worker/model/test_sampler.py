"""The draw of a row: by its own seed, index and logits; never by its neighbours."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.step import TokenHistory
from stallfree_worker.model import sampler
from stallfree_worker.model.draw import Draw
from stallfree_worker.model.id_masks import mask_of
from stallfree_worker.model.sampler import draw_tokens, uniform


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plain draws by the compiled kernel, where there is one, and by torch."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "can_draw", lambda: False)
    return str(request.param)


def draw(index: int = 0, **params: float) -> Draw:
    return Draw(sampling=SamplingParams.model_validate({"max_tokens": 1, **params}), output_index=index)


def make_logits(num_rows: int, num_ids: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(seed)) * 3


def kept_set(logits: NDArray[np.float64], sampling: SamplingParams) -> set[int]:
    """Which ids may be drawn, token by token as the words say it."""
    probabilities = np.exp((logits - logits.max()) / sampling.temperature)
    order = sorted(range(len(logits)), key=lambda token: -probabilities[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = probabilities[order].sum()
    nucleus: list[int] = []
    for token in order:
        if nucleus and probabilities[nucleus].sum() >= sampling.top_p * total:
            break
        nucleus.append(token)
    return {token for token in nucleus if probabilities[token] >= sampling.min_p * probabilities.max()}


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_k": 1, "seed": 99},
    {"temperature": 1.3, "min_p": 0.2, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2**64 - 1},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 0},
    {"temperature": 2.0, "top_k": 7, "min_p": 0.05, "seed": 8},
    {"temperature": 1e-4, "top_k": 50, "top_p": 0.9},
]


@pytest.mark.parametrize("num_ids", [300, 5000])
def test_b25_a_row_in_a_mixed_batch_draws_what_it_draws_alone(num_ids: int) -> None:
    logits = make_logits(16, num_ids)
    draws = [draw(index, **params) for index, params in enumerate(MIXED * 2)]
    alone = [draw_tokens(logits[row : row + 1], [draws[row]])[0] for row in range(16)]
    for shuffle_seed in range(5):
        order = random.Random(shuffle_seed).sample(range(16), k=16)
        assert draw_tokens(logits[order], [draws[row] for row in order]) == [alone[row] for row in order]


def test_a44_the_same_seed_and_index_draw_the_same_token_and_others_differ() -> None:
    logits = make_logits(1).expand(200, -1)

    def tokens(seed: int) -> list[int | None]:
        return draw_tokens(logits, [draw(index, temperature=1.5, seed=seed) for index in range(200)])

    assert tokens(0) == tokens(0)
    assert tokens(1) == tokens(1)
    assert tokens(0) != tokens(1)
    assert len(set(tokens(1))) > 20


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 6}, {"temperature": 2.0}])
def test_draws_follow_the_softmax(params: dict[str, float]) -> None:
    logits = make_logits(1, num_ids=12, seed=4)
    num_draws = 20_000
    tokens = draw_tokens(logits.expand(num_draws, -1), [draw(0, seed=seed, **params) for seed in range(num_draws)])
    allowed = sorted(kept_set(logits[0].double().numpy(), SamplingParams.model_validate({"max_tokens": 1, **params})))
    expected = (logits[0, allowed].double() / params["temperature"]).softmax(-1).numpy() * num_draws
    counts = np.array([tokens.count(token) for token in allowed])
    assert counts.sum() == num_draws
    common = expected > 5
    chi_square = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    degrees = int(common.sum()) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("num_ids", [40, 3000])
@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7, "min_p": 0.02}],
)
def test_only_tokens_of_the_kept_set_are_drawn_and_all_likely_ones_are(params: dict[str, float], num_ids: int) -> None:
    sampling = SamplingParams.model_validate({"max_tokens": 1, "temperature": 1.5, **params})
    logits = make_logits(1, num_ids, seed=9)
    allowed = kept_set(logits[0].double().numpy(), sampling)
    draws = [draw(0, temperature=1.5, seed=seed, **params) for seed in range(2000)]
    tokens = {token for token in draw_tokens(logits.expand(2000, -1), draws) if token is not None}
    assert tokens <= allowed
    weights = (logits[0] / 1.5).softmax(-1)
    share = weights[sorted(allowed)].sum()
    assert {token for token in allowed if weights[token] / share > 0.01} <= tokens


@pytest.mark.parametrize("num_ids", [8000, 16_384, 40_000])
def test_a_flat_row_with_top_p_looks_beyond_the_likeliest_thousands(num_ids: int) -> None:
    logits = torch.linspace(0.001, 0, num_ids)[None].expand(200, -1)
    tokens = draw_tokens(logits, [draw(0, seed=seed, top_p=0.5) for seed in range(200)])
    drawn = [token for token in tokens if token is not None]
    assert max(drawn) > 0.45 * num_ids
    assert max(drawn) <= num_ids // 2 + 1


@pytest.mark.parametrize("num_ids", [2, 511, 512, 513, 1024, 3000])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(num_ids: int) -> None:
    """Against running sums in double precision over all ids, which the search in blocks stands for."""
    num_rows = 200
    logits = make_logits(num_rows, num_ids, seed=7)
    logits[:, ::3] = float("-inf")
    logits[:, 1] = -1.0
    draws = [draw(index, seed=index) for index in range(num_rows)]
    cumulative = np.exp(logits.double().numpy()).cumsum(-1)
    expected = [
        int(np.searchsorted(row, uniform(index, index) * row[-1], side="right")) for index, row in enumerate(cumulative)
    ]
    assert draw_tokens(logits, draws) == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-7, 9e-6])
def test_a42_next_to_zero_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits(3).bfloat16()
    draws = [draw(0, temperature=temperature, top_k=50, top_p=0.9), draw(0), draw(1, temperature=temperature)]
    tokens = draw_tokens(logits, draws)
    assert [tokens[0], tokens[2]] == logits.argmax(-1)[[0, 2]].tolist()
    assert tokens[1] == draw_tokens(logits[1:2], [draw(0)])[0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.01])
def test_a42_a_small_temperature_overflows_nothing(temperature: float) -> None:
    logits = make_logits(4) * 1000
    tokens = draw_tokens(logits, [draw(index, temperature=temperature, top_p=0.9) for index in range(4)])
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_whole_row", [True, False])
def test_b24_a_row_that_is_not_finite_fails_alone(bad: float, is_whole_row: bool) -> None:
    logits = make_logits(6)
    draws = [draw(row, temperature=row % 2, top_p=0.9) for row in range(6)]
    healthy = draw_tokens(logits, draws)
    logits[2, slice(None) if is_whole_row else 17] = bad
    logits[3] = float("-inf")
    assert draw_tokens(logits, draws) == [*healthy[:2], None, None, *healthy[4:]]


def test_b24_masked_ids_are_never_drawn_and_harm_nothing() -> None:
    logits = torch.full((100, 50), float("-inf"))
    logits[:, [3, 7]] = 1.0
    draws = [draw(0, temperature=seed % 3, seed=seed) for seed in range(100)]
    assert set(draw_tokens(logits, draws)) == {3, 7}


def test_uniforms_are_in_range_evenly_spread_and_unrelated_between_neighbours() -> None:
    numbers = np.array([[uniform(seed, index) for index in range(100)] for seed in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.03


def test_a_known_value_of_the_hash_stays() -> None:
    """A resumed request must draw the same on a worker of another version."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == pytest.approx(
        [0.8833108082136426, 0.7497482413580301, 0.43152799704850997], abs=0
    )


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"presence_penalty": 0.5}])
def test_only_what_is_allowed_is_drawn_and_by_its_share_of_that(params: dict[str, float]) -> None:
    """The same tokens as from a row that has nothing else."""
    num_ids, some = 700, range(100, 700, 9)
    logits = make_logits(40, num_ids, seed=2)
    among = torch.full_like(logits, -math.inf)
    among[:, list(some)] = logits[:, list(some)]
    mask = torch.from_numpy(mask_of(some, num_ids=num_ids))
    history = TokenHistory(prompt_token_ids=(1,), output_token_ids=(109, 118))
    for temperature in (0.0, 1.0):
        draws = [draw(row, temperature=temperature, seed=row, **params)._replace(history=history) for row in range(40)]
        masked = [one._replace(allowed=mask) for one in draws]
        tokens = draw_tokens(logits, masked)
        assert tokens == draw_tokens(among, draws)
        assert {token for token in tokens if token is not None} <= set(some)


def test_kernel_and_torch_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a share falls on the border of two tokens, which rounding decides."""
    logits = make_logits(300, 2000, seed=9)
    draws = [draw(row, temperature=(0.0, 0.7, 1.0, 1.6)[row % 4], seed=row) for row in range(300)]
    tokens = draw_tokens(logits, draws)
    monkeypatch.setattr(sampler, "can_draw", lambda: False)
    by_torch = draw_tokens(logits, draws)
    assert sum(ours != theirs for ours, theirs in zip(tokens, by_torch, strict=True)) <= 1
