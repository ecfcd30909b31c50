"""Measures the engine on one GPU, in process, and writes a report: tokens per second against the device's two ceilings,
and the TBT of decodes while a long prompt is computed, for each token budget.

    python -m tests.gpu.report --out report.md [--shape llama-1b] [--device cuda]

The ceilings are measured in the same run: memory bandwidth by a copy, arithmetic by a large product in bfloat16. MBU is
the share of the bandwidth that the bytes which must move (weights, keys and values) took in the time of a step; MFU is
the share of the arithmetic rate. With `--device cpu --shape tiny` it only shows that the script works.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.calibration import calibrate
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.execution import InlineExecution, ThreadExecution
from stallfree_worker.engine.step import NewRequest, Runner, StepReport
from stallfree_worker.model.checkpoint import read_json
from stallfree_worker.model.families import read_decoder_config
from stallfree_worker.model.limits import Work, work_of
from stallfree_worker.model.loader import load_model
from stallfree_worker.settings import WorkerSettings
from tests.gpu.random_model import SHAPES, save_random_model

CONTEXT_TOKENS = 1024
DECODE_STEPS = 64
ROUNDS = 3
BATCHES = (1, 8, 32, 128)
PREFILLS = (512, 2048, 8192)
MOST_STEP_TOKENS = 2048
BUDGETS: tuple[int | Literal["auto"], ...] = (256, 512, 1024, MOST_STEP_TOKENS, "auto")
LONG_PROMPT = 8192
STREAMS = 32
TBT_TARGET_SECONDS = 0.025
BEST = "recorded, overlapped"
VARIANTS: dict[str, dict[str, bool]] = {
    BEST: {},
    "recorded": {"overlaps": False},
    "launched": {"overlaps": False, "cuda_graphs": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured: less where the script is only tried."""

    context_tokens: int = CONTEXT_TOKENS
    decode_steps: int = DECODE_STEPS
    batches: tuple[int, ...] = BATCHES
    prefills: tuple[int, ...] = PREFILLS
    long_prompt: int = LONG_PROMPT
    streams: int = STREAMS
    warm_steps: int = 20
    stream_tokens: int = 1000


SMALL = Sizes(
    context_tokens=20, decode_steps=4, batches=(1, 2), prefills=(32,), long_prompt=200, streams=2, warm_steps=2
)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median time of one call, by the wall clock around `repeats` of them."""
    work()
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def measure_ceilings(device: torch.device) -> Ceilings:
    num_bytes = 2**31 if device.type == "cuda" else 2**24
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_of(lambda: target.copy_(source), device)
    side = 8192 if device.type == "cuda" else 256
    matrix = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    product_seconds = seconds_of(lambda: matrix @ matrix, device)
    return Ceilings(bytes_per_second=2 * num_bytes / copy_seconds, operations_per_second=2 * side**3 / product_seconds)


class Bench:
    """Engines on one loaded model."""

    def __init__(
        self,
        folder: Path,
        work: Work,
        device: torch.device,
        sizes: Sizes,
        *,
        cuda_graphs: bool = True,
        overlaps: bool = True,
    ) -> None:
        num_tokens = max(sizes.batches) * (sizes.context_tokens + 1024) + 2 * sizes.long_prompt
        self.settings = WorkerSettings.model_validate(
            {
                "model": str(folder),
                "device": device.type,
                "dtype": "bfloat16",
                "attention_backend": "reference" if device.type == "cpu" else "flash_attn",
                "kv_cache_memory": num_tokens * work.kv_bytes_per_token,
                "cuda_graphs": cuda_graphs,
                "tbt_target_seconds": TBT_TARGET_SECONDS,
            }
        )
        self.runner: Runner = load_model(self.settings).runner
        self._execution = ThreadExecution(self.runner) if overlaps else InlineExecution(self.runner)
        self._num_requests = 0

    def engine(self, budget: int | Literal["auto"] = MOST_STEP_TOKENS) -> Engine:
        settings = self.settings.model_copy(update={"token_budget": budget})
        engine = Engine(settings, self.runner, time.monotonic, has_prefix_cache=False, execution=self._execution)
        if budget == "auto":
            calibrate(engine, max_chunk_tokens=settings.max_step_tokens)
        return engine

    def submit(self, engine: Engine, num_prompt_tokens: int, max_tokens: int) -> RequestId:
        self._num_requests += 1
        new = NewRequest(
            request_id=RequestId(f"r{self._num_requests}"),
            prompt_token_ids=tuple((7 * i + self._num_requests) % 250 + 3 for i in range(num_prompt_tokens)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            tbt_target_seconds=TBT_TARGET_SECONDS,
        )
        engine.submit(new)
        return new.request_id


def run_until(engine: Engine, is_done: Callable[[StepReport], bool]) -> None:
    while engine.has_work:
        if is_done(engine.step()):
            return


def prefill_seconds(bench: Bench, num_tokens: int) -> float:
    """Of one prompt on an idle engine, to its first token."""
    times = []
    for _ in range(ROUNDS + 1):
        engine = bench.engine()
        start = time.perf_counter()
        bench.submit(engine, num_tokens, 1)
        run_until(engine, lambda _: False)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def decode_seconds(bench: Bench, batch: int, sizes: Sizes) -> float:
    """Of one step in which `batch` requests decode."""
    times = []
    for _ in range(ROUNDS):
        engine = bench.engine()
        for _ in range(batch):
            bench.submit(engine, sizes.context_tokens, sizes.decode_steps + batch + 8)
        run_until(engine, lambda report: report.num_decode_tokens == batch)
        start = time.perf_counter()
        for _ in range(sizes.decode_steps):
            engine.step()
        times.append((time.perf_counter() - start) / sizes.decode_steps)
    return statistics.median(times)


def tbt_beside_a_prefill(bench: Bench, budget: int | Literal["auto"], sizes: Sizes) -> tuple[list[float], float]:
    """The waits of all streams while the long prompt is computed, sorted, and its TTFT."""
    engine = bench.engine(budget)
    for _ in range(sizes.streams):
        bench.submit(engine, sizes.context_tokens, sizes.stream_tokens)
    run_until(engine, lambda report: report.num_decode_tokens == sizes.streams)
    for _ in range(sizes.warm_steps):
        engine.step()
    start = time.perf_counter()
    long_id = bench.submit(engine, sizes.long_prompt, 1)
    gaps: list[float] = []

    def note(report: StepReport) -> bool:
        waits = [event.time_between_tokens_seconds for event in report.events if event.request_id != long_id]
        gaps.extend(wait for wait in waits if wait is not None)
        return any(event.request_id == long_id for event in report.events)

    run_until(engine, note)
    return sorted(gaps), time.perf_counter() - start


def write_report(shape_name: str, device: torch.device, sizes: Sizes) -> str:
    shape = SHAPES[shape_name]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    ceilings = measure_ceilings(device)
    lines = [
        f"# {name}, {shape_name}, bfloat16, torch {torch.__version__}",
        "",
        (
            f"Ceilings, measured: {ceilings.bytes_per_second / 1e9:.0f} GB/s (copy), "
            f"{ceilings.operations_per_second / 1e12:.0f} TFLOP/s (product)."
        ),
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = save_random_model(Path(folder) / shape_name, shape, device)
        work = work_of(read_decoder_config(read_json(path / "config.json")), num_head_rows=shape.vocab_size)
        best_lines: list[str] = []
        lines += decode_head(sizes)
        for name, options in VARIANTS.items():  # one model at a time: each fills much of a GPU
            bench = Bench(path, work, device, sizes, **options)
            lines += decode_rows(name, bench, work, ceilings, sizes)
            if name == BEST:
                best_lines = [*prefill_table(bench, work, ceilings, sizes), *tbt_table(bench, sizes)]
            del bench
            gc.collect()
        lines += ["", *best_lines]
    return "\n".join(lines) + "\n"


def decode_head(sizes: Sizes) -> list[str]:
    return [
        f"Decode, context {sizes.context_tokens}; medians of {ROUNDS} runs.",
        "",
        "| passes | batch | step ms | tokens/s | MBU | MFU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]


def decode_rows(name: str, bench: Bench, work: Work, ceilings: Ceilings, sizes: Sizes) -> list[str]:
    lines = []
    for batch in sizes.batches:
        seconds = decode_seconds(bench, batch, sizes)
        weights = work.layer_weights + work.head_weights
        moved = 2 * weights + batch * sizes.context_tokens * work.kv_bytes_per_token
        mbu = moved / seconds / ceilings.bytes_per_second
        mfu = 2 * weights * batch / seconds / ceilings.operations_per_second
        lines.append(f"| {name} | {batch} | {1000 * seconds:.2f} | {batch / seconds:.0f} | {mbu:.0%} | {mfu:.0%} |")
    return lines


def prefill_table(bench: Bench, work: Work, ceilings: Ceilings, sizes: Sizes) -> list[str]:
    lines = [
        "Prefill of one prompt, in steps of up to 2,048 tokens.",
        "",
        "| tokens | ms | tokens/s | MFU |",
        "| --- | --- | --- | --- |",
    ]
    for num_tokens in sizes.prefills:
        seconds = prefill_seconds(bench, num_tokens)
        pairs = num_tokens * num_tokens / 2
        attention = 4 * len(work.windows) * work.query_size * pairs
        operations = 2 * work.layer_weights * num_tokens + attention
        mfu = operations / seconds / ceilings.operations_per_second
        lines.append(f"| {num_tokens} | {1000 * seconds:.1f} | {num_tokens / seconds:.0f} | {mfu:.0%} |")
    return [*lines, ""]


def tbt_table(bench: Bench, sizes: Sizes) -> list[str]:
    lines = [
        (
            f"{sizes.streams} streams (context {sizes.context_tokens}) decode, a prompt of {sizes.long_prompt} tokens "
            f"arrives; the TBT target of auto is {1000 * TBT_TARGET_SECONDS:.0f} ms."
        ),
        "",
        "| budget | TBT P50 ms | P99 ms | max ms | TTFT of the prompt ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for budget in BUDGETS:
        gaps, ttft = tbt_beside_a_prefill(bench, budget, sizes)
        p50, p99 = (gaps[min(len(gaps) - 1, int(share * len(gaps)))] for share in (0.5, 0.99))
        lines.append(f"| {budget} | {1000 * p50:.1f} | {1000 * p99:.1f} | {1000 * gaps[-1]:.1f} | {1000 * ttft:.0f} |")
    return [*lines, ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    report = write_report(options.shape, torch.device(options.device), SMALL if options.shape == "tiny" else Sizes())
    options.out.write_text(report, encoding="utf-8")
    sys.stdout.write(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
