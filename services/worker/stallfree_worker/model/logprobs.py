"""How likely tokens were by the model's own distribution: log-softmax of its logits in float32, before temperature,
penalties and masks. Called by `runner`, for drawn tokens and for those of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from stallfree_shared.wire import MAX_LOGPROBS, RequestId, TokenLogprobs
from stallfree_worker.engine.step import Chunk
from stallfree_worker.model.host_numbers import NumberList
from stallfree_worker.model.transfers import to_device

_ROWS_AT_ONCE = 64
"""Bounds memory: a row has up to 262,144 columns of 4 bytes, and is held twice."""
LEAST_LOGPROB = -9999.0
"""Told for -inf, which JSON cannot say."""


def prompt_targets(chunk: Chunk) -> tuple[int, ...]:
    """The prompt tokens that the rows of `chunk` predict: one for each of its first rows, as far as the prompt goes.
    A row predicts the token behind its own, so the last row's is the first of the next chunk."""
    if chunk.sampling.prompt_logprobs is None or chunk.history is None:
        return ()
    first = chunk.num_computed_tokens + 1
    return chunk.history.prompt_token_ids[first : first + len(chunk.token_ids)]


@torch.inference_mode()
def score_prompts(
    chunks: Sequence[Chunk], rows: NumberList, logits_of: Callable[[NumberList], Tensor]
) -> dict[RequestId, tuple[TokenLogprobs, ...] | None]:
    """The `prompt_targets` of each chunk; None where one of its rows is not finite.

    `rows` are those of all targets, and `logits_of` computes the logits of some of them,
    [num_rows, num_ids]. Few exist at a time: those of a whole chunk could take more memory than the rest of the step.
    """
    asked = [
        _Asked(token_id=token_id, num_top=chunk.sampling.prompt_logprobs or 0)
        for chunk in chunks
        for token_id in prompt_targets(chunk)
    ]
    scores: list[TokenLogprobs | None] = []
    for start in range(0, len(asked), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        scores += _score(logits_of(rows.part(start, end)), asked[start:end])
    in_order = iter(scores)
    return {chunk.request_id: _all_or_none(islice(in_order, len(prompt_targets(chunk)))) for chunk in chunks}


@torch.inference_mode()
def score_drawn(
    logits: Tensor, chunks: Sequence[Chunk], token_ids: Sequence[int | None]
) -> dict[RequestId, TokenLogprobs]:
    """logits [len(chunks), num_ids], `token_ids` as drawn from them → for the requests that asked and got a token."""
    asked = {
        row: _Asked(token_id=token_id, num_top=chunk.sampling.logprobs)
        for row, (chunk, token_id) in enumerate(zip(chunks, token_ids, strict=True))
        if token_id is not None and chunk.sampling.logprobs is not None
    }
    scores: dict[RequestId, TokenLogprobs] = {}
    for start in range(0, len(asked), _ROWS_AT_ONCE):
        rows = list(asked)[start : start + _ROWS_AT_ONCE]
        some = _score(logits[rows], [asked[row] for row in rows])
        scores |= {chunks[row].request_id: score for row, score in zip(rows, some, strict=True) if score is not None}
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What one row of logits is asked for."""

    token_id: int
    num_top: int


def _score(logits: Tensor, asked: Sequence[_Asked]) -> list[TokenLogprobs | None]:
    """logits [len(asked), num_ids] → an answer per row; None where it has NaN, +inf or nothing but -inf."""
    logprobs = logits.float().log_softmax(-1)
    tokens = to_device(np.array([one.token_id for one in asked]), logits.device)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
    is_finite = logits.amax(-1).isfinite().tolist()
    tops = _tops(logprobs, max(one.num_top for one in asked))
    return [
        TokenLogprobs(logprob=max(logprob, LEAST_LOGPROB), top=top[: one.num_top]) if finite else None
        for one, logprob, finite, top in zip(asked, own, is_finite, tops, strict=True)
    ]


def _tops(logprobs: Tensor, most_asked: int) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest ids of each row, best first, equal ones by id. As many in every batch, so that what a row is told
    does not depend on what its neighbours asked for."""
    if most_asked == 0:
        return [()] * len(logprobs)
    values, ids = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
    pairs = zip(ids.tolist(), values.clamp_(min=LEAST_LOGPROB).tolist(), strict=True)
    return [tuple(sorted(zip(*pair, strict=True), key=lambda one: (-one[1], one[0]))) for pair in pairs]


def _all_or_none(scores: Iterable[TokenLogprobs | None]) -> tuple[TokenLogprobs, ...] | None:
    found = tuple(scores)
    good = tuple(score for score in found if score is not None)
    return good if len(good) == len(found) else None
