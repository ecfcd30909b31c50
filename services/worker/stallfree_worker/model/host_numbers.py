"""Whole numbers of a step that the host knows, and a device gets with one copy.

Plain arrays of the interpreter: between two steps of a CPU weights have driven all else out of its caches, and a call
into a library costs as much then as some tens of plain steps of the interpreter. Made by `batch_inputs`. Compiled
kernels read the arrays where they stand, whatever computes in torch asks for tensors.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stallfree_worker.model.transfers import to_device


class HostNumbers:
    """Numbers of one width, one after another. The first that is asked for on a device takes all of them there."""

    def __init__(self, typecode: Literal["i", "q"], numbers: Iterable[int] | bytes) -> None:
        """`typecode` as in `array`: 32 bits, or 64. Bytes are numbers of that width already."""
        self._array = array(typecode, numbers)
        self._on_device: dict[torch.device, Tensor] = {}
        self.address = self._array.buffer_info()[0]
        """Of the first."""
        self.item_bytes = self._array.itemsize

    def __len__(self) -> int:
        return len(self._array)

    def as_array(self) -> NDArray[Any]:
        """All of them, int32 or int64, in the same memory."""
        return np.frombuffer(self._array, dtype=f"i{self.item_bytes}")

    def on(self, device: torch.device) -> Tensor:
        """All of them. On a CPU it is the same memory."""
        tensor = self._on_device.get(device)
        if tensor is None:
            tensor = self._on_device[device] = to_device(self.as_array(), device)
        return tensor


class NumberList:
    """Some of the numbers in `HostNumbers`."""

    __slots__ = ("_end", "_numbers", "_start", "address")

    def __init__(self, numbers: HostNumbers, start: int, end: int) -> None:
        self._numbers = numbers
        self._start = start
        self._end = end
        self.address = numbers.address + start * numbers.item_bytes
        """Of the first."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> NumberList:
        """One of 64 bits that stands alone."""
        return cls(HostNumbers("q", numbers), 0, len(numbers))

    def __len__(self) -> int:
        return self._end - self._start

    def part(self, start: int, end: int) -> NumberList:
        """Those from place `start` to before `end`, or fewer where the list ends earlier."""
        return NumberList(self._numbers, min(self._start + start, self._end), min(self._start + end, self._end))

    def tolist(self) -> list[int]:
        numbers: list[int] = self.as_array().tolist()
        return numbers

    def as_array(self) -> NDArray[Any]:
        """int32 or int64 [len(self)], in the same memory."""
        return self._numbers.as_array()[self._start : self._end]

    def on(self, device: torch.device) -> Tensor:
        """int32 or int64 [len(self)]."""
        return self._numbers.on(device)[self._start : self._end]


def side_by_side(typecode: Literal["i", "q"], lists: Sequence[Sequence[int]]) -> list[NumberList]:
    """Each of `lists`, all in one memory."""
    numbers = HostNumbers(typecode, itertools.chain.from_iterable(lists))
    ends = list(itertools.accumulate(map(len, lists)))
    return [NumberList(numbers, start, end) for start, end in zip([0, *ends], ends, strict=False)]
