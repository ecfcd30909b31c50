"""What a mixed step costs against its parts run apart: does it ever pay to alternate pure steps instead?

    python -m tests.worker.model.bench_mixing --model demo:gemma3-270m --rounds 5

The real engine and the real model in this process, without HTTP. For `d` running decodes and a chunk of `c` prompt
tokens, both at a context of about `--context` tokens: the seconds of a step with both, of a step of decodes alone, and
of a step with the chunk alone. Mixing pays while the first is below the sum of the others (EB+, arXiv 2606.00516, says
that it stops where decodes are bound by bandwidth). Chunks that draw a token are left out: the output layer, most of a
small model, would count for the chunk in one case and for the decodes in the other. Not a test; run by hand.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stallfree_loadtest.measures import spread
from stallfree_loadtest.prompts import Vocabulary
from stallfree_loadtest.report import markdown_table, spread_text
from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest, Runner, StepReport
from stallfree_worker.model.loader import load_model
from stallfree_worker.settings import SchedulerSettings, WorkerSettings
from tests.worker.engine.bench import MovingBudget

DECODES = (1, 8, 32)
CHUNKS = (64, 256, 512)
CHUNKS_A_PROMPT = 4
DECODE_STEPS = 10


@dataclass(slots=True)
class Times:
    """Seconds of steps, each list over all rounds, by decodes and chunk; 0 is none of it."""

    by_shape: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def add(self, report: StepReport) -> None:
        shape = (report.num_decode_tokens, report.num_prefill_tokens)
        self.by_shape.setdefault(shape, []).append(report.step_seconds)

    def median(self, num_decodes: int, num_chunk_tokens: int) -> float:
        return statistics.median(self.by_shape[num_decodes, num_chunk_tokens])

    def row(self, num_decodes: int, num_chunk_tokens: int) -> tuple[str, ...]:
        mixed = self.by_shape[num_decodes, num_chunk_tokens]
        apart = self.median(num_decodes, 0) + self.median(0, num_chunk_tokens)
        ratio = spread(seconds / apart for seconds in mixed)
        return (
            f"{num_decodes} decode{'s' * (num_decodes > 1)}, chunk of {num_chunk_tokens}",
            f"{self.median(num_decodes, 0) * 1000:.1f}",
            f"{self.median(0, num_chunk_tokens) * 1000:.1f}",
            f"{apart * 1000:.1f}",
            spread_text(spread(mixed), digits=1, factor=1000),
            spread_text(ratio, digits=2),
        )


class MixingBench:
    """Owns the engine; the token budget is set so that a step holds exactly the decodes and the chunk wanted."""

    def __init__(self, runner: Runner, *, context_tokens: int) -> None:
        self._context_tokens = context_tokens
        self._budget = MovingBudget(context_tokens)
        settings = SchedulerSettings(token_budget=max(*CHUNKS, context_tokens) + max(DECODES))
        self._engine = Engine(settings, runner, time.perf_counter, budget=self._budget, has_prefix_cache=False)
        self._vocabulary = Vocabulary(low=10, high=300)
        self._random = random.Random(0)
        self._numbers = itertools.count()
        self._decodes: list[RequestId] = []
        self.times = Times()

    def run_round(self) -> None:
        """Measures every shape, first without decodes, then with more and more of them."""
        for num_decodes in (0, *DECODES):
            self._have_decodes(num_decodes)
            for _ in range(DECODE_STEPS if num_decodes else 0):
                self.times.add(self._engine.step())
            for num_chunk_tokens in CHUNKS:
                self._measure_chunks(num_chunk_tokens)
        for request_id in self._decodes:
            self._engine.cancel(request_id)
        self._decodes.clear()

    def _have_decodes(self, count: int) -> None:
        while len(self._decodes) < count:
            self._budget.max_tokens = self._context_tokens + count
            self._decodes.append(self._submit(self._context_tokens, max_tokens=1000))
            while self._engine.step().num_prefill_tokens == 0 or self._engine.status().prefill_tokens_left > 0:
                pass

    def _measure_chunks(self, num_chunk_tokens: int) -> None:
        """One prompt: up to the context in one step, then chunks, then a last token in a step that is not counted."""
        num_decodes = len(self._decodes)
        self._submit(self._context_tokens + CHUNKS_A_PROMPT * num_chunk_tokens + 1, max_tokens=1)
        self._budget.max_tokens = num_decodes + self._context_tokens
        self._engine.step()
        self._budget.max_tokens = num_decodes + num_chunk_tokens
        for _ in range(CHUNKS_A_PROMPT):
            self.times.add(self._engine.step())
        self._engine.step()

    def _submit(self, num_prompt_tokens: int, *, max_tokens: int) -> RequestId:
        request_id = RequestId(str(next(self._numbers)))
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=self._vocabulary.draw(self._random, num_prompt_tokens),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            tbt_target_seconds=1.0,
        )
        self._engine.submit(new)
        return request_id


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a mixed step costs against its parts run apart.")
    parser.add_argument("--model", default="demo:gemma3-270m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    settings = {"model": options.model, "dtype": options.dtype, "device": "cpu", "kv_cache_memory": "2GiB"}
    bench = MixingBench(load_model(WorkerSettings.model_validate(settings)).runner, context_tokens=options.context)
    bench.run_round()  # the first steps of a model are slow
    bench.times = Times()
    for _ in range(options.rounds):
        bench.run_round()
    headers = ("one step", "decodes alone ms", "chunk alone ms", "sum ms", "mixed ms", "mixed / sum")
    rows = [bench.times.row(num_decodes, num_chunk) for num_decodes in DECODES for num_chunk in CHUNKS]
    sys.stdout.write(f"{markdown_table(headers, rows)}\n")


if __name__ == "__main__":
    main()
