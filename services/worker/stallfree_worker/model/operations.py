"""The operations of a layer between its matrix products, in plain torch or fused by torch's compiler.

Each is bound by memory: apart, they read and write the activations many times over. Used by `decoder`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

from stallfree_worker.model.rope import rotate

_logger = logging.getLogger(__name__)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32; the result has the dtype of `x`.

    In bfloat16, Gemma's own code does just that; that of the other families rounds once more, before the weight.
    """
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_norm(hidden: Tensor, update: Tensor, post_weight: Tensor | None, eps: float) -> Tensor:
    """The residual stream with an update, which some families norm first."""
    return hidden + (update if post_weight is None else norm(update, post_weight, eps))


def norm_and_rotate(heads: Tensor, weight: Tensor | None, eps: float, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Queries and keys [num_tokens, num_heads, head_dim]: normed per head where there is a weight, and turned by the
    angles of `RotaryEmbeddings.angles`, in float32."""
    turned = heads.float()
    if weight is not None:
        turned = F.rms_norm(turned, turned.shape[-1:], eps=eps) * weight
    return rotate(turned, (cosine, signed_sine)).to(heads.dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """[num_tokens, 2 * intermediate_size] → [num_tokens, intermediate_size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    add_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = add_norm
    norm_and_rotate: Callable[[Tensor, Tensor | None, float, Tensor, Tensor], Tensor] = norm_and_rotate
    gated: Callable[[Tensor, str], Tensor] = gated


PLAIN = Operations()


def fused_operations() -> Operations:
    """Each as few kernels, compiled for any number of tokens when it is first used. What stands between two roundings
    to bfloat16 in the plain ones is computed in float32 here, so results differ in the last bits.

    The plain ones, where there is no C compiler, which torch's own compiler needs as well.
    """
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        _logger.warning("operations between matrix products are not fused: there is no C compiler")
        return PLAIN

    def fuse(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled: Callable[..., Tensor] = torch.compile(operation, dynamic=True, fullgraph=True)
        return compiled

    return Operations(
        norm=fuse(norm), add_norm=fuse(add_norm), norm_and_rotate=fuse(norm_and_rotate), gated=fuse(gated)
    )
