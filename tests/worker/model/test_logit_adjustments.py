"""What bias, penalties and bans make of a row: against the transformers library's own processors, and the formulas
written out token by token."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.step import TokenHistory
from stallfree_worker.model.draw import Draw
from stallfree_worker.model.logit_adjustments import adjust_logits
from stallfree_worker.model.sampler import draw_tokens

NUM_IDS = 60
PROMPT = (3, 3, 3, 7, 9)
OUTPUT = (5, 7, 5, 5)


def make_draw(
    params: Mapping[str, object] | None = None,
    *,
    prompt: tuple[int, ...] = PROMPT,
    output: tuple[int, ...] = OUTPUT,
    banned: frozenset[int] = frozenset(),
) -> Draw:
    return Draw(
        sampling=SamplingParams.model_validate({"max_tokens": 1, **(params or {})}),
        output_index=len(output),
        history=TokenHistory(prompt_token_ids=prompt, output_token_ids=output),
        banned_token_ids=banned,
    )


def make_logits(num_rows: int = 1, seed: int = 0, num_ids: int = NUM_IDS) -> Tensor:
    return torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits: Tensor, *draws: Draw) -> Tensor:
    logits = logits.clone()
    adjust_logits(logits, draws)
    return logits


def by_the_library(logits: Tensor, draw: Draw, *, eos: list[int], min_new_tokens: int) -> Tensor:
    """One row [1, num_ids], by the processors in the order in which `generate` runs them."""
    sampling, history = draw.sampling, draw.history
    assert history is not None
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(MinNewTokensLengthLogitsProcessor(len(history.prompt_token_ids), min_new_tokens, eos))
    ids = torch.LongTensor([history.prompt_token_ids + history.output_token_ids])
    return processors(ids, torch.FloatTensor(logits))


@pytest.mark.parametrize("repetition_penalty", [1.0, 0.5, 1.3, 2.0, 100.0])
@pytest.mark.parametrize("logit_bias", [{}, {3: 1.5, 5: -4.0, 20: 100.0, 41: -100.0}])
@pytest.mark.parametrize("min_tokens", [0, 4, 5])
def test_rows_are_those_of_the_transformers_library(
    repetition_penalty: float, logit_bias: Mapping[int, float], min_tokens: int
) -> None:
    eos = [2, 41]
    draw = make_draw(
        {"repetition_penalty": repetition_penalty, "logit_bias": logit_bias},
        banned=frozenset(eos) if len(OUTPUT) < min_tokens else frozenset(),
    )
    logits = make_logits(seed=3)
    expected = by_the_library(logits, draw, eos=eos, min_new_tokens=min_tokens)
    assert torch.equal(adjusted(logits, draw), expected)


def by_the_formulas(logits: Tensor, draw: Draw) -> list[float]:
    """OpenAI's and CTRL's, token by token, in double precision."""
    sampling, history = draw.sampling, draw.history
    assert history is not None
    seen, counts = {*history.prompt_token_ids, *history.output_token_ids}, Counter(history.output_token_ids)
    row = []
    for token_id, raw in enumerate(logits[0].tolist()):
        value = raw + sampling.logit_bias.get(token_id, 0.0)
        if token_id in seen:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * counts[token_id]
        value -= sampling.presence_penalty * (counts[token_id] > 0)
        row.append(-math.inf if token_id in draw.banned_token_ids else value)
    return row


NOBODY: frozenset[int] = frozenset()
PARAMS: list[tuple[dict[str, object], frozenset[int]]] = [
    ({"presence_penalty": 2.0}, NOBODY),
    ({"frequency_penalty": 0.7}, NOBODY),
    ({"presence_penalty": -1.0, "frequency_penalty": 2.0}, NOBODY),
    ({"repetition_penalty": 1.7}, NOBODY),
    ({"logit_bias": {5: 2.0, 9: -1.0}}, NOBODY),
    ({"presence_penalty": 0.5, "frequency_penalty": -0.3, "repetition_penalty": 0.8, "logit_bias": {7: -9.0}}, NOBODY),
    ({}, frozenset({2, 7})),
    ({}, NOBODY),
]


@pytest.mark.parametrize(("params", "banned"), PARAMS)
@pytest.mark.parametrize("output", [(), (5,), OUTPUT])
def test_rows_are_those_of_the_formulas(
    params: dict[str, object], banned: frozenset[int], output: tuple[int, ...]
) -> None:
    logits = make_logits(seed=1)
    draw = make_draw(params, output=output, banned=banned)
    assert adjusted(logits, draw)[0].tolist() == pytest.approx(by_the_formulas(logits, draw), rel=1e-6, abs=1e-6)


def test_b25_every_row_of_every_order_is_changed_as_if_it_were_alone() -> None:
    logits = make_logits(len(PARAMS), seed=2)
    draws = [make_draw(params, output=tuple(range(row)), banned=banned) for row, (params, banned) in enumerate(PARAMS)]
    alone = [adjusted(logits[row : row + 1], draws[row])[0] for row in range(len(PARAMS))]
    orders = [*itertools.permutations(range(len(PARAMS)), 3), *itertools.permutations(range(len(PARAMS)))]
    for order in random.Random(25).sample(orders, k=500):
        rows = adjusted(logits[list(order)], *(draws[row] for row in order))
        assert all(torch.equal(changed, alone[row]) for changed, row in zip(rows, order, strict=True))


def test_a_row_without_parameters_stays_bit_for_bit() -> None:
    logits = make_logits(3)
    rows = adjusted(logits, make_draw(), make_draw({"repetition_penalty": 2.0}), make_draw())
    assert torch.equal(rows[[0, 2]], logits[[0, 2]])
    assert not torch.equal(rows[1], logits[1])


def test_b27_presence_sees_the_output_only_and_repetition_the_prompt_too() -> None:
    """'Paris Paris Paris', and a near tie between Paris and Rome."""
    paris, rome = 10, 11
    logits = torch.zeros(1, NUM_IDS)
    logits[0, paris], logits[0, rome] = 5.01, 5.0

    def first_and_later(**params: float) -> list[int | None]:
        draws = [
            make_draw({"temperature": 0.0, **params}, prompt=(paris,) * 3, output=output) for output in ((), (paris,))
        ]
        return draw_tokens(logits.expand(2, -1), draws)

    assert first_and_later() == [paris, paris]
    assert first_and_later(presence_penalty=2.0) == [paris, rome]
    assert first_and_later(frequency_penalty=0.5) == [paris, rome]
    assert first_and_later(repetition_penalty=2.0) == [rome, rome]


def test_a_frequency_penalty_grows_with_every_use_and_a_presence_penalty_does_not() -> None:
    logits = make_logits()

    def taken_off(**params: float) -> list[float]:
        rows = [make_draw(params, output=(5,) * uses) for uses in (1, 2, 3)]
        return [round(float(logits[0, 5] - adjusted(logits, row)[0, 5]), 4) for row in rows]

    assert taken_off(frequency_penalty=0.5) == [0.5, 1.0, 1.5]
    assert taken_off(presence_penalty=0.5) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_penalties_change_the_distribution_as_the_formulas_say(temperature: float) -> None:
    params: dict[str, object] = {
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.5,
        "logit_bias": {2: 1.0, 8: -2.0},
        "temperature": temperature,
    }
    logits, num_draws = make_logits(seed=4, num_ids=12), 20_000
    draws = [
        make_draw({**params, "seed": seed}, prompt=(1, 2), output=(3, 3, 5), banned=frozenset({9}))
        for seed in range(num_draws)
    ]
    counts = Counter(draw_tokens(logits.expand(num_draws, -1), draws))
    assert counts[9] == 0
    wanted = torch.tensor(by_the_formulas(logits, draws[0]), dtype=torch.float64)
    expected = {token: share * num_draws for token, share in enumerate((wanted / temperature).softmax(-1).tolist())}
    common = [token for token, count in expected.items() if count > 5]
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in common)
    assert len(common) > 6
    assert chi_square < len(common) - 1 + 5 * math.sqrt(2 * (len(common) - 1))


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e-5])
def test_b24_no_penalty_makes_a_row_infinite(penalty: float) -> None:
    logits = make_logits()
    seen = {*PROMPT, *OUTPUT}
    tokens = draw_tokens(logits, [make_draw({"repetition_penalty": penalty, "temperature": 0.0})])
    assert tokens[0] in seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b24_a_bad_row_is_not_healed_by_a_ban_on_its_bad_id(temperature: float) -> None:
    logits = make_logits(3)
    logits[1, 7] = math.nan
    params = {"temperature": temperature, "presence_penalty": 1.0}
    draws = [make_draw(params, banned=frozenset({7})) for _ in range(3)]
    assert [token is None for token in draw_tokens(logits, draws)] == [False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b24_masks_next_to_greedy_and_random_rows_harm_nobody(temperature: float) -> None:
    logits = make_logits(4)
    logits[:, 10:] = -math.inf
    everything = frozenset(range(NUM_IDS))
    draws = [
        make_draw({"temperature": 0.0, "repetition_penalty": 2.0}),
        make_draw({"temperature": temperature}, banned=everything),
        make_draw({"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {30: 100.0}}),
        make_draw({"temperature": 0.0}),
    ]
    tokens = draw_tokens(logits, draws)
    assert tokens[1] is None
    assert tokens == [draw_tokens(logits[row : row + 1], [draws[row]])[0] for row in range(4)]
    assert all(token is not None and token < 10 for row, token in enumerate(tokens) if row != 1)


def test_the_logits_that_log_probabilities_are_told_of_stay_as_they_are() -> None:
    logits = make_logits(2)
    before = logits.clone()
    draw_tokens(
        logits, [make_draw({"repetition_penalty": 2.0, "temperature": 0.0}), make_draw({"logit_bias": {1: 5.0}})]
    )
    assert torch.equal(logits, before)


def test_penalties_without_the_tokens_so_far_are_a_bug_and_not_ignored() -> None:
    draw = Draw(sampling=SamplingParams(max_tokens=1, presence_penalty=1.0), output_index=1)
    with pytest.raises(ValueError, match="penalties need the tokens"):
        draw_tokens(make_logits(), [draw])
