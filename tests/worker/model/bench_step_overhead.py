"""How much of a decode step is spent outside the compiled kernels: schedule, inputs, draws, events and their way out of
the process. Prints a Markdown table, and where the time goes.

    python -m tests.worker.model.bench_step_overhead --model demo:gemma3-270m --streams 8,64

The real engine on a real model, with two threads and greedy streams of 128 prompt tokens; every report goes through a
pipe to another process. The clock is read around each call of the kernels and around each step, and nowhere else. Needs
a CPU that has the kernels, and a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.calibration import calibrate
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest, StepReport
from stallfree_worker.engine_messages import EngineReport, pack
from stallfree_worker.model.cpu.decoder import CpuDecoder
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.runner import ModelRunner
from stallfree_worker.settings import WorkerSettings

PROMPT_TOKENS = 128
NUM_STEPS = 120
_LONG_TBT_SECONDS = 100.0
_HEAD = """\
| streams | step, ms | outside the kernels, ms (P10-P90) | share, median | share, sum | schedule | apply | sending |
|---|---|---|---|---|---|---|---|
"""
_KERNELS = ("stallfree_forward", "stallfree_logits", "stallfree_find_likeliest")


class TimedKernels:
    """The library, and the seconds that were spent in it."""

    def __init__(self, library: object) -> None:
        self._library = library
        self.seconds = 0.0
        for name in _KERNELS:
            setattr(self, name, self._timed(getattr(library, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def _timed(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            begun_at = time.perf_counter()
            kernel(*arguments)
            self.seconds += time.perf_counter() - begun_at

        return call


@dataclass(slots=True)
class Overhead:
    """Of the steps of one number of streams, in milliseconds."""

    steps: list[float] = field(default_factory=list)
    """From the end of a step to that of the next."""
    outside: list[float] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    sending: list[float] = field(default_factory=list)

    def row(self, num_streams: int) -> str:
        outside = statistics.quantiles(self.outside, n=10)
        shares = [own / whole for own, whole in zip(self.outside, self.steps, strict=True)]
        parts = (statistics.median(part) for part in (self.schedule, self.apply, self.sending))
        return (
            f"| {num_streams} | {statistics.median(self.steps):.1f} "
            f"| {statistics.median(self.outside):.2f} ({outside[0]:.2f}-{outside[-1]:.2f}) "
            f"| {statistics.median(shares):.1%} | {sum(self.outside) / sum(self.steps):.1%} | "
            + " | ".join(f"{part:.2f}" for part in parts)
            + " |"
        )


def measure(
    runner: ModelRunner, kernels: TimedKernels, send: Callable[[StepReport], None], num_streams: int
) -> Overhead:
    engine = Engine(WorkerSettings(model="-", max_num_seqs=max(256, num_streams)), runner, time.perf_counter)
    calibrate(engine, max_chunk_tokens=PROMPT_TOKENS)
    rng = random.Random(num_streams)
    for number in range(num_streams):
        engine.submit(
            NewRequest(
                request_id=RequestId(f"{number}#0#0"),
                prompt_token_ids=tuple(rng.choices(range(5, 8000), k=PROMPT_TOKENS)),
                sampling=SamplingParams(max_tokens=4 * NUM_STEPS, ignore_eos=True, temperature=0),
                tbt_target_seconds=_LONG_TBT_SECONDS,
            )
        )
    while engine.status().prefill_tokens_left:
        send(engine.step())
    overhead = Overhead()
    for _ in range(NUM_STEPS):
        kernels.seconds, begun_at = 0.0, time.perf_counter()
        report = engine.step()
        sending_at = time.perf_counter()
        send(report)
        ended_at = time.perf_counter()
        record = report.record
        if record is None or record.num_decodes != num_streams:
            raise RuntimeError(f"a step is no decode of {num_streams} streams")
        overhead.steps.append(1000 * (ended_at - begun_at))
        overhead.outside.append(1000 * (ended_at - begun_at - kernels.seconds))
        overhead.schedule.append(1000 * record.schedule_seconds)
        overhead.apply.append(1000 * record.apply_seconds)
        overhead.sending.append(1000 * (ended_at - sending_at))
    return overhead


@contextmanager
def other_process() -> Iterator[Callable[[StepReport], None]]:
    """Sends reports to a process that reads them and does nothing with them."""
    reading, writing = os.pipe()
    with (
        subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL),
        Connection(writing, readable=False) as pipe,
    ):
        os.close(reading)
        yield lambda step: pipe.send_bytes(pack(EngineReport(step=step, submits_taken=0)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:gemma3-270m")
    parser.add_argument("--streams", default="8,64")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = WorkerSettings(model=options.model, dtype="bfloat16", threads=2, attention_backend="cpu")
    runner = load_model(settings).runner
    if not isinstance(runner, ModelRunner) or not isinstance(runner._decoder, CpuDecoder):
        raise TypeError("this is for the compiled kernels")
    if runner._decoder.find_likeliest is None:
        raise ValueError("of a model whose tokens take logits, draws would be counted as if they were no kernel")
    kernels = TimedKernels(runner._decoder._library)
    runner._decoder._library = kernels  # type: ignore[assignment]  # it has all that the decoder calls
    gc.collect()
    gc.freeze()  # as in the engine's process
    sys.stdout.write(_HEAD)
    with other_process() as send:
        for _ in range(options.rounds):
            for num_streams in map(int, options.streams.split(",")):
                sys.stdout.write(f"{measure(runner, kernels, send, num_streams).row(num_streams)}\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
