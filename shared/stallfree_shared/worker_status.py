"""What a worker tells every router about itself: capacity, queue, KV use, speed, and whether it is leaving.

A status is a snapshot, published with every few frames. It carries a `sequence`; a router counts a request that it has
submitted itself until a status arrives that is newer than the worker's acceptance of it (see `wire.SubmitAccepted`),
so nothing is counted twice and nothing is missed.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class StepTimeCoefficients(BaseModel):
    """How long a step takes on this worker: `base_seconds + seconds_per_token * tokens in the step`."""

    model_config = ConfigDict(frozen=True, strict=True)

    base_seconds: float = Field(ge=0)
    seconds_per_token: float = Field(gt=0)


class WorkerStatus(BaseModel):
    """One worker's state at one instant. Tokens and requests are those inside the engine, from every router."""

    model_config = ConfigDict(frozen=True, strict=True)

    sequence: int = Field(ge=0)
    is_ready: bool
    is_draining: bool
    max_num_seqs: int
    token_budget_tokens: int
    kv_total_tokens: int
    kv_free_tokens: int
    requests_running: int
    requests_waiting: int
    prefill_tokens_left: int
    """Prompt tokens not yet computed, over waiting and running requests."""
    expected_output_tokens_left: int
    """Tokens still to be generated, by the routers' own predictions (`SubmitRequest.expected_output_tokens`)."""
    step_time: StepTimeCoefficients
