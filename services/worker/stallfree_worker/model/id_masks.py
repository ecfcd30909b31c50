"""Sets of token ids as bits: id `i` is bit `i % 32` of word `i // 32`. For a vocabulary of 262,144 that is 32 KiB,
which the grammar library fills, the compiled kernels read and a GPU unpacks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BITS = 32


def mask_of(ids: Iterable[int], *, num_ids: int) -> NDArray[np.int32]:
    """int32 [num_words]."""
    is_in = np.zeros(-(-num_ids // WORD_BITS) * WORD_BITS, dtype=bool)
    is_in[list(ids)] = True
    return np.packbits(is_in, bitorder="little").view(np.int32)


def unpack(masks: Tensor, *, num_ids: int) -> Tensor:
    """int32 [..., num_words] → bool [..., num_ids], on the same device."""
    bits = masks[..., None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device) & 1
    return bits.flatten(-2)[..., :num_ids].bool()
