"""What a submit must keep to besides the types of its fields: ids that the model knows, and bounds on what each token
costs. Called by `connections.Connections.submit`, so that the engine never sees what it could not compute. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.wire import ModelCard, SubmitRequest

MAX_LOGIT_BIAS = 100.0
"""OpenAI's limit, in both directions."""
MAX_ADJUSTED_IDS = 1024
"""Most ids of `logit_bias` and of `stop_token_ids`: each of them is work in every step."""


def check_submit(submit: SubmitRequest, card: ModelCard) -> None:
    """Raises `InvalidRequestError` naming field, limit and value."""
    sampling = submit.sampling
    _check_ids("prompt_token_ids", submit.prompt_token_ids, card.vocab_size)
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if len(ids) > MAX_ADJUSTED_IDS:
            raise InvalidRequestError(
                f"{field} may name up to {MAX_ADJUSTED_IDS} token ids, and names {len(ids)}", param=field
            )
        _check_ids(field, ids, card.vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # NaN is not
            raise InvalidRequestError(
                f"logit_bias must lie in -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, and that of token {token_id} is "
                f"{bias}",
                param="logit_bias",
            )
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens, {sampling.max_tokens}, and is {sampling.min_tokens}",
            param="min_tokens",
        )


def _check_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    smallest, largest = min(token_ids), max(token_ids)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise InvalidRequestError(f"{field} must lie in 0 to {vocab_size - 1}, and one is {wrong}", param=field)
