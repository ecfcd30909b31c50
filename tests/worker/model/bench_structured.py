"""What structured outputs cost the streams beside them: the TBT of six plain streams, with two more plain ones or with
two that keep to a JSON schema. Same batch size, same lengths, real engine, the demo model, alternating rounds.

    .venv/bin/python -m tests.worker.model.bench_structured --rounds 7 --tokens 200

Needs the extra `[demo]` and a quiet machine. The last line tells by how much the P99 changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from stallfree_shared.wire import RequestId, SamplingParams, StructuredOutput
from stallfree_worker.engine.calibration import calibrate
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest, Runner
from stallfree_worker.model.loader import load_model
from stallfree_worker.settings import SchedulerSettings, WorkerSettings

NUM_STREAMS = 8
NUM_STRUCTURED = 2
PROMPT_TOKENS = 64
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "kind": {"enum": ["book", "film", "song"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 3},
        "rating": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 10}, {"type": "null"}]},
    },
    "required": ["name", "kind", "year", "tags", "rating"],
    "additionalProperties": False,
}
ENDLESS = StructuredOutput(
    kind="json_schema", definition=json.dumps({"type": "array", "items": _RECORD, "minItems": 10_000})
)
"""So long that every stream ends by its number of tokens."""


def gaps_of_plain_streams(runner: Runner, *, num_structured: int, num_tokens: int, seed: int) -> list[float]:
    """One round: the seconds between the tokens of the plain streams, once all streams have begun."""
    engine = Engine(SchedulerSettings(), runner, time.monotonic)
    calibrate(engine, max_chunk_tokens=PROMPT_TOKENS)
    for stream in range(NUM_STREAMS):
        is_structured = stream >= NUM_STREAMS - num_structured
        sampling = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            seed=seed * NUM_STREAMS + stream,
            structured_output=ENDLESS if is_structured else None,
        )
        prompt = tuple(range(1000 * stream + 500, 1000 * stream + 500 + PROMPT_TOKENS))
        engine.submit(
            NewRequest(
                request_id=RequestId(str(stream)), prompt_token_ids=prompt, sampling=sampling, tbt_target_seconds=0.2
            )
        )
    plain = {RequestId(str(stream)) for stream in range(NUM_STREAMS - NUM_STRUCTURED)}
    begun: set[RequestId] = set()
    gaps: list[float] = []
    while engine.has_work:
        for event in engine.step().events:
            if event.error is not None:
                raise RuntimeError(event.error.message)
            gap = event.time_between_tokens_seconds
            if gap is not None and event.request_id in plain and len(begun) == NUM_STREAMS:
                gaps.append(gap)
            begun.add(event.request_id)
    return gaps


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    settings = {"model": "demo:gemma3-270m", "dtype": "bfloat16", "device": "cpu", "threads": options.threads}
    runner = load_model(WorkerSettings.model_validate(settings)).runner
    gaps_of_plain_streams(runner, num_structured=NUM_STRUCTURED, num_tokens=8, seed=0)  # warms everything up
    gaps: dict[int, list[list[float]]] = {0: [], NUM_STRUCTURED: []}
    for seed in range(options.rounds):
        order = (0, NUM_STRUCTURED) if seed % 2 == 0 else (NUM_STRUCTURED, 0)
        for num_structured in order:
            found = gaps_of_plain_streams(runner, num_structured=num_structured, num_tokens=options.tokens, seed=seed)
            gaps[num_structured].append(found)
            _print(f"round {seed}, {num_structured} structured", found)
    medians = {}
    for num_structured, rounds in gaps.items():
        p99s = [percentile(found, 0.99) * 1000 for found in rounds]
        medians[num_structured] = statistics.median(p99s)
        sys.stdout.write(
            f"{num_structured} structured: P99 {medians[num_structured]:.1f} ms, the median of {len(p99s)} rounds, "
            f"from {min(p99s):.1f} to {max(p99s):.1f}\n"
        )
        _print(f"{num_structured} structured, all rounds", [gap for found in rounds for gap in found])
    sys.stdout.write(f"change of the P99: {100 * (medians[NUM_STRUCTURED] / medians[0] - 1):+.1f} %\n")


def _print(name: str, gaps: Sequence[float]) -> None:
    p50, p99, longest = (1000 * percentile(gaps, share) for share in (0.5, 0.99, 1.0))
    sys.stdout.write(f"{name}: P50 {p50:.1f} ms, P99 {p99:.1f} ms, max {longest:.1f} ms\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
