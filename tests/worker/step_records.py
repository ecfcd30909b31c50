"""Records of steps for tests of what is made of them."""

from __future__ import annotations

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import StepRecord

RECORD = StepRecord(
    step_id=0,
    started_at=100.0,
    schedule_seconds=0.001,
    execute_seconds=0.018,
    apply_seconds=0.001,
    idle_seconds=None,
    predicted_seconds=0.025,
    predicted_quantile_seconds=0.03,
    budget_seconds=0.19,
    budget_tokens=None,
    request_ids=(),
    chunk_tokens=(),
    context_tokens=(),
    num_decodes=0,
    num_recomputed_tokens=0,
    num_prefix_query_tokens=0,
    num_prefix_hit_tokens=0,
    preempted_request_ids=(),
    requests_running=0,
    requests_waiting=0,
    num_free_blocks=64,
)


def step_record(*chunks: tuple[str, int, int], num_decodes: int = 0, **changes: object) -> StepRecord:
    """A step of 20 ms with `chunks`, each a request id, its tokens, and the tokens before them; decodes first."""
    return RECORD._replace(
        request_ids=tuple(RequestId(request_id) for request_id, _, _ in chunks),
        chunk_tokens=tuple(num_tokens for _, num_tokens, _ in chunks),
        context_tokens=tuple(context for _, _, context in chunks),
        num_decodes=num_decodes,
        **changes,  # type: ignore[arg-type]  # fields of the record, by name
    )
