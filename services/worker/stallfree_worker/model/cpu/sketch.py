"""The output layer's matrix in 8 bits besides its own 16: what tells, for half the reading, which few ids may be the
likeliest of a row. See `native/likeliest.h`. Made once, by `decoder`, when the model is loaded."""

from __future__ import annotations

import torch

from stallfree_worker.model.cpu import library
from stallfree_worker.model.cpu.packed import TILE_ROWS


class Sketch:
    """Memory that `struct` points to."""

    def __init__(self, matrix: library.Matrix, *, num_threads: int) -> None:
        """Of a matrix of bfloat16, without a bias."""
        num_tiles = -(-matrix.num_outputs // TILE_ROWS)
        tiles = torch.empty(num_tiles, matrix.num_inputs, TILE_ROWS, dtype=torch.uint8)
        scales, per_input, per_error = torch.empty(3, num_tiles, TILE_ROWS)
        self._memory = (tiles, scales, per_input, per_error)
        self.struct = library.Sketch(*[tensor.data_ptr() for tensor in self._memory])
        library.load_library().stallfree_make_sketch(matrix, self.struct, num_threads)
