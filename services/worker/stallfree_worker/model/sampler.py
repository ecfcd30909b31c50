"""Draws tokens from logits.

The draw of output token `i` depends on `(seed, i)` and its own row of logits alone: a counter-based hash makes one
uniform number per row, and the inverse of the row's cumulative distribution turns it into a token. So a request gets
the same tokens alone, in any batch, after a preemption and on another worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stallfree_shared.wire import SamplingParams
from stallfree_worker.model.cpu.draws import can_draw, draw_plainly
from stallfree_worker.model.draw import NO_TOKEN, Draw
from stallfree_worker.model.logit_adjustments import adjust_logits
from stallfree_worker.model.transfers import to_device

_ROWS_AT_ONCE = 16
"""Rows are independent, so working on some at a time only bounds memory: a row has up to 262,144 columns."""
_HEAD_COLUMNS = 1024
"""Enough of the likeliest tokens for nearly every top-k and top-p."""
_WIDE_HEAD_COLUMNS = 16384
"""Enough for a flat row; where it is not, the whole row is sorted, which takes five times as long."""
_BLOCK_COLUMNS = 512
_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


@torch.inference_mode()
def draw_tokens(logits: Tensor, draws: Sequence[Draw], *, maxima: Tensor | None = None) -> list[int | None]:
    """logits [len(draws), num_ids], which stay as they are, and the maxima that came with them → a token id per row.

    None where the row has NaN, +inf or nothing but -inf, as the model gave it or after `logit_adjustments`.
    """
    has_kernel = logits.device.type == "cpu" and logits.dtype == torch.float32 and can_draw()
    is_done = list(map(_is_plain if has_kernel else _is_plainly_greedy, draws))
    tokens = _draw_by_kernel(logits, maxima, draws, is_done) if has_kernel else _draw_greedy(logits, draws)
    others = [row for row, done in enumerate(is_done) if not done]
    if others:
        _redraw(tokens, logits, draws, others)
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def _redraw(tokens: Tensor, logits: Tensor, draws: Sequence[Draw], others: Sequence[int]) -> None:
    """Puts into `tokens`, which have the likeliest ones, what those rows give that are more than that."""
    is_sound = tokens != NO_TOKEN
    greedy = [row for row in others if draws[row].sampling.is_greedy]
    sampled = [row for row in others if not draws[row].sampling.is_greedy]
    for rows, draw_some in ((greedy, _draw_greedy), (sampled, _draw_sampled)):
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            index = to_device(np.array(some), logits.device)
            own = logits.index_select(0, index).float()  # a copy
            own_draws = [draws[row] for row in some]
            adjust_logits(own, own_draws)
            tokens[index] = draw_some(own, own_draws)
    tokens.masked_fill_(~is_sound, NO_TOKEN)


def _is_plainly_greedy(draw: Draw) -> bool:
    return draw.sampling.is_greedy and not draw.adjusts_logits and draw.allowed is None


def _is_plain(draw: Draw) -> bool:
    """Whether the row is drawn from by its temperature and what is allowed alone."""
    return not draw.adjusts_logits and (draw.sampling.is_greedy or not (draw.sampling.min_p or _has_nucleus(draw)))


def _draw_by_kernel(logits: Tensor, maxima: Tensor | None, draws: Sequence[Draw], is_plain: Sequence[bool]) -> Tensor:
    """Rows that are not plain are given the likeliest token of what the model gave."""
    pairs = list(zip(draws, is_plain, strict=True))
    return draw_plainly(
        logits.contiguous(),
        [draw.sampling.temperature if plain and not draw.sampling.is_greedy else 0.0 for draw, plain in pairs],
        [_share(draw) if plain and not draw.sampling.is_greedy else 0.0 for draw, plain in pairs],
        [draw.allowed if plain else None for draw, plain in pairs],
        maxima=maxima,
    )


def _share(draw: Draw) -> float:
    """Where in its distribution the draw looks."""
    return uniform(draw.sampling.seed, draw.output_index)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits, made of `seed` and `index` alone (SplitMix64, Steele et al. 2014)."""
    return (_mix(_mix(seed) + (index + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK_64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def _draw_greedy(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """logits float32 [num_rows, num_ids] → int64 [num_rows]."""
    del draws
    best, tokens = _find_best(logits)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def _find_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and the lowest id that has it. First the block of ids, then the id in it: torch finds
    the place of a maximum fifteen times more slowly than the maximum."""
    blocks = _blocks_of(logits, torch.amax)
    best, block = blocks.max(dim=-1)
    ids = block[:, None] * _BLOCK_COLUMNS + torch.arange(_BLOCK_COLUMNS, device=logits.device)
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    return best, ids.gather(1, logits.gather(1, ids).argmax(dim=-1, keepdim=True)).squeeze(-1)


def _draw_sampled(logits: Tensor, draws: list[Draw]) -> Tensor:
    """logits float32 [num_rows, num_ids] → int64 [num_rows]."""
    best = logits.amax(-1, keepdim=True)
    weights = _probabilities(logits, best, draws)
    if any(draw.sampling.min_p or _has_nucleus(draw) for draw in draws):
        weights.masked_fill_(weights < _least_kept_weight(weights, draws)[:, None], 0.0)
    shares = _column([_share(draw) for draw in draws], logits.device)
    return torch.where(best.isfinite(), _find(weights, shares[:, None]), NO_TOKEN).squeeze(-1)


def _find(weights: Tensor, shares: Tensor) -> Tensor:
    """The id whose weight carries the sum over all ids up to it past a share of the whole: int64 [num_rows, 1].

    weights float32 [num_rows, num_ids], shares float64 [num_rows, 1] in [0, 1). First the block of ids, then the id in
    it: running sums over all ids in float64 took longer than all the rest.
    """
    sums = _block_sums(weights)
    target = shares * sums.sum(-1, keepdim=True)
    block, passed = _first_beyond(sums, target)
    ids = block * _BLOCK_COLUMNS + torch.arange(_BLOCK_COLUMNS, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=weights.shape[-1] - 1)).masked_fill_(ids >= weights.shape[-1], 0.0)
    position, _ = _first_beyond(inside.double(), target - passed)
    return ids.gather(1, position)


def _first_beyond(values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of `values` passes `target`, both float64, and the sum before that."""
    cumulative = values.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not carry the target to the total: nothing lies beyond that.
    target = target.clamp(min=0).minimum(torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True).clamp_(max=values.shape[-1] - 1)
    return found, cumulative.gather(1, found) - values.gather(1, found)


def _block_sums(weights: Tensor) -> Tensor:
    """float64 [num_rows, num_blocks]."""
    return _blocks_of(weights, torch.sum).double()


def _blocks_of(values: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """What `reduce` makes of every block of ids; the last one may be shorter."""
    num_whole = values.shape[-1] // _BLOCK_COLUMNS
    whole, rest = values[:, : num_whole * _BLOCK_COLUMNS], values[:, num_whole * _BLOCK_COLUMNS :]
    reduced = reduce(whole.view(len(values), num_whole, _BLOCK_COLUMNS), -1)
    return torch.cat((reduced, reduce(rest[:, None], -1)), dim=-1) if rest.shape[-1] else reduced


def _probabilities(logits: Tensor, best: Tensor, draws: list[Draw]) -> Tensor:
    """float32 [num_rows, num_ids]; `best` is each row's largest. Of a row where that is not finite it is NaN."""
    temperatures = _column([draw.sampling.temperature for draw in draws], logits.device).float()
    # The maximum is taken off before the division by a small temperature, so that nothing overflows.
    return logits.sub_(best).div_(temperatures[:, None]).softmax(dim=-1)


def _least_kept_weight(weights: Tensor, draws: list[Draw]) -> Tensor:
    """Top-k, then top-p over what it left, then min-p: each keeps a row's weights from some value up, ties included."""
    largest = weights.amax(-1)
    least = _column([draw.sampling.min_p for draw in draws], weights.device).float() * largest
    rows = [row for row, draw in enumerate(draws) if _has_nucleus(draw)]
    if rows:
        index = to_device(np.array(rows), weights.device)
        nucleus = _nucleus_least([draws[row].sampling for row in rows], weights[index])
        least[index] = least[index].maximum(nucleus)
    return least.minimum(largest)


def _has_nucleus(draw: Draw) -> bool:
    return bool(draw.sampling.top_k) or draw.sampling.top_p < 1


def _nucleus_least(params: list[SamplingParams], weights: Tensor) -> Tensor:
    """Looks at ever more of a row's likeliest tokens until they are enough."""
    num_ids = weights.shape[-1]
    least, is_known = _nucleus_of_head(params, weights, min(_HEAD_COLUMNS, num_ids))
    for width in (min(_WIDE_HEAD_COLUMNS, num_ids), num_ids):
        for row in (~is_known).nonzero().flatten().tolist():
            least[row], is_known[row] = _nucleus_of_head([params[row]], weights[row : row + 1], width)
    return least


def _nucleus_of_head(params: list[SamplingParams], weights: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The least weight kept by top-k and top-p, looking at each row's `width` largest; and whether that was enough."""
    num_ids = weights.shape[-1]
    head = weights.topk(width, dim=-1).values
    limits = to_device(np.array([min(param.top_k or num_ids, num_ids) for param in params]), weights.device)
    kth = head.gather(1, limits.clamp(max=width)[:, None] - 1)
    has_top_k = (limits < num_ids)[:, None]
    is_in_top_k = ~has_top_k | (head >= kth)
    mass = torch.where(is_in_top_k, head, 0.0).cumsum(-1, dtype=torch.float64)
    total = torch.where(has_top_k, mass[:, -1:], _block_sums(weights).sum(-1, keepdim=True))
    shares = _column([param.top_p for param in params], weights.device)[:, None]
    # A token is kept while those before it have not reached top_p: the one that crosses it is the last.
    is_kept = is_in_top_k & ((mass - head < shares * total) | (shares >= 1))
    num_kept = is_kept.sum(-1, keepdim=True).clamp(min=1)
    is_known = (num_kept < width) & (~has_top_k | (kth > head[:, -1:]))
    least = head.gather(1, num_kept - 1)
    return least.squeeze(-1), is_known.squeeze(-1) | (width == num_ids)


def _column(values: list[float], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.float64), device)
