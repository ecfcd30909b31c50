"""What a request changes in its own row of logits before its token is drawn: bias, penalties, ids that may not come.

The order is that of vLLM's sampler and of the transformers library's `generate`, so that the same parameters mean the
same text:

1. `logit_bias` is added: it corrects the model, and whatever follows sees the corrected model;
2. `repetition_penalty` (Keskar et al. 2019, CTRL, §4.1) of tokens in prompt or output: it divides positive logits and
   multiplies negative ones, so it must see a sign that 3 has not yet changed;
3. `frequency_penalty` times how often the output has a token, and `presence_penalty` once for each that it has: the
   formula of OpenAI's API, which never looks at the prompt;
4. banned ids, and those that a structured output does not allow, get -inf: last, so that nothing brings them back.

Temperature, top-k, top-p and min-p then work on what is left (`sampler`); log-probabilities are told of the logits
before all of this (`logprobs`). Nothing is kept between steps: a draw brings its request's tokens, so a request may
start, be preempted and go on anywhere. Each row is changed by its own draw alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.engine.step import TokenHistory
from stallfree_worker.model.draw import Draw
from stallfree_worker.model.id_masks import unpack
from stallfree_worker.model.transfers import to_device

_FLOAT32_MAX = torch.finfo(torch.float32).max
_Column = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Token ids of one row, and a number for each."""


def adjust_logits(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Changes `logits`, float32 [len(draws), num_ids], in place."""
    if (bias := _cells(logits, draws, _biases)) is not None:
        logits[bias.index] += bias.values
    if (repeated := _cells(logits, draws, _repetitions)) is not None:
        found, penalty = logits[repeated.index], repeated.values
        # A very small penalty must not make a logit infinite.
        logits[repeated.index] = torch.where(found > 0, found / penalty, found * penalty).clamp_(max=_FLOAT32_MAX)
    if (used := _cells(logits, draws, _subtractions)) is not None:
        logits[used.index] -= used.values
    if (banned := _cells(logits, draws, _bans)) is not None:
        logits[banned.index] = banned.values
    allowed = {row: draw.allowed for row, draw in enumerate(draws) if draw.allowed is not None}
    if allowed:
        is_allowed = unpack(torch.stack(list(allowed.values())), num_ids=logits.shape[-1])
        rows = to_device(np.array(list(allowed)), logits.device)
        logits[rows] = logits[rows].masked_fill_(~is_allowed, -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """Some cells of a table of logits, and a number for each."""

    index: tuple[Tensor, Tensor]  # rows and columns, int64 [num_cells] each
    values: Tensor  # float32 [num_cells]


def _cells(logits: Tensor, draws: Sequence[Draw], column_of: Callable[[Draw], _Column | None]) -> _Cells | None:
    """What `column_of` gives for each row, all rows together; None where no row has anything."""
    columns = {row: column for row, draw in enumerate(draws) if (column := column_of(draw)) is not None}
    if not columns:
        return None
    rows = np.repeat(list(columns), [len(ids) for ids, _ in columns.values()])
    ids, values = (np.concatenate(parts) for parts in zip(*columns.values(), strict=True))
    device = logits.device
    return _Cells(
        index=(to_device(rows, device), to_device(ids, device)),
        values=to_device(values, device),
    )


def _biases(draw: Draw) -> _Column | None:
    bias = draw.sampling.logit_bias
    return (_ids(tuple(bias)), np.array(tuple(bias.values()), dtype=np.float32)) if bias else None


def _repetitions(draw: Draw) -> _Column | None:
    penalty = draw.sampling.repetition_penalty
    if penalty == 1:
        return None
    history = _history(draw)
    # An id that comes twice is set twice, to the same value; to find it out takes longer than that.
    ids = _ids(history.prompt_token_ids + history.output_token_ids)
    return ids, np.full(len(ids), penalty, dtype=np.float32)


def _subtractions(draw: Draw) -> _Column | None:
    presence, frequency = draw.sampling.presence_penalty, draw.sampling.frequency_penalty
    if presence == frequency == 0:
        return None
    ids, counts = np.unique(_ids(_history(draw).output_token_ids), return_counts=True)
    return ids, (counts * frequency + presence).astype(np.float32)


def _bans(draw: Draw) -> _Column | None:
    banned = draw.banned_token_ids
    return (_ids(tuple(banned)), np.full(len(banned), -np.inf, dtype=np.float32)) if banned else None


def _history(draw: Draw) -> TokenHistory:
    if draw.history is None:
        raise ValueError("penalties need the tokens that they look back at")
    return draw.history


def _ids(token_ids: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)
