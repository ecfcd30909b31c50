"""Which tokens may come next: text by text, without a model."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from stallfree_shared.wire import RequestId, SamplingParams, StructuredOutput
from stallfree_worker.engine.step import BlockTable, BlockTables, Chunk, StepPlan, TokenHistory
from stallfree_worker.model.grammar_masks import GrammarVocabulary
from stallfree_worker.model.id_masks import unpack
from stallfree_worker.model.structured_output import PATIENCE_SECONDS, StepMasks, StructuredOutputs
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.waiting import wait_until_sync

EOS = 2
CPU = torch.device("cpu")
DIGITS = StructuredOutput(kind="regex", definition="[0-9]{2,4}")
HEAVY_SCHEMA = {"properties": {f"p{i}": {"type": "string", "pattern": "^(.*a){30}$"} for i in range(2000)}}
HEAVY = StructuredOutput(kind="json_schema", definition=json.dumps({"type": "object"} | HEAVY_SCHEMA))
"""Takes some hundred milliseconds to compile."""


@pytest.fixture(scope="module")
def vocabulary(tiny_folder: Callable[[str], Path]) -> GrammarVocabulary:
    return load_vocabulary(tiny_folder("llama") / "tokenizer.json", eos_token_ids=frozenset({EOS}))


@pytest.fixture
def outputs(vocabulary: GrammarVocabulary) -> StructuredOutputs:
    return StructuredOutputs(vocabulary, CPU)


def load_vocabulary(path: Path, *, eos_token_ids: frozenset[int], num_ids: int = VOCAB_SIZE) -> GrammarVocabulary:
    vocabulary = GrammarVocabulary.load(
        path, num_tokenizer_ids=VOCAB_SIZE, num_ids=num_ids, eos_token_ids=eos_token_ids
    )
    assert vocabulary is not None
    return vocabulary


def chunk(
    output: StructuredOutput | None,
    text: Sequence[int] = (),
    *,
    name: str = "r",
    draws: bool = True,
    ignore_eos: bool = False,
) -> Chunk:
    return Chunk(
        request_id=RequestId(name),
        token_ids=(7,),
        num_computed_tokens=0,
        block_tables=BlockTables([BlockTable(blocks=(0,))]),
        sampling=SamplingParams(max_tokens=100, structured_output=output, ignore_eos=ignore_eos),
        output_index=len(text) if draws else None,
        history=TokenHistory(prompt_token_ids=(7,), output_token_ids=tuple(text)) if draws else None,
    )


def plan(*chunks: Chunk, ended: Sequence[str] = ()) -> StepPlan:
    return StepPlan(
        step_id=0,
        chunks=chunks,
        num_decode_tokens=0,
        num_prefill_tokens=len(chunks),
        ended_request_ids=tuple(map(RequestId, ended)),
    )


def _with(chunks: Sequence[Chunk], token_id: int) -> list[Chunk]:
    """The same requests after one token."""
    return [chunk(one.sampling.structured_output, [token_id], name=one.request_id) for one in chunks]


def masks_of(outputs: StructuredOutputs, *chunks: Chunk) -> StepMasks:
    """Those of the first step in which none of them is postponed."""
    found: list[StepMasks] = []

    def is_known() -> bool:
        outputs.begin(plan(*chunks))
        found.append(outputs.finish(chunks))
        return not found[-1].postponed

    wait_until_sync(is_known, timeout_seconds=10)
    return found[-1]


def allowed(masks: StepMasks, name: str = "r") -> set[int]:
    allowed = unpack(masks.allowed_by_request[RequestId(name)], num_ids=VOCAB_SIZE)
    return set(torch.nonzero(allowed).flatten().tolist())


def random_text(outputs: StructuredOutputs, output: StructuredOutput, seed: int) -> list[int]:
    """A random walk through what is allowed, up to an end-of-sequence id."""
    random_ids, text = random.Random(seed), list[int]()
    while True:
        masks = masks_of(outputs, chunk(output, text))
        assert not masks.failure_by_request
        token = random_ids.choice(sorted(allowed(masks)))
        if token == EOS:
            return text
        assert not masks.completed
        text.append(token)


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        (DIGITS, "[0-9]{2,4}"),
        (StructuredOutput(kind="choice", definition='["north", "south", "né\\n"]'), "north|south|né\n"),
        (StructuredOutput(kind="grammar", definition='start: A "-" A\nA: /[a-z]{1,5}/\n'), "[a-z]{1,5}-[a-z]{1,5}"),
        (
            StructuredOutput(kind="json_schema", definition='{"type": "array", "items": {"enum": [1]}, "maxItems": 3}'),
            r"\[\s*\]|\[\s*1\s*(,\s*1\s*){0,2}\]",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_any_walk_through_what_is_allowed_gives_a_text_of_that_kind(
    output: StructuredOutput, pattern: str, outputs: StructuredOutputs, tiny_folder: Callable[[str], Path]
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder("llama") / "tokenizer.json"))
    texts = {tokenizer.decode(random_text(outputs, output, seed)) for seed in range(20)}
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(texts) > 1


def test_a_walk_through_any_json_object_gives_one(
    outputs: StructuredOutputs, tiny_folder: Callable[[str], Path]
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_folder("llama") / "tokenizer.json"))
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": false}'
    output = StructuredOutput(kind="json_schema", definition=schema)
    for seed in range(5):
        assert json.loads(tokenizer.decode(random_text(outputs, output, seed))).keys() <= {"a"}
    masks = masks_of(outputs, chunk(StructuredOutput(kind="json_object")))
    assert {tokenizer.decode([token]) for token in allowed(masks)} == {"{"}


def test_no_special_token_is_text(outputs: StructuredOutputs) -> None:
    masks = masks_of(outputs, chunk(StructuredOutput(kind="regex", definition="(?s:.*)")))
    assert not allowed(masks) & {1, 3, 4, 5, 6}
    assert EOS in allowed(masks)


def test_a_text_that_can_only_end_is_complete(outputs: StructuredOutputs) -> None:
    one = StructuredOutput(kind="regex", definition="a")
    first = masks_of(outputs, chunk(one))
    assert not first.completed
    (a,) = allowed(first)
    masks = masks_of(outputs, chunk(one, [a]))
    assert masks.completed == {"r"}
    assert allowed(masks) == {EOS}


def test_with_ignore_eos_a_text_goes_on_as_long_as_it_can(outputs: StructuredOutputs) -> None:
    some = StructuredOutput(kind="regex", definition="x{1,2}")
    (a,) = allowed(masks_of(outputs, chunk(some, ignore_eos=True)))
    assert allowed(masks_of(outputs, chunk(some, [a], name="free"), chunk(some, [a], ignore_eos=True)), "free") == {
        a,
        EOS,
    }
    assert allowed(masks_of(outputs, chunk(some, [a], ignore_eos=True))) == {a}
    masks = masks_of(outputs, chunk(some, [a, a], ignore_eos=True))
    assert masks.completed == {"r"}
    assert allowed(masks) == {EOS}


def test_without_an_end_of_sequence_id_a_complete_text_is_left_any_id(tiny_folder: Callable[[str], Path]) -> None:
    path = tiny_folder("llama") / "tokenizer.json"
    outputs = StructuredOutputs(load_vocabulary(path, eos_token_ids=frozenset()), CPU)
    some = StructuredOutput(kind="regex", definition="x{1,2}")
    (a,) = allowed(masks_of(outputs, chunk(some)))
    assert allowed(masks_of(outputs, chunk(some, [a]))) == {a}
    masks = masks_of(outputs, chunk(some, [a, a]))
    assert masks.completed == {"r"}
    assert allowed(masks) == {0}


def test_ids_beyond_the_logits_are_never_asked_for(tiny_folder: Callable[[str], Path]) -> None:
    path = tiny_folder("llama") / "tokenizer.json"
    outputs = StructuredOutputs(load_vocabulary(path, eos_token_ids=frozenset({EOS, 310}), num_ids=300), CPU)
    masks = masks_of(outputs, chunk(StructuredOutput(kind="regex", definition="(?s:.*)")))
    assert masks.allowed_by_request[RequestId("r")].shape == (10,)
    assert max(allowed(masks)) < 300
    assert EOS in allowed(masks)


def test_the_matcher_stands_where_the_text_does_whatever_came_before(outputs: StructuredOutputs) -> None:
    digits = sorted(allowed(masks_of(outputs, chunk(DIGITS))))
    texts = [digits[:2], digits[:4], digits[1:3], [], digits[:3], digits[:4]]
    for text in texts:
        fresh = masks_of(outputs, chunk(DIGITS, text, name="fresh"))
        assert allowed(masks_of(outputs, chunk(DIGITS, text))) == allowed(fresh, "fresh")
        outputs.begin(plan(ended=["fresh"]))


def test_a_grammar_is_forgotten_with_its_request(outputs: StructuredOutputs) -> None:
    masks_of(outputs, chunk(DIGITS, name="a"), chunk(DIGITS, name="b"))
    assert outputs.num_requests == 2
    outputs.begin(plan(ended=["a", "unknown"]))
    assert outputs.num_requests == 1


def test_an_id_may_be_used_again_for_another_grammar(outputs: StructuredOutputs) -> None:
    masks_of(outputs, chunk(DIGITS))
    letter = StructuredOutput(kind="regex", definition="x")
    reused = chunk(letter)
    outputs.begin(plan(reused, ended=["r"]))
    assert len(allowed(masks_of(outputs, reused))) == 1


def test_requests_without_a_structured_output_are_no_business_of_it(outputs: StructuredOutputs) -> None:
    assert masks_of(outputs, chunk(None)) == StepMasks()
    masks = masks_of(outputs, chunk(None, name="free"), chunk(DIGITS))
    assert masks.allowed_by_request.keys() == {"r"}


def test_a_grammar_is_compiled_while_the_prompt_is_computed(outputs: StructuredOutputs) -> None:
    outputs.begin(plan(chunk(DIGITS, draws=False)))
    assert outputs.finish([]) == StepMasks()
    assert outputs.num_requests == 1
    assert len(allowed(masks_of(outputs, chunk(DIGITS)))) == 10


def test_a_step_does_not_wait_for_a_slow_grammar(outputs: StructuredOutputs) -> None:
    masks_of(outputs, chunk(DIGITS))
    chunks = [chunk(HEAVY, name="heavy"), chunk(DIGITS)]
    outputs.begin(plan(*chunks))
    wait_until_sync(lambda: not outputs.finish(chunks[1:]).postponed, timeout_seconds=10)
    started_at = time.perf_counter()
    masks = outputs.finish(chunks)
    assert time.perf_counter() - started_at < 0.1
    assert masks.postponed == {"heavy"}
    assert len(allowed(masks)) == 10
    assert len(allowed(masks_of(outputs, *chunks), "heavy")) == 1  # the brace


def test_no_mask_waits_behind_grammars_that_are_compiled(outputs: StructuredOutputs) -> None:
    digit = min(allowed(masks_of(outputs, chunk(DIGITS))))
    heavy, next_digit = [chunk(HEAVY, name=f"heavy {n}") for n in range(24)], chunk(DIGITS, [digit])
    outputs.begin(plan(*heavy, next_digit))
    wait_until_sync(lambda: not outputs.finish([next_digit]).postponed, timeout_seconds=10)
    assert len(outputs.finish(heavy).postponed) > len(heavy) // 2
    outputs.begin(plan(ended=[one.request_id for one in heavy]))


def test_a_grammar_whose_request_is_gone_is_not_compiled_any_more(outputs: StructuredOutputs) -> None:
    started_at = time.perf_counter()
    masks_of(outputs, chunk(HEAVY))
    seconds_of_one = time.perf_counter() - started_at
    leaving = [chunk(HEAVY, name=f"leaving {n}") for n in range(100)]
    outputs.begin(plan(*leaving))
    started_at = time.perf_counter()
    outputs.begin(plan(ended=[one.request_id for one in leaving]))
    masks_of(outputs, chunk(DIGITS, name="next"))
    assert time.perf_counter() - started_at < 6 * seconds_of_one, "those that had begun, at most"


def test_the_next_mask_is_begun_by_the_draw(outputs: StructuredOutputs) -> None:
    first = chunk(DIGITS)
    token = min(allowed(masks := masks_of(outputs, first)))
    outputs.expect([first], [token], masks)
    following = chunk(DIGITS, [token])

    def is_known() -> bool:  # with no `begin` for it
        return RequestId("r") in outputs.finish([following]).allowed_by_request

    wait_until_sync(is_known, timeout_seconds=10)


def test_what_was_drawn_without_a_mask_is_no_part_of_the_text(outputs: StructuredOutputs) -> None:
    first = chunk(DIGITS)
    wrong = min(set(range(VOCAB_SIZE)) - allowed(masks_of(outputs, first)))
    postponed = StepMasks(postponed=frozenset({RequestId("r")}))
    outputs.expect([first], [wrong], postponed)
    assert not masks_of(outputs, chunk(DIGITS)).failure_by_request
    # while a drawn one is taken at its word: that such a token is in the text fails the request
    outputs.expect([first], [wrong], masks_of(outputs, first))
    assert masks_of(outputs, chunk(DIGITS, [wrong])).failure_by_request


def test_a_mask_keeps_no_other_alive(outputs: StructuredOutputs) -> None:
    chunks = [chunk(DIGITS, name=name) for name in ("a", "b", "c")]
    digit = min(allowed(masks_of(outputs, *chunks), "a"))
    for number, masks in enumerate([masks_of(outputs, *chunks), masks_of(outputs, *_with(chunks, digit))]):
        assert len(masks.allowed_by_request) == 3, number
        for mask in masks.allowed_by_request.values():
            assert mask.untyped_storage().nbytes() == 4 * -(-VOCAB_SIZE // 32)


def test_a_grammar_that_takes_too_long_fails_its_request_alone(vocabulary: GrammarVocabulary) -> None:
    times = iter([0.0, 0.0, *[PATIENCE_SECONDS + 1] * 1000])
    outputs = StructuredOutputs(vocabulary, CPU, clock=lambda: next(times))
    chunks = [chunk(HEAVY, name="heavy"), chunk(DIGITS)]
    outputs.begin(plan(*chunks))
    wait_until_sync(lambda: not outputs.finish(chunks[1:]).postponed, timeout_seconds=10)
    masks = outputs.finish(chunks)
    assert masks.failure_by_request.keys() == {"heavy"}
    assert "longer than 10 seconds" in masks.failure_by_request[RequestId("heavy")]
    assert len(allowed(masks)) == 10


@pytest.mark.parametrize(
    ("output", "text", "reason"),
    [
        (StructuredOutput(kind="regex", definition="("), [], "unclosed group"),
        (StructuredOutput(kind="grammar", definition='start: start "a"'), [], "cannot go on: NoExtension"),
        (StructuredOutput(kind="json_schema", definition="no json"), [], "cannot begin"),
        (DIGITS, [EOS], "cannot go on"),
        (DIGITS, [VOCAB_SIZE + 5], "cannot go on"),
    ],
)
def test_what_cannot_go_on_fails_its_request_alone(
    output: StructuredOutput, text: list[int], reason: str, outputs: StructuredOutputs
) -> None:
    masks_of(outputs, chunk(DIGITS, name="good"))
    masks_of(outputs, chunk(output, name="bad"))
    masks = masks_of(outputs, chunk(DIGITS, name="good"), chunk(output, text, name="bad"))
    assert masks.failure_by_request.keys() == {"bad"}
    assert reason in masks.failure_by_request[RequestId("bad")]
    assert len(allowed(masks, "good")) == 10


def test_a_tokenizer_that_cannot_be_read_turns_structured_output_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    vocabulary = GrammarVocabulary.load(path, num_tokenizer_ids=1, num_ids=1, eos_token_ids=frozenset({0}))
    assert vocabulary is None
    assert "structured output is off" in caplog.text
    masks = masks_of(StructuredOutputs(vocabulary, CPU), chunk(DIGITS))
    assert "does not allow structured output" in masks.failure_by_request[RequestId("r")]
