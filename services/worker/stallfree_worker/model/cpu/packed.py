"""Matrices as the compiled kernels read them: 16 rows beside each other, so that one vector holds the same inputs of 16
outputs. A matrix is packed once, when the model is loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

TILE_ROWS = 16
_LANE_BYTES = 4


class PackedMatrix:
    """`weight` [num_outputs, num_inputs], bfloat16 or float32, and float32 `bias` [num_outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.tiles = _tiles(weight)
        """[num_tiles, num_inputs / per lane, 16, per lane]: a lane is 4 bytes."""
        missing = len(self.tiles) * TILE_ROWS - self.num_outputs
        self.bias = None if bias is None else F.pad(bias.float(), (0, missing)).contiguous()

    def interleave_halves(self) -> None:
        """Puts the tiles of the lower and the upper half of the rows in turns, as the gate and the input that it gates
        are computed side by side."""
        self.tiles = _in_turns(self.tiles)
        if self.bias is not None:
            self.bias = _in_turns(self.bias.view(-1, TILE_ROWS)).flatten()


def _tiles(weight: Tensor) -> Tensor:
    num_outputs, num_inputs = weight.shape
    per_lane = _LANE_BYTES // weight.dtype.itemsize
    num_tiles = -(-num_outputs // TILE_ROWS)
    tiles = weight.new_zeros(num_tiles, num_inputs // per_lane, TILE_ROWS, per_lane)
    num_whole = num_outputs // TILE_ROWS
    whole = weight[: num_whole * TILE_ROWS].view(num_whole, TILE_ROWS, num_inputs // per_lane, per_lane)
    tiles[:num_whole] = whole.transpose(1, 2)
    rest = weight[num_whole * TILE_ROWS :].view(-1, num_inputs // per_lane, per_lane)
    if len(rest):
        tiles[-1, :, : len(rest)] = rest.transpose(0, 1)
    return tiles


def _in_turns(tiles: Tensor) -> Tensor:
    return torch.stack(tiles.chunk(2), dim=1).flatten(0, 1).contiguous()
