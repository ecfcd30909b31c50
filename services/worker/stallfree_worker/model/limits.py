"""What this machine's CPU can do at most, and what a model asks of it.

    python -m stallfree_worker.model.limits --model MODEL [--threads N]

Prints one JSON object: how fast memory is read and how fast large products in bfloat16 are, both measured now, and how
much of either a step of the model takes at the least. The speed experiment of the load test holds figures against it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses

from stallfree_worker.model.card import ModelFolder
from stallfree_worker.model.cores import keep_to_numa_node, usable_cores
from stallfree_worker.model.cpu import library
from stallfree_worker.model.families import DecoderConfig, read_decoder_config
from stallfree_worker.model.source import model_folder
from stallfree_worker.settings import ModelSettings

_READ_BYTES = 512 * 1024 * 1024
_SIDE = 2048
_SECONDS = 1.5
"""Of each measurement: long enough to see the machine as it is, and its best moments."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as the worker takes it")
    parser.add_argument("--threads", type=int, default=0, help="0: one per usable core")
    options = parser.parse_args(arguments)
    reason = library.reason_against(torch.bfloat16)
    if reason is not None:
        sys.stderr.write(f"the compiled kernels are needed: {reason}\n")
        return 1
    keep_to_numa_node("auto")
    num_threads = options.threads or usable_cores()
    settings = ModelSettings.model_validate({"model": options.model})
    folder = ModelFolder.read(model_folder(settings))
    config = read_decoder_config(folder.config)
    found = {
        "bytes_per_second": measure_read(num_threads),
        "operations_per_second": measure_products(num_threads),
        **dataclasses.asdict(work_of(config, num_head_rows=min(folder.num_tokenizer_ids(), config.vocab_size))),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model's steps cannot do without."""

    layer_weights: int
    """Of all layers: what every token is multiplied with, but for the next."""
    last_layer_weights: int
    """Those of them that only rows of logits are multiplied with: in the last layer, others have their keys and values
    made and nothing else."""
    head_weights: int
    """That every row of logits is made with; greedy tokens may do without logits."""
    query_size: int
    kv_size: int
    """Numbers in a token's keys, or values, of one layer; those of all query heads together are `query_size`."""
    windows: tuple[int | None, ...]
    """How far each layer looks back."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of keys and values in bfloat16, all layers together."""
        return 2 * 2 * len(self.windows) * self.kv_size


def work_of(config: DecoderConfig, *, num_head_rows: int) -> Work:
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    per_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return Work(
        layer_weights=len(config.layers) * per_layer,
        last_layer_weights=per_layer - config.hidden_size * 2 * config.num_kv_heads * config.head_dim,
        head_weights=num_head_rows * config.hidden_size,
        query_size=config.num_heads * config.head_dim,
        kv_size=config.num_kv_heads * config.head_dim,
        windows=tuple([layer.window_tokens for layer in config.layers]),
    )


def measure_read(num_threads: int, num_bytes: int | None = None, *, seconds: float | None = None) -> float:
    """Bytes a second, the upper decile of many reads."""
    torch.set_num_threads(num_threads)  # that write the memory first, and so decide where it is
    num_bytes = num_bytes or _READ_BYTES
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    read = library.load_library().stallfree_read
    return num_bytes / _fast_seconds(lambda: read(memory.data_ptr(), num_bytes, num_threads), seconds)


def measure_products(num_threads: int, side: int = _SIDE, *, seconds: float | None = None) -> float:
    """Operations a second in a square product of bfloat16 by torch, the upper decile of many."""
    torch.set_num_threads(num_threads)
    one, other = (torch.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        return 2 * side**3 / _fast_seconds(lambda: F.linear(one, other), seconds)


def _fast_seconds(work: Callable[[], object], seconds: float | None) -> float:
    """A limit is what the machine can do when nobody is in the way."""
    work()
    times: list[float] = []
    until = time.perf_counter() + (seconds or _SECONDS)
    while time.perf_counter() < until or len(times) < 2:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=10, method="inclusive")[0]


if __name__ == "__main__":
    sys.exit(main())
