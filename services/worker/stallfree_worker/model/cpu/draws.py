"""Draws by the compiled kernels, straight from the rows of logits: nothing is copied, and no row waits for another."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_double, c_float, c_void_p

import torch
from torch import Tensor

from stallfree_worker.model.cpu import library
from stallfree_worker.model.id_masks import WORD_BITS


@functools.cache
def can_draw() -> bool:
    return library.reason_against(torch.float32) is None


def draw_plainly(
    logits: Tensor,
    temperatures: Sequence[float],
    shares: Sequence[float],
    allowed: Sequence[Tensor | None],
    *,
    maxima: Tensor | None = None,
) -> Tensor:
    """logits float32 [num_rows, num_ids], contiguous → int64 [num_rows]: of each row the likeliest id where its
    temperature is 0, else the one at which the running sum of its distribution passes `shares`, in [0, 1). Only ids
    that are `allowed` (see `id_masks`), where that is told. -1 where the row has NaN or +inf, or nothing but -inf in
    what is allowed. With the `maxima` that came with all of these rows, and no others, the likeliest of all ids is
    found without reading most of a row."""
    num_rows, num_ids = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    library.load_library().stallfree_draw(
        logits.data_ptr(),
        0 if maxima is None else maxima.data_ptr(),
        num_rows,
        num_ids,
        (c_float * num_rows)(*temperatures),
        (c_double * num_rows)(*shares),
        mask_addresses(allowed, num_rows=num_rows, num_ids=num_ids),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens


def mask_addresses(masks: Sequence[Tensor | None], *, num_rows: int, num_ids: int) -> ctypes.Array[c_void_p]:
    """Of what is allowed of so many ids in each row: null where all are."""
    if len(masks) != num_rows:
        raise ValueError(f"{len(masks)} masks are not for {num_rows} rows")
    for mask in masks:
        if mask is not None and (mask.shape, mask.dtype) != ((-(-num_ids // WORD_BITS),), torch.int32):
            raise ValueError(f"a mask of shape {tuple(mask.shape)} is not for {num_ids} ids")
    return (c_void_p * num_rows)(*[0 if mask is None else mask.data_ptr() for mask in masks])
