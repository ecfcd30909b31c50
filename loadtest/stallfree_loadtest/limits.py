"""How fast a machine could serve a model at most: the larger of the bytes that must move over its bandwidth, and the
operations over its arithmetic rate. `stallfree_worker.model.limits` measures both, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

_BYTES_PER_NUMBER = 2
"""bfloat16."""


class LimitsError(Exception):
    """The machine's limits could not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """See `stallfree_worker.model.limits`."""

    bytes_per_second: float
    operations_per_second: float
    layer_weights: int
    last_layer_weights: int
    head_weights: int
    query_size: int
    kv_size: int
    windows: tuple[int | None, ...]

    def prefill_tokens_per_second(self, num_tokens: int) -> float:
        """Of one prompt, in one step, to its first token."""
        *windows, last_window = self.windows
        pairs = sum(_pairs(num_tokens, window) for window in windows) + _seen(num_tokens, last_window)
        products = (self.layer_weights - self.last_layer_weights) * num_tokens + self.last_layer_weights
        operations = 2 * (products + self.head_weights) + 4 * self.query_size * pairs
        num_bytes = _BYTES_PER_NUMBER * (self.layer_weights + self.head_weights)
        return num_tokens / self._seconds(num_bytes, operations)

    def decode_tokens_per_second(self, num_streams: int, context_tokens: int) -> float:
        """Of streams that all have a context of this length, and logits. Who finds greedy tokens without logits may be
        beyond it."""
        seen = sum(_seen(context_tokens, window) for window in self.windows)
        weights = self.layer_weights + self.head_weights
        operations = num_streams * (2 * weights + 4 * self.query_size * seen)
        num_bytes = _BYTES_PER_NUMBER * (weights + num_streams * 2 * self.kv_size * seen)
        return num_streams / self._seconds(num_bytes, operations)

    def _seconds(self, num_bytes: float, operations: float) -> float:
        return max(num_bytes / self.bytes_per_second, operations / self.operations_per_second)


def _seen(context_tokens: int, window: int | None) -> int:
    """Tokens that one query sees."""
    return context_tokens if window is None else min(window, context_tokens)


def _pairs(num_tokens: int, window: int | None) -> float:
    """Pairs of query and key of a whole prompt in one layer."""
    if window is None or num_tokens <= window:
        return num_tokens * (num_tokens + 1) / 2
    return window * (window + 1) / 2 + (num_tokens - window) * window


async def measure_limits(model: str) -> Limits:
    """Takes some seconds, and all cores.

    Raises:
        LimitsError: with what the process said last.
    """
    command = (sys.executable, "-m", "stallfree_worker.model.limits", "--model", model)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise LimitsError(f"the machine's limits could not be measured (leave them out by --no-limits): {last}")
    found = json.loads(output)
    return Limits(**{**found, "windows": tuple(found["windows"])})
