"""From the host to the device without waiting: a copy from ordinary memory would hold the host until the device has
done all that was asked of it before."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Of the same shape and dtype; on a CPU it may be the same memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
