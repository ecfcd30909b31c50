"""Log-probabilities of drawn tokens and of prompts, against log-softmax over the transformers library's own forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stallfree_shared.wire import MAX_LOGPROBS, RequestId, SamplingParams, TokenLogprobs
from stallfree_worker.engine.step import BlockTable, BlockTables, Chunk, TokenHistory
from stallfree_worker.loaded_model import LoadedModel
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.logprobs import prompt_targets, score_drawn, score_prompts
from tests.worker.model.arrivals import Answer, Arrival, ArrivalsDriver, answer_alone
from tests.worker.model.engine_driver import SmallPool
from tests.worker.model.test_token_equality import make_prompt

ReferenceLogprobs = Callable[[Sequence[int]], Tensor]
FAMILY = "llama"
PROMPT = make_prompt(129)


@pytest.fixture(scope="module")
def reference(tiny_folder: Callable[[str], Path]) -> ReferenceLogprobs:
    """Token ids → their log-probabilities [num_tokens - 1, num_ids]: row `i` is of what comes behind token `i`."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(FAMILY), dtype=torch.float32)

    def logprobs(token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return torch.as_tensor(model(torch.tensor([list(token_ids)])).logits[0, :-1].log_softmax(-1))

    return logprobs


def assert_is(told: Sequence[TokenLogprobs], rows: Tensor, token_ids: Sequence[int], num_top: int) -> None:
    """`rows` [len(token_ids), num_ids] are the library's, of each of `token_ids`."""
    assert len(told) == len(token_ids) == len(rows)
    for one, row, token_id in zip(told, rows, token_ids, strict=True):
        assert one.logprob == pytest.approx(float(row[token_id]), abs=2e-4)
        assert len(one.top) == num_top
        best = row.topk(num_top)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def assert_prompt_is_told(answer: Answer, prompt: Sequence[int], reference: ReferenceLogprobs, num_top: int) -> None:
    assert_is(answer.prompt_logprobs, reference(prompt), prompt[1:], num_top)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drawn_tokens_are_told_with_the_log_softmax_of_the_raw_logits(
    num_top: int, temperature: float, tiny_model: Callable[[str], LoadedModel], reference: ReferenceLogprobs
) -> None:
    """Whatever they are drawn with: temperature, penalties, bias and a ban change none of it."""
    sampling = SamplingParams(
        max_tokens=12,
        temperature=temperature,
        top_p=0.9,
        seed=3,
        presence_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias={20: 4.0},
        min_tokens=12,
        logprobs=num_top,
    )
    answer = answer_alone(tiny_model(FAMILY).runner, Arrival(prompt=PROMPT, sampling=sampling))
    rows = reference([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
    assert_is(answer.logprobs, rows, answer.token_ids, num_top)
    assert answer.prompt_logprobs == []


@pytest.mark.parametrize("token_budget", [1, 7, 64, 128, 129, 1000])
def test_every_prompt_token_but_the_first_is_told_once_across_chunk_borders(
    token_budget: int, tiny_model: Callable[[str], LoadedModel], reference: ReferenceLogprobs
) -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=5)
    runner = tiny_model(FAMILY).runner
    answer = answer_alone(runner, Arrival(prompt=PROMPT, sampling=sampling), token_budget=token_budget)
    assert_prompt_is_told(answer, PROMPT, reference, num_top=5)
    assert_is(answer.logprobs, reference([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :], answer.token_ids, 2)
    early = [event for event in answer.events if event.token_id is None]
    assert len(early) == -(-len(PROMPT) // token_budget) - 1
    assert all(event.output_index == 0 and not event.finish_reason and event.prompt_logprobs for event in early)


def test_b16_a_prompt_of_several_chunks_with_one_output_token_is_scored_whole(
    tiny_model: Callable[[str], LoadedModel], reference: ReferenceLogprobs
) -> None:
    prompt = make_prompt(200)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, prompt_logprobs=0)
    answer = answer_alone(tiny_model(FAMILY).runner, Arrival(prompt=prompt, sampling=sampling), token_budget=64)
    assert_prompt_is_told(answer, prompt, reference, num_top=0)
    assert len(answer.prompt_logprobs) == 199
    assert answer.finish_reason == "length"


def test_a_prompt_of_one_token_has_no_log_probabilities(tiny_model: Callable[[str], LoadedModel]) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
    answer = answer_alone(tiny_model(FAMILY).runner, Arrival(prompt=[9], sampling=sampling))
    assert answer.prompt_logprobs == []
    assert len(answer.token_ids) == 2


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // 16)


@pytest.mark.parametrize("token_budget", [4, 20, 512])
def test_defect_4_a_preempted_prompt_is_told_once_and_its_tokens_keep_theirs(
    token_budget: int, tiny_model: Callable[[str], LoadedModel], reference: ReferenceLogprobs
) -> None:
    """An older request grows and squeezes it out: in the midst of its prompt, or later."""
    older, younger = make_prompt(33, seed=1), make_prompt(100, seed=2)
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=7, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    num_blocks = num_blocks_of(33) + num_blocks_of(100) + 1
    driver = ArrivalsDriver(
        SmallPool(runner=tiny_model(FAMILY).runner, num_blocks=num_blocks), token_budget=token_budget
    )
    growing = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    _, answer = driver.run([Arrival(prompt=older, sampling=growing), Arrival(prompt=younger, sampling=sampling)])
    assert driver.num_preemptions > 0
    assert driver.num_recomputed_tokens > 0
    assert_prompt_is_told(answer, younger, reference, num_top=1)
    assert_is(answer.logprobs, reference([*younger, *answer.token_ids])[99:], answer.token_ids, 1)
    alone = answer_alone(tiny_model(FAMILY).runner, Arrival(prompt=younger, sampling=sampling))
    assert answer.token_ids == alone.token_ids


@pytest.mark.parametrize("num_chunks", [1, 5, 9])
def test_b14_a_request_that_leaves_in_mid_prefill_is_told_nothing_more(
    num_chunks: int, tiny_model: Callable[[str], LoadedModel]
) -> None:
    runner = tiny_model(FAMILY).runner
    driver = ArrivalsDriver(runner, token_budget=64)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    arrival = Arrival(prompt=make_prompt(640), sampling=sampling)
    driver.submit(0, arrival)
    told = sum(len(event.prompt_logprobs or ()) for _ in range(num_chunks) for event in driver.engine.step().events)
    assert told == 64 * num_chunks
    assert driver.engine.cancel(RequestId("0"))
    assert driver.engine.step().events == ()
    assert driver.engine.status().num_free_blocks == runner.num_blocks
    assert driver.run([arrival])[0].token_ids == answer_alone(runner, arrival).token_ids


def test_neighbours_with_and_without_log_probabilities_change_nothing(
    tiny_model: Callable[[str], LoadedModel],
) -> None:
    runner = tiny_model(FAMILY).runner
    arrivals = [
        Arrival(
            prompt=make_prompt(20 + number),
            sampling=SamplingParams(
                max_tokens=6, temperature=0.8, seed=number, logprobs=logprobs, prompt_logprobs=prompt_logprobs
            ),
            at_step=number % 3,
        )
        for number, (logprobs, prompt_logprobs) in enumerate([(None, None), (0, 3), (20, None), (5, 0), (None, 20)])
    ]
    for arrival, answer in zip(arrivals, ArrivalsDriver(runner, token_budget=16).run(arrivals), strict=True):
        alone = answer_alone(runner, arrival)
        assert answer.token_ids == alone.token_ids
        for ours, theirs in ((answer.logprobs, alone.logprobs), (answer.prompt_logprobs, alone.prompt_logprobs)):
            assert [[token for token, _ in one.top] for one in ours] == [
                [token for token, _ in one.top] for one in theirs
            ]
            assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


def make_chunk(*, first: int, length: int, prompt: tuple[int, ...], num_top: int | None = 3, name: str = "a") -> Chunk:
    """Tokens of `prompt` and, behind it, of an output."""
    tokens = (*prompt, *range(100, 200))
    return Chunk(
        request_id=RequestId(name),
        token_ids=tokens[first : first + length],
        num_computed_tokens=first,
        block_tables=BlockTables([BlockTable(blocks=(0,))]),
        sampling=SamplingParams(max_tokens=1, prompt_logprobs=num_top, logprobs=num_top),
        output_index=None,
        history=TokenHistory(prompt_token_ids=prompt, output_token_ids=()),
    )


@pytest.mark.parametrize(
    ("first", "length", "targets"),
    [(0, 2, (11, 12)), (0, 5, (11, 12, 13, 14)), (2, 2, (13, 14)), (4, 1, ()), (2, 9, (13, 14)), (6, 1, ())],
)
def test_a_row_predicts_the_prompt_token_behind_its_own(first: int, length: int, targets: tuple[int, ...]) -> None:
    assert prompt_targets(make_chunk(first=first, length=length, prompt=(10, 11, 12, 13, 14))) == targets


def test_nobody_who_did_not_ask_is_scored() -> None:
    assert prompt_targets(make_chunk(first=0, length=2, prompt=(1, 2, 3), num_top=None)) == ()


def test_rows_are_computed_a_few_at_a_time_and_in_order() -> None:
    prompt = tuple(range(300))
    chunks = [make_chunk(first=0, length=150, prompt=prompt), make_chunk(first=40, length=20, prompt=prompt, name="b")]
    logits = torch.randn(170, 512, generator=torch.Generator().manual_seed(1))
    sizes: list[int] = []

    def logits_of(rows: NumberList) -> Tensor:
        sizes.append(len(rows))
        return logits[rows.tolist()]

    scores = score_prompts(chunks, NumberList.of(range(170)), logits_of)
    assert max(sizes) <= 64
    assert sum(sizes) == 170
    expected = logits.log_softmax(-1)
    first, second = scores[RequestId("a")], scores[RequestId("b")]
    assert first is not None
    assert second is not None
    targets = [*range(1, 151), *range(41, 61)]
    assert_is([*first, *second], expected, targets, num_top=3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b24_a_prompt_with_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    prompt = tuple(range(50))
    chunks = [make_chunk(first=0, length=10, prompt=prompt, name=name) for name in ("a", "b", "c")]
    logits = torch.randn(30, 64)
    logits[14, 3] = bad
    scores = score_prompts(chunks, NumberList.of(range(30)), lambda rows: logits[rows.tolist()])
    assert [scores[RequestId(name)] is None for name in ("a", "b", "c")] == [False, True, False]


def test_minus_infinity_is_told_as_a_number_that_json_has() -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, :2] = torch.tensor([1.0, 2.0])
    chunk = make_chunk(first=0, length=1, prompt=(5, 6), num_top=4)
    told = score_drawn(logits, [chunk], [7])[RequestId("a")]
    assert told.logprob == -9999.0
    assert [logprob for _, logprob in told.top[2:]] == [-9999.0, -9999.0]
    assert TokenLogprobs.model_validate_json(told.model_dump_json()) == told


def test_equal_logits_are_told_in_the_order_of_their_ids() -> None:
    told = score_drawn(torch.zeros(1, MAX_LOGPROBS), [make_chunk(first=0, length=1, prompt=(5, 6), num_top=9)], [7])
    assert [token for token, _ in told[RequestId("a")].top] == list(range(9))
