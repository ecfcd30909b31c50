"""What tokens are drawn from, and what one row is drawn with. Decoders and `runner` make it, `sampler` and
`logit_adjustments` read it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stallfree_shared.wire import SamplingParams
from stallfree_worker.engine.step import TokenHistory

NO_TOKEN = -1
"""In place of a token where none can be drawn."""


class Logits(NamedTuple):
    """What the output layer says of some rows. A decoder may write over it when it is asked for others."""

    values: Tensor  # [num_rows, num_ids]
    maxima: Tensor | None  # float32 [num_rows, -]
    """Where the compiled kernels made the logits: the largest of neighbouring ids. Only they can read them."""


class Draw(NamedTuple):
    sampling: SamplingParams
    output_index: int
    history: TokenHistory | None = None
    """What penalties look back at; None where there are none."""
    banned_token_ids: frozenset[int] = frozenset()
    """Ids that this draw must not give: those that would end a request before its `min_tokens`."""
    allowed: Tensor | None = None  # see `id_masks`, on the device of the logits
    """Ids that a structured output allows next; None where there is none."""

    @property
    def adjusts_logits(self) -> bool:
        """Whether `logit_adjustments` has anything to do for this row besides what is not allowed."""
        return self.sampling.adjusts_logits or bool(self.banned_token_ids)
