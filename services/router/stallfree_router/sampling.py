"""What a client asked for, with every default filled in, checked against the model that will serve it. Pure."""

from __future__ import annotations

import random

from stallfree_router.text.prompts import prompt_param
from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError
from stallfree_shared.openai_api import COMPLETION_DEFAULT_MAX_TOKENS, ChatCompletionRequest, CompletionRequest
from stallfree_shared.wire import ModelCard, SamplingParams

_SEEDS = 2**64
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: multiples of it lie far apart (Knuth, TAOCP 3, 6.4)."""


def resolve_sampling(
    body: CompletionRequest | ChatCompletionRequest, card: ModelCard, *, num_prompt_tokens: int, answer: int
) -> SamplingParams:
    """How answer number `answer` of the `n` to one prompt is drawn.

    Raises:
        ContextLengthExceededError: prompt and wanted output do not fit the model's context.
        InvalidRequestError: a stop token id lies outside the vocabulary.
    """
    defaults = card.sampling_defaults
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        max_tokens=_max_tokens(body, card, num_prompt_tokens),
        temperature=defaults.temperature if body.temperature is None else float(body.temperature),
        top_p=defaults.top_p if body.top_p is None else float(body.top_p),
        top_k=min(max(top_k, 0), card.vocab_size),
        min_p=defaults.min_p if body.min_p is None else float(body.min_p),
        seed=_seed(body.seed, answer),
        stop_token_ids=_stop_token_ids(body.stop_token_ids, card),
        ignore_eos=body.ignore_eos,
    )


def _max_tokens(body: CompletionRequest | ChatCompletionRequest, card: ModelCard, num_prompt_tokens: int) -> int:
    left = card.max_model_len - num_prompt_tokens
    wanted = body.wanted_max_tokens
    if wanted is None:
        wanted = left if isinstance(body, ChatCompletionRequest) else min(COMPLETION_DEFAULT_MAX_TOKENS, left)
    if left < 1 or wanted > left:
        raise _does_not_fit(prompt_param(body), card.max_model_len, num_prompt_tokens, wanted)
    return wanted


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


def _stop_token_ids(wanted: list[int], card: ModelCard) -> frozenset[int]:
    for token_id in wanted:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids holds {str(token_id)[:24]}; this model's ids are 0 to {card.vocab_size - 1}",
                param="stop_token_ids",
            )
    return frozenset(wanted)
