"""Matrix products with fixed weights, in the form that the device reads fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

_ROWS_HINT = 8
"""oneDNN picks the packed layout for about this many rows; a decode step has one to some dozens."""


class Linear:
    """`x @ weight.T + bias`, with weight [out_features, in_features].

    On a CPU in bfloat16 the weight is packed once for oneDNN's kernels: a step that is bound by reading weights, as a
    decode is, then takes about half the time of `F.linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _can_pack()
        self._weight = _pack(weight) if self._is_packed else weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] → [num_rows, out_features]."""
        if self._is_packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _can_pack() -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _pack(weight: Tensor) -> Tensor:
    reorder = cast("Callable[[Tensor, int], Tensor]", torch.ops.mkldnn._reorder_linear_weight)  # noqa: SLF001
    return reorder(weight.contiguous(), _ROWS_HINT)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = cast("Callable[..., Tensor]", torch.ops.mkldnn._linear_pointwise)  # noqa: SLF001
    return product(x, weight, bias, "none", [], "")
