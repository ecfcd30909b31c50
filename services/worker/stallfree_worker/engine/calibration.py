"""The first requests that an engine serves are its own: they warm the model up, and the step times are known before
anybody's request depends on them. Called by the engine's process before it reports ready."""

from __future__ import annotations

from stallfree_shared.wire import RequestId, SamplingParams
from stallfree_worker.engine.engine import Engine
from stallfree_worker.engine.step import NewRequest

NUM_DECODES = 8
_REQUEST_ID = RequestId("calibration")


def calibrate(engine: Engine, *, chunk_tokens: int) -> None:
    """Computes one prefill chunk of up to `chunk_tokens` tokens and a few decodes, on the path that requests take.

    Raises:
        RuntimeError: the model cannot compute them.
    """
    num_outputs = min(NUM_DECODES, max(1, engine.max_model_len - 1))
    num_prompt_tokens = max(1, min(chunk_tokens, engine.max_model_len - num_outputs))
    engine.submit(
        NewRequest(
            request_id=_REQUEST_ID,
            prompt_token_ids=(0,) * num_prompt_tokens,
            sampling=SamplingParams(max_tokens=num_outputs, ignore_eos=True),
            tbt_target_seconds=float("inf"),
        )
    )
    while engine.has_work:
        for event in engine.step().events:
            if event.error is not None:
                raise RuntimeError(f"the model cannot compute one token: {event.error.message}")
