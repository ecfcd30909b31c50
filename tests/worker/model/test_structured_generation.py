"""Structured outputs through the real engine, on tiny random models: whatever the model wants to say, the text keeps to
its grammar, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from tokenizers import Tokenizer

from stallfree_shared.wire import RequestId, SamplingParams, StructuredOutput
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import ModelRunner
from tests.support.random_schemas import JsonSchema, random_schema
from tests.support.tiny_models import build_tiny_model
from tests.worker.model.arrivals import Answer, Arrival, ArrivalsDriver, answer_alone
from tests.worker.model.conftest import tiny_settings
from tests.worker.model.engine_driver import SmallPool
from tests.worker.model.test_structured_output import HEAVY

MAX_TOKENS = 600
"""More than any text of these schemas has, in tokens of a byte or two."""


@pytest.fixture
def runner(tiny_model: Callable[[str], LoadedModel]) -> ModelRunner:
    found = tiny_model("llama").runner
    assert isinstance(found, ModelRunner)
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_folder("llama") / "tokenizer.json"))


def structured(output: StructuredOutput, *, seed: int = 0, **params: object) -> SamplingParams:
    fields = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed, "structured_output": output}
    return SamplingParams.model_validate(fields | params)


def json_schema(schema: JsonSchema) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", definition=json.dumps(schema))


def regex(definition: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", definition=definition)


def arrival(sampling: SamplingParams, *, prompt_length: int = 5, at_step: int = 0) -> Arrival:
    return Arrival(prompt=range(30, 30 + prompt_length), sampling=sampling, at_step=at_step)


def text_of(answer: Answer, tokenizer: Tokenizer) -> str:
    """As the router shows it: the token of a "stop" is no text."""
    assert answer.finish_reason == "stop", (answer.finish_reason, answer.error)
    text: str = tokenizer.decode(answer.token_ids[:-1])
    return text


def validate(text: str, schema: JsonSchema) -> None:
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(json.loads(text))


def schemas(count: int) -> Iterator[JsonSchema]:
    return (random_schema(random.Random(seed)) for seed in range(count))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_random_schemas_are_kept_at_temperature_1(
    family: str, tiny_model: Callable[[str], LoadedModel], tokenizer: Tokenizer
) -> None:
    wanted = list(schemas(12))
    requests = [arrival(structured(json_schema(schema), seed=seed)) for seed, schema in enumerate(wanted)]
    answers = ArrivalsDriver(tiny_model(family).runner, token_budget=16).run(requests)
    for schema, answer in zip(wanted, answers, strict=True):
        validate(text_of(answer, tokenizer), schema)


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        (regex("(ab|cd)[0-9]{2,5}"), "(ab|cd)[0-9]{2,5}"),
        (StructuredOutput(kind="choice", definition='["north", "south", "né"]'), "north|south|né"),
        (
            StructuredOutput(kind="grammar", definition='start: A ("," A)~1..2\nA: /[a-z]{1,3}/'),
            "[a-z]{1,3}(,[a-z]{1,3}){1,2}",
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_kind_is_kept_whatever_the_temperature(
    output: StructuredOutput, pattern: str, temperature: float, runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    requests = [arrival(structured(output, seed=seed, temperature=temperature)) for seed in range(4)]
    for answer in ArrivalsDriver(runner).run(requests):
        assert re.fullmatch(pattern, text_of(answer, tokenizer))


def test_a_json_object_is_json_as_far_as_it_goes(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    output = StructuredOutput(kind="json_object")
    requests = [arrival(structured(output, seed=seed, max_tokens=200)) for seed in range(8)]
    answers = ArrivalsDriver(runner).run(requests)
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
    for answer in answers:
        assert tokenizer.decode(answer.token_ids).startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(text_of(answer, tokenizer)), dict)


def test_max_tokens_cuts_a_structured_output(runner: ModelRunner) -> None:
    answer = answer_alone(runner, arrival(structured(regex("[a-z]{50}"), max_tokens=7)))
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 7)


def test_with_ignore_eos_a_text_goes_on_as_long_as_it_can_and_then_stops(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    answer = answer_alone(runner, arrival(structured(regex("q{1,9}"), ignore_eos=True)))
    assert text_of(answer, tokenizer) == "q" * 9


def test_min_tokens_does_not_keep_a_complete_text_from_stopping(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    answer = answer_alone(runner, arrival(structured(regex("q{1,9}"), min_tokens=50)))
    assert text_of(answer, tokenizer) == "q" * 9


def test_a_stop_id_that_the_grammar_wants_and_min_tokens_bans_fails_and_is_named(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    sampling = structured(regex("q{1,9}"), min_tokens=5, stop_token_ids=frozenset(tokenizer.encode("q").ids))
    free = arrival(SamplingParams(max_tokens=5, temperature=0.0))
    answers = ArrivalsDriver(runner).run([free, arrival(sampling)])
    error = answers[1].error
    assert error is not None
    assert "min_tokens, stop_token_ids and the structured output leave no token" in error.message
    assert answers[0].token_ids == answer_alone(runner, free).token_ids


def test_a_model_without_an_end_of_sequence_id_stops_when_the_text_is_complete(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = build_tiny_model(tmp_path / "llama", eos_token_id=None)
    endless = load_model(tiny_settings(folder)).runner
    assert not endless.eos_token_ids
    answer = answer_alone(endless, arrival(structured(regex("q{1,9}"))))
    assert text_of(answer, tokenizer) == "q" * 9


def test_penalties_and_biases_choose_among_what_is_allowed(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    sampling = structured(
        regex("[xyz]{20}"),
        logit_bias=dict.fromkeys(range(20, 60), 100.0),
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        top_p=0.5,
    )
    answer = answer_alone(runner, arrival(sampling))
    assert re.fullmatch("[xyz]{20}", text_of(answer, tokenizer))


def test_logprobs_are_those_of_the_model_without_the_grammar(runner: ModelRunner) -> None:
    request = arrival(structured(regex("[xyz]{12}"), logprobs=3))
    answer = answer_alone(runner, request)
    text = [*request.prompt, *answer.token_ids]
    scored = answer_alone(runner, Arrival(prompt=text, sampling=SamplingParams(max_tokens=1, prompt_logprobs=3)))
    expected = scored.prompt_logprobs[len(request.prompt) - 1 :]
    assert [one.logprob for one in answer.logprobs] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [[token for token, _ in one.top] for one in answer.logprobs] == [
        [token for token, _ in one.top] for one in expected
    ]


def mixed(count: int) -> list[Arrival]:
    """Every other one free."""
    outputs = [json_schema(schema) for schema in schemas(count)]
    return [
        arrival(structured(output, seed=seed), prompt_length=3 + 7 * seed, at_step=seed)
        if seed % 2
        else arrival(SamplingParams(max_tokens=60, seed=seed, ignore_eos=True), prompt_length=3 + 7 * seed)
        for seed, output in enumerate(outputs)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_free_and_structured_requests_get_the_same_tokens_alone_and_together(
    family: str, tiny_model: Callable[[str], LoadedModel]
) -> None:
    runner, requests = tiny_model(family).runner, mixed(8)
    together = ArrivalsDriver(runner, token_budget=16).run(requests)
    alone = [answer_alone(runner, request) for request in requests]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_preempted_structured_requests_go_on_with_the_same_tokens(runner: ModelRunner) -> None:
    long = regex("[a-z]{80,100}")
    requests = [arrival(structured(long, seed=seed, max_tokens=120), prompt_length=3 + 7 * seed) for seed in range(6)]
    expected = ArrivalsDriver(runner, token_budget=16).run(requests)
    driver = ArrivalsDriver(SmallPool(runner=runner, num_blocks=20), token_budget=16)
    answers = driver.run(requests)
    assert driver.num_preemptions > 0
    assert {one.finish_reason for one in answers} == {"stop"}
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]


def test_a_grammar_that_gets_too_large_ends_its_request_alone(runner: ModelRunner) -> None:
    explosive = StructuredOutput(kind="grammar", definition=f'start: {" ".join(["(a|b|)"] * 3000)}\na: "a"\nb: "b"')
    requests = [arrival(structured(explosive)), *mixed(4)]
    answers = ArrivalsDriver(runner, token_budget=16).run(requests)
    error = answers[0].error
    assert error is not None
    assert error.code == "step_failed"
    assert re.search("structured output cannot go on: .* items", error.message)
    expected = ArrivalsDriver(runner, token_budget=16).run(requests[1:])
    assert [one.token_ids for one in answers[1:]] == [one.token_ids for one in expected]


def test_streams_go_on_while_a_grammar_is_compiled(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    """The stream gets a token with each step; the request whose grammar takes long waits alone."""
    stream = arrival(SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0.0))
    driver = ArrivalsDriver(runner)
    driver.submit(0, stream)
    driver.submit(1, arrival(structured(HEAVY, max_tokens=3)))
    first_of_heavy, num_stream_tokens, num_steps = None, 0, 0
    while first_of_heavy is None:
        events = driver.engine.step().events
        num_steps += 1
        num_stream_tokens += sum(event.request_id == "0" for event in events)
        first_of_heavy = next((event.token_id for event in events if event.request_id == "1"), None)
        assert num_stream_tokens == min(num_steps, stream.sampling.max_tokens)
    assert num_steps > 1
    assert tokenizer.decode([first_of_heavy]) == "{"
    driver.engine.cancel(RequestId("0"))
    driver.engine.cancel(RequestId("1"))
    driver.engine.check_integrity()


def test_what_ends_in_any_way_is_forgotten_with_the_next_step(tiny_folder: Callable[[str], Path]) -> None:
    runner = load_model(tiny_settings(tiny_folder("llama"))).runner
    assert isinstance(runner, ModelRunner)
    free = arrival(SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0))
    leaving = Arrival(prompt=range(9), sampling=structured(regex("[a-z]{40}")), leaves_after=3)
    broken = arrival(structured(regex("(")))
    ends = arrival(structured(regex("q")))
    answers = ArrivalsDriver(runner).run([free, leaving, broken, ends])
    assert len(answers[1].token_ids) == 3
    assert answers[2].error is not None
    assert answers[3].finish_reason == "stop"
    assert runner._structured_outputs.num_requests == 0
