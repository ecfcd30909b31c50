"""What a client asked for, with every default filled in, checked against the model that will serve it. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable

from stallfree_router.text.prompts import prompt_param
from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError
from stallfree_shared.openai_api import COMPLETION_DEFAULT_MAX_TOKENS, ChatCompletionRequest, CompletionRequest
from stallfree_shared.wire import ModelCard, SamplingParams, StructuredOutput

_SEEDS = 2**64
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: multiples of it lie far apart (Knuth, TAOCP 3, 6.4)."""


def resolve_sampling(
    body: CompletionRequest | ChatCompletionRequest,
    card: ModelCard,
    *,
    num_prompt_tokens: int,
    answer: int,
    structured_output: StructuredOutput | None,
) -> SamplingParams:
    """How answer number `answer` of the `n` to one prompt is drawn.

    Raises:
        ContextLengthExceededError: prompt and wanted output do not fit the model's context.
        InvalidRequestError: a token id lies outside the vocabulary, or min_tokens or max_tokens cannot be.
    """
    defaults = card.sampling_defaults
    top_k = defaults.top_k if body.top_k is None else body.top_k
    max_tokens = _max_tokens(body, card, num_prompt_tokens)
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens may be max_tokens at most, which is {max_tokens}, got {body.min_tokens}", param="min_tokens"
        )
    _check_ids("stop_token_ids", body.stop_token_ids, card)
    _check_ids("logit_bias", body.logit_bias, card)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if body.temperature is None else float(body.temperature),
        top_p=defaults.top_p if body.top_p is None else float(body.top_p),
        top_k=min(max(top_k, 0), card.vocab_size),
        min_p=defaults.min_p if body.min_p is None else float(body.min_p),
        seed=_seed(body.seed, answer),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        presence_penalty=float(body.presence_penalty),
        frequency_penalty=float(body.frequency_penalty),
        repetition_penalty=float(body.repetition_penalty),
        logit_bias=body.logit_bias,
        logprobs=body.wanted_logprobs,
        prompt_logprobs=body.wanted_prompt_logprobs,
        structured_output=structured_output,
    )


def _max_tokens(body: CompletionRequest | ChatCompletionRequest, card: ModelCard, num_prompt_tokens: int) -> int:
    left = card.max_model_len - num_prompt_tokens
    wanted = body.wanted_max_tokens
    if wanted == 0:
        wanted = _least_tokens(body)
    if wanted is None:
        wanted = left if isinstance(body, ChatCompletionRequest) else min(COMPLETION_DEFAULT_MAX_TOKENS, left)
    if left < 1 or wanted > left:
        raise _does_not_fit(prompt_param(body), card.max_model_len, num_prompt_tokens, wanted)
    return wanted


def _least_tokens(body: CompletionRequest | ChatCompletionRequest) -> int:
    """Where only the prompt is to be echoed and scored: a worker has no less than one token to draw."""
    if isinstance(body, CompletionRequest) and body.echo:
        return 1
    raise InvalidRequestError("max_tokens must be at least 1 without echo, got 0", param="max_tokens")


def _does_not_fit(param: str, limit: int, num_prompt_tokens: int, wanted: int) -> ContextLengthExceededError:
    start = f"This model's maximum context length is {limit} tokens. However, "
    if num_prompt_tokens >= limit:
        verb = "have" if param == "messages" else "has"
        message = f"{start}your {param} {verb} {num_prompt_tokens} tokens, which leaves no room for an answer."
    else:
        message = (
            f"{start}you asked for {num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the {param}, {wanted} "
            f"in the answer). At most {limit - num_prompt_tokens} are left for the answer."
        )
    return ContextLengthExceededError(message, param=param)


def _seed(wanted: int | None, answer: int) -> int:
    """Without a seed every answer draws its own. With one, answer 0 has exactly that, as an unsigned number."""
    if wanted is None:
        return random.getrandbits(64)
    return (wanted + answer * _SEED_STRIDE) % _SEEDS


def _check_ids(field: str, token_ids: Iterable[int], card: ModelCard) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequestError(
                f"{field} holds {str(token_id)[:24]}; this model's ids are 0 to {card.vocab_size - 1}", param=field
            )
