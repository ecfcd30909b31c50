"""What a body asks of the sampler, as the worker is told."""

from __future__ import annotations

import pytest

from stallfree_router.sampling import resolve_sampling
from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.openai_api import ChatCompletionRequest, CompletionRequest
from stallfree_shared.wire import SamplingParams, StructuredOutput
from tests.support.scripted import scripted_card

CARD = scripted_card(max_model_len=100)


def completion(**fields: object) -> SamplingParams:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})
    return resolve_sampling(body, CARD, num_prompt_tokens=10, answer=0, structured_output=None)


def chat(**fields: object) -> SamplingParams:
    messages = [{"role": "user", "content": "x"}]
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields})
    return resolve_sampling(body, CARD, num_prompt_tokens=10, answer=0, structured_output=None)


def test_every_field_reaches_the_worker() -> None:
    fields = {
        "max_tokens": 9, "min_tokens": 4, "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5}, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7,
        "stop_token_ids": [5], "ignore_eos": True, "prompt_logprobs": 1,
    }  # fmt: skip
    expected = SamplingParams(
        max_tokens=9, min_tokens=4, presence_penalty=-2.0, frequency_penalty=0.5, repetition_penalty=2.0,
        logit_bias={5: -100.0, 6: 1.5}, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, seed=7,
        stop_token_ids=frozenset({5}), ignore_eos=True, prompt_logprobs=1, logprobs=2,
    )  # fmt: skip
    assert completion(**fields, logprobs=2) == expected
    assert chat(**fields, logprobs=True, top_logprobs=2) == expected


def test_nothing_asked_for_is_nothing_done() -> None:
    plain = completion(seed=0)
    assert plain == SamplingParams(max_tokens=16)
    assert chat(seed=0) == SamplingParams(max_tokens=90)


def test_a_structured_output_is_handed_on() -> None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x"})
    wanted = StructuredOutput(kind="regex", definition="a+")
    sampling = resolve_sampling(body, CARD, num_prompt_tokens=10, answer=0, structured_output=wanted)
    assert sampling.structured_output == wanted


def test_min_tokens_may_be_max_tokens_at_most() -> None:
    assert completion(min_tokens=16).min_tokens == 16
    assert chat(min_tokens=90).min_tokens == 90
    for fields in ({"min_tokens": 17}, {"min_tokens": 6, "max_tokens": 5}):
        with pytest.raises(InvalidRequestError, match=r"max_tokens at most, which is (16|5), got (17|6)") as error:
            completion(**fields)
        assert error.value.param == "min_tokens"


@pytest.mark.parametrize("token_id", [CARD.vocab_size, 191222])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_a29_an_id_outside_the_vocabulary_is_refused(field: str, token_id: int) -> None:
    value: object = {str(token_id): -100} if field == "logit_bias" else [token_id]
    with pytest.raises(InvalidRequestError, match=f"{field} holds {token_id}; .* 0 to {CARD.vocab_size - 1}") as error:
        completion(**{field: value})
    assert error.value.param == field


def test_a03_no_token_at_all_is_for_an_echo_only() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 1
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1 without echo, got 0"):
        completion(max_tokens=0)
