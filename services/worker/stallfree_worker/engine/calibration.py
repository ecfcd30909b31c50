"""The first requests that an engine serves are its own: they warm the model up, and the step times are known before
anybody's request depends on them. Called by the engine's process before it reports ready."""

from __future__ import annotations

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest

CHUNK_TOKENS = (16, 64, 256, 512)
"""Sizes that tell where a token is nearly free, where it is not, and how attention grows between them."""
NUM_DECODES = 4
_REQUEST_ID = RequestId("calibration")


def calibrate(engine: Engine, *, max_chunk_tokens: int) -> None:
    """Computes prefill chunks of growing size, up to `max_chunk_tokens` tokens, each followed by a few decodes, on the
    path that requests take.

    Raises:
        RuntimeError: the model cannot compute them.
    """
    num_outputs = min(NUM_DECODES, max(1, engine.max_model_len - 1))
    longest = max(1, min(max_chunk_tokens, engine.max_model_len - num_outputs))
    for num_tokens in sorted({min(size, longest) for size in CHUNK_TOKENS}):
        _serve(engine, num_prompt_tokens=num_tokens, num_outputs=num_outputs)


def _serve(engine: Engine, *, num_prompt_tokens: int, num_outputs: int) -> None:
    engine.submit(
        NewRequest(
            request_id=_REQUEST_ID,
            prompt_token_ids=(0,) * num_prompt_tokens,
            sampling=SamplingParams(max_tokens=num_outputs, ignore_eos=True),
            tbt_target_seconds=float("inf"),
            cache_salt=f"calibration {num_prompt_tokens}",  # or a longer one would find the shorter one's blocks
        )
    )
    while engine.has_work:
        for event in engine.step().events:
            if event.error is not None:
                raise RuntimeError(f"the model cannot compute one token: {event.error.message}")
