"""Requests with every kind of sampling parameter in one engine, coming and going: each gets what it gets alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest

from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.step import Runner
from stallfree_worker.loaded_model import LoadedModel
from tests.worker.model.arrivals import Answer, Arrival, ArrivalsDriver, answer_alone
from tests.worker.model.engine_driver import SmallPool
from tests.worker.model.test_token_equality import make_prompt

FAMILY = "gemma3"
NUM_TOKENS = 12
PROMPT = make_prompt(21, seed=6)
STOP_AT = 5
"""Which output token of the greedy answer is made a stop token."""


@pytest.fixture(scope="module")
def runner(tiny_model: Callable[[str], LoadedModel]) -> Runner:
    return tiny_model(FAMILY).runner


@pytest.fixture(scope="module")
def kinds(runner: Runner) -> dict[str, Arrival]:
    """One request of each kind that B25 names, and some more."""
    greedy = arrival(temperature=0.0)
    stop = answer_alone(runner, greedy).token_ids[STOP_AT]
    return {
        "greedy": greedy,
        "repetition penalty 2": arrival(temperature=0.0, repetition_penalty=2.0),
        "top_k 1, seed 99": arrival(temperature=1.0, top_k=1, seed=99),
        "min_p .2": arrival(temperature=1.2, min_p=0.2, seed=4),
        "logit_bias": arrival(temperature=0.0, logit_bias={stop: -100.0, 20: 3.0, 21: 3.0}),
        "logprobs 5": arrival(temperature=0.9, seed=5, logprobs=5, prompt_logprobs=2),
        "stop id": arrival(temperature=0.0, stop_token_ids=frozenset({stop})),
        "max_tokens 4": arrival(temperature=0.8, seed=6, max_tokens=4, frequency_penalty=1.0),
        "min_tokens": arrival(temperature=0.0, stop_token_ids=frozenset({stop}), min_tokens=NUM_TOKENS),
        "leaves": Arrival(
            prompt=PROMPT, sampling=params(temperature=1.0, presence_penalty=2.0, seed=8), leaves_after=5
        ),
    }


def params(**values: object) -> SamplingParams:
    return SamplingParams.model_validate({"max_tokens": NUM_TOKENS, **values})


def arrival(**values: object) -> Arrival:
    return Arrival(prompt=PROMPT, sampling=params(**values))


def at_step(one: Arrival, step: int) -> Arrival:
    return Arrival(prompt=one.prompt, sampling=one.sampling, at_step=step, leaves_after=one.leaves_after)


@pytest.fixture(scope="module")
def alone(runner: Runner, kinds: Mapping[str, Arrival]) -> dict[str, Answer]:
    return {name: answer_alone(runner, one) for name, one in kinds.items()}


def assert_same(answer: Answer, expected: Answer, what: object) -> None:
    assert answer.error is None
    assert answer.token_ids == expected.token_ids, what
    assert answer.finish_reason == expected.finish_reason, what
    for ours, theirs in ((answer.logprobs, expected.logprobs), (answer.prompt_logprobs, expected.prompt_logprobs)):
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4), what
        assert [len(one.top) for one in ours] == [len(one.top) for one in theirs], what


def test_each_kind_alone_does_what_its_parameters_say(
    alone: Mapping[str, Answer], kinds: Mapping[str, Arrival]
) -> None:
    """Else their equality in a batch would show nothing."""
    greedy = alone["greedy"].token_ids
    assert alone["top_k 1, seed 99"].token_ids == greedy
    assert alone["stop id"].token_ids == greedy[: STOP_AT + 1]
    assert alone["stop id"].finish_reason == "stop"
    (stop,) = kinds["stop id"].sampling.stop_token_ids
    assert alone["min_tokens"].token_ids[:STOP_AT] == greedy[:STOP_AT]
    for name in ("min_tokens", "logit_bias"):
        assert stop not in alone[name].token_ids
        assert len(alone[name].token_ids) == NUM_TOKENS
    assert len(set(alone["repetition penalty 2"].token_ids) | set(PROMPT)) > len({*greedy} | set(PROMPT))
    assert (len(alone["max_tokens 4"].token_ids), alone["max_tokens 4"].finish_reason) == (4, "length")
    assert (len(alone["leaves"].token_ids), alone["leaves"].finish_reason) == (5, None)
    assert len({tuple(answer.token_ids) for answer in alone.values()}) >= len(alone) - 1


def check_order(
    order: tuple[str, ...],
    steps: tuple[int, ...],
    driver: ArrivalsDriver,
    kinds: Mapping[str, Arrival],
    alone: Mapping[str, Answer],
) -> None:
    answers = driver.run([at_step(kinds[name], step) for name, step in zip(order, steps, strict=True)])
    for name, answer in zip(order, answers, strict=True):
        assert_same(answer, alone[name], (order, steps, name))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_b25_any_order_started_up_to_three_steps_apart_gives_what_each_gives_alone(
    seed: int, runner: Runner, kinds: Mapping[str, Arrival], alone: Mapping[str, Answer], *, overlaps: bool
) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        order = tuple(rng.sample(sorted(kinds), k=len(kinds)))
        steps = tuple(rng.randint(0, 3) for _ in order)
        driver = ArrivalsDriver(runner, token_budget=rng.choice((16, 40, 300)), overlaps=overlaps)
        check_order(order, steps, driver, kinds, alone)


def test_b25_every_kind_before_and_after_every_other(
    runner: Runner, kinds: Mapping[str, Arrival], alone: Mapping[str, Answer]
) -> None:
    for number, pair in enumerate(itertools.permutations(kinds, 2)):
        check_order(pair, (0, number % 4), ArrivalsDriver(runner), kinds, alone)


@pytest.mark.slow
def test_b25_three_hundred_more_orders(
    runner: Runner, kinds: Mapping[str, Arrival], alone: Mapping[str, Answer]
) -> None:
    rng = random.Random(25)
    for _ in range(300):
        order = tuple(rng.sample(sorted(kinds), k=len(kinds)))
        steps = tuple(rng.randint(0, 3) for _ in order)
        check_order(order, steps, ArrivalsDriver(runner, token_budget=rng.choice((7, 40, 300))), kinds, alone)


@pytest.mark.parametrize("token_budget", [1, 7, 64])
def test_b27_penalties_look_at_the_same_tokens_however_a_prompt_is_cut(token_budget: int, runner: Runner) -> None:
    """A token's own prompt, and an output that a frequency penalty keeps from repeating itself."""
    prompt = [50, 51, 52] * 14
    for values in (
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "repetition_penalty": 1.2},
        {"presence_penalty": -2.0, "temperature": 1.0, "seed": 3},
    ):
        one = Arrival(prompt=prompt, sampling=params(**{"temperature": 0.0, "max_tokens": 30, **values}))
        assert_same(answer_alone(runner, one, token_budget=token_budget), answer_alone(runner, one), values)


EVERYTHING = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "seed": 77,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {30: 2.0},
    "min_tokens": 30,
    "max_tokens": 40,
    "ignore_eos": True,
}


def test_a44_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch_of_sixteen(runner: Runner) -> None:
    one = arrival(**EVERYTHING)
    expected = answer_alone(runner, one)
    others = [
        Arrival(prompt=make_prompt(5 + 7 * number), sampling=params(max_tokens=30, temperature=1.0, seed=number))
        for number in range(15)
    ]
    for place in (0, 7, 15):
        batch = [*others[:place], one, *others[place:]]
        assert_same(ArrivalsDriver(runner, token_budget=48).run(batch)[place], expected, place)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("token_budget", [4, 512])
def test_b05_penalties_and_seeds_go_on_after_a_preemption_as_if_there_had_been_none(
    token_budget: int, tiny_model: Callable[[str], LoadedModel], *, overlaps: bool
) -> None:
    """On a model with one KV group, so that a pool of 8 blocks holds 128 tokens."""
    runner = tiny_model("llama").runner
    older = Arrival(prompt=make_prompt(33, seed=1), sampling=params(max_tokens=60, temperature=0.0, ignore_eos=True))
    one = Arrival(prompt=make_prompt(40, seed=2), sampling=params(**EVERYTHING))
    pool = SmallPool(runner=runner, num_blocks=8)
    driver = ArrivalsDriver(pool, token_budget=token_budget, first_budget=512, overlaps=overlaps)
    answers = driver.run([older, one])
    assert driver.num_preemptions > 0
    assert_same(answers[1], answer_alone(runner, one), token_budget)
    assert len(answers[1].token_ids) == 40


def test_min_tokens_holds_back_the_models_own_end_too(runner: Runner) -> None:
    (eos,) = runner.eos_token_ids
    wants_to_end = {"temperature": 0.0, "logit_bias": {eos: 100.0}}
    assert answer_alone(runner, arrival(**wants_to_end)).token_ids == [eos]
    answer = answer_alone(runner, arrival(**wants_to_end, min_tokens=5))
    assert answer.token_ids[5:] == [eos]
    assert eos not in answer.token_ids[:5]
    assert answer.finish_reason == "stop"
