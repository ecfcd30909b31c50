"""Draws tokens from logits.

The draw of output token `i` depends on `(seed, i)` and its own row of logits alone: a counter-based hash makes one
uniform number per row, and the inverse of the row's cumulative distribution turns it into a token. So a request gets
the same tokens alone, in any batch, after a preemption and on another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stallfree_shared.wire import SamplingParams

GREEDY_BELOW_TEMPERATURE = 1e-5
_ROWS_AT_ONCE = 16
"""Rows are independent, so working on some at a time only bounds memory: a row has up to 262,144 columns."""
_HEAD_COLUMNS = 1024
"""Enough of the likeliest tokens for nearly every top-k and top-p; where it is not, the whole row is sorted."""
_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What one row of logits is drawn with."""

    sampling: SamplingParams
    output_index: int

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW_TEMPERATURE


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """logits [len(draws), num_ids] → a token id per row; None where the row has NaN, +inf or nothing but -inf."""
    best, tokens = logits.max(dim=-1)
    sampled_rows = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    for start in range(0, len(sampled_rows), _ROWS_AT_ONCE):
        rows = sampled_rows[start : start + _ROWS_AT_ONCE]
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw_sampled(logits[index].float(), [draws[row] for row in rows])
    tokens = torch.where(best.isfinite(), tokens, -1)
    return [token if token >= 0 else None for token in tokens.tolist()]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits, made of `seed` and `index` alone (SplitMix64, Steele et al. 2014)."""
    return (_mix(_mix(seed) + (index + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK_64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def _draw_sampled(logits: Tensor, draws: list[Draw]) -> Tensor:
    """logits float32 [num_rows, num_ids] → int64 [num_rows]."""
    weights = _weights(logits, draws)
    weights.masked_fill_(weights < _least_kept_weight(weights, draws)[:, None], 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    uniforms = _column([uniform(draw.sampling.seed, draw.output_index) for draw in draws], logits.device)
    # Rounding must not carry the target to the total: no token's interval holds that.
    target = (uniforms[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _weights(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Probabilities relative to the likeliest token's, which has weight 1. The maximum is taken off before the division
    by a small temperature, so that nothing overflows."""
    temperatures = _column([draw.sampling.temperature for draw in draws], logits.device).float()
    # In place: with a vocabulary of 262,144, fresh memory for each operation costs more than the arithmetic.
    return (logits - logits.amax(-1, keepdim=True)).div_(temperatures[:, None]).exp_()


def _least_kept_weight(weights: Tensor, draws: list[Draw]) -> Tensor:
    """Top-k, then top-p over what it left, then min-p: each keeps a row's weights from some value up, ties included."""
    least = _column([draw.sampling.min_p for draw in draws], weights.device).float()
    rows = [row for row, draw in enumerate(draws) if draw.sampling.top_k or draw.sampling.top_p < 1]
    if rows:
        index = torch.tensor(rows, device=weights.device)
        nucleus = _nucleus_least([draws[row].sampling for row in rows], weights[index])
        least[index] = least[index].maximum(nucleus)
    return least.clamp(max=1.0)


def _nucleus_least(params: list[SamplingParams], weights: Tensor) -> Tensor:
    num_ids = weights.shape[-1]
    least, is_known = _nucleus_of_head(params, weights, min(_HEAD_COLUMNS, num_ids))
    for row, known in enumerate(is_known.tolist()):
        if not known:
            least[row] = _nucleus_of_head([params[row]], weights[row : row + 1], num_ids)[0]
    return least


def _nucleus_of_head(params: list[SamplingParams], weights: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The least weight kept by top-k and top-p, looking at each row's `width` largest; and whether that was enough."""
    num_ids = weights.shape[-1]
    head = weights.topk(width, dim=-1).values
    limits = torch.tensor([min(param.top_k or num_ids, num_ids) for param in params], device=weights.device)
    kth = head.gather(1, limits.clamp(max=width)[:, None] - 1)
    has_top_k = (limits < num_ids)[:, None]
    is_in_top_k = ~has_top_k | (head >= kth)
    mass = torch.where(is_in_top_k, head, 0.0).cumsum(-1, dtype=torch.float64)
    total = torch.where(has_top_k, mass[:, -1:], weights.cumsum(-1, dtype=torch.float64)[:, -1:])
    shares = _column([param.top_p for param in params], weights.device)[:, None]
    # A token is kept while those before it have not reached top_p: the one that crosses it is the last.
    is_kept = is_in_top_k & ((mass - head < shares * total) | (shares >= 1))
    num_kept = is_kept.sum(-1, keepdim=True).clamp(min=1)
    is_known = (num_kept < width) & (~has_top_k | (kth > head[:, -1:]))
    least = head.gather(1, num_kept - 1)
    return least.squeeze(-1), is_known.squeeze(-1) | (width == num_ids)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)
