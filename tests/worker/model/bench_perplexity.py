"""The perplexity of a text under a model, as this worker computes it: what a quantization costs in quality.

    .venv/bin/python -m tests.worker.model.bench_perplexity --model MODEL --quantization int8 TEXT

As llama.cpp's tool `llama-perplexity` has it, so that figures can be held against each other: the text is cut into
pieces of `--context` tokens, each begins with the model's first token, and the second half of each is scored.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest, Runner
from stallfree_worker.model.loader import load_model
from stallfree_worker.model.source import model_folder
from stallfree_worker.settings import WorkerSettings


def logprobs_of(runner: Runner, tokens: tuple[int, ...]) -> list[float]:
    """Of every token of `tokens` but the first."""
    engine = Engine(WorkerSettings(model="any", token_budget=512), runner, time.monotonic, has_prefix_cache=False)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.submit(
        NewRequest(request_id=RequestId("piece"), prompt_token_ids=tokens, sampling=sampling, tbt_target_seconds=60.0)
    )
    found: list[float] = []
    while engine.has_work:
        for event in engine.step().events:
            found += [one.logprob for one in event.prompt_logprobs or ()]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="demo:gemma3-270m")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    settings = {"model": options.model, "quantization": options.quantization, "dtype": "bfloat16", "device": "cpu"}
    worker_settings = WorkerSettings.model_validate(settings)
    loaded = load_model(worker_settings)
    tokenizer = Tokenizer.from_file(str(model_folder(worker_settings) / "tokenizer.json"))
    first, *ids = tokenizer.encode(options.text.read_text(encoding="utf-8")).ids
    tokens, length = [first, *ids], options.context
    pieces = [(first, *tokens[start + 1 : start + length]) for start in range(0, len(tokens) - length + 1, length)]
    scored = [logprob for piece in pieces for logprob in logprobs_of(loaded.runner, piece)[length // 2 :]]
    perplexity = math.exp(-sum(scored) / len(scored))
    sys.stdout.write(f"{options.quantization}: perplexity {perplexity:.4f} of {len(scored)} tokens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
