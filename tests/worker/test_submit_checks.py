"""What is refused before the engine sees it, with field, limit and value named."""

from __future__ import annotations

import math

import pytest

from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.wire import ConnectionId, ModelCard, RequestId, SamplingParams, SubmitRequest
from stallfree_worker.submit_checks import check_submit

CARD = ModelCard(model="m", max_model_len=100, vocab_size=1000, eos_token_ids=frozenset({2}), tokenizer_sha256="0" * 64)


def make_submit(prompt: tuple[int, ...] = (1, 999), **sampling: object) -> SubmitRequest:
    return SubmitRequest(
        request_id=RequestId("r"),
        attempt=1,
        connection_id=ConnectionId("c"),
        prompt_token_ids=prompt,
        sampling=SamplingParams.model_validate({"max_tokens": 10, **sampling}),
        expected_output_tokens=1.0,
    )


@pytest.mark.parametrize("token_id", [-1, 1000, 1010])
@pytest.mark.parametrize("field", ["prompt_token_ids", "logit_bias", "stop_token_ids"])
def test_b28_ids_beyond_the_tokenizer_are_refused_in_every_field(field: str, token_id: int) -> None:
    """The model may have padded rows there; its tokenizer has no text for them."""
    submits = {
        "prompt_token_ids": make_submit((5, token_id)),
        "logit_bias": make_submit(logit_bias={5: 1.0, token_id: 1.0}),
        "stop_token_ids": make_submit(stop_token_ids=frozenset({5, token_id})),
    }
    with pytest.raises(InvalidRequestError, match=rf"{field} must lie in 0 to 999, and one is {token_id}") as refusal:
        check_submit(submits[field], CARD)
    assert refusal.value.param == field


@pytest.mark.parametrize("bias", [100.5, -101.0, math.inf, -math.inf, math.nan])
def test_a_bias_beyond_its_limits_is_refused(bias: float) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"logit_bias must lie in -100 to 100, and that of token 7"
    ) as refusal:
        check_submit(make_submit(logit_bias={6: 1.0, 7: bias}), CARD)
    assert refusal.value.param == "logit_bias"


def test_more_biases_or_stop_ids_than_a_step_should_carry_are_refused() -> None:
    card = CARD.model_copy(update={"vocab_size": 5000})
    check_submit(make_submit(logit_bias=dict.fromkeys(range(1024), 1.0)), card)
    with pytest.raises(InvalidRequestError, match="logit_bias may name up to 1024 token ids, and names 1025"):
        check_submit(make_submit(logit_bias=dict.fromkeys(range(1025), 1.0)), card)
    with pytest.raises(InvalidRequestError, match="stop_token_ids may name up to 1024 token ids, and names 1025"):
        check_submit(make_submit(stop_token_ids=frozenset(range(1025))), card)


def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    check_submit(make_submit(min_tokens=10), CARD)
    with pytest.raises(InvalidRequestError, match="min_tokens must be at most max_tokens, 10, and is 11") as refusal:
        check_submit(make_submit(min_tokens=11), CARD)
    assert refusal.value.param == "min_tokens"


def test_whatever_lies_within_all_limits_is_let_in() -> None:
    bounds = {0: -100.0, 999: 100.0}
    check_submit(make_submit((0, 999), logit_bias=bounds, stop_token_ids=frozenset({0, 999})), CARD)
    check_submit(make_submit(), CARD)
