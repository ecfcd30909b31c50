"""Matrices as the compiled kernels read them: 16 rows beside each other, so that one vector holds the same inputs of 16
outputs. A matrix is packed once, when the model is loaded."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from torch import Tensor

TILE_ROWS = 16
_LANE_BYTES = 4
_LARGEST_INTEGER = 127
_INTEGER_ZERO = 128
"""What stands for 0: one operand of the CPU's products must be unsigned."""


class PackedMatrix:
    """`weight` [num_outputs, num_inputs], bfloat16 or float32, and float32 `bias` [num_outputs].

    `quantized` keeps the weights of a bfloat16 matrix as 8-bit integers, each output's with a scale of its own: half
    the memory, and an error of up to half a step of that scale. The kernels then round inputs too, 64 at a time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, scales: Tensor | None = None) -> None:
        """With `scales`, float32 [num_outputs], `weight` is uint8: 128 more than what the scale goes with."""
        self.num_outputs, self.num_inputs = weight.shape
        self.tiles = _tiles(weight, _LANE_BYTES // weight.dtype.itemsize)
        """[num_tiles, num_inputs / per_lane, 16, per_lane]: a lane is 4 bytes."""
        self.bias = None if bias is None else self._padded(bias)
        self.scales = None if scales is None else self._padded(scales)

    @classmethod
    def quantized(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        largest = weight.float().abs().amax(dim=1)
        scales = torch.where(largest > 0, largest / _LARGEST_INTEGER, 1.0)
        integers = (weight / scales[:, None]).round_().add_(_INTEGER_ZERO)
        return cls(integers.to(torch.uint8), bias, scales=scales)

    def interleave_halves(self) -> None:
        """Puts the tiles of the lower and the upper half of the rows in turns, as the gate and the input that it gates
        are computed side by side."""
        self.tiles = _in_turns(self.tiles)
        self.bias = None if self.bias is None else _in_turns(self.bias.view(-1, TILE_ROWS)).flatten()
        self.scales = None if self.scales is None else _in_turns(self.scales.view(-1, TILE_ROWS)).flatten()

    def _padded(self, values: Tensor) -> Tensor:
        """One for each row of every tile."""
        return F.pad(values.float(), (0, len(self.tiles) * TILE_ROWS - self.num_outputs)).contiguous()


def _tiles(weight: Tensor, per_lane: int) -> Tensor:
    num_outputs, num_inputs = weight.shape
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
