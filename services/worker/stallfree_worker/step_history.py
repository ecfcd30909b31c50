"""The last steps, for a person who looks: `GET /debug/steps` and `--trace` show them in the words of this module.

`StepHistory` is the sole owner of the records that are kept, in the HTTP front; the engine's process keeps none. What
is shown names requests and counts tokens; it never holds a token.
"""

from __future__ import annotations

import json
from collections import deque

from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import StepRecord

MAX_STEPS = 512


class StepHistory:
    """The newest `MAX_STEPS` steps."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def last(self, count: int) -> tuple[StepRecord, ...]:
        """At most `count` records, the newest last."""
        return tuple(self._records)[-count:]


def engine_request_id(request_id: RequestId, attempt: int, serial: int) -> RequestId:
    """What the engine calls a request. `serial` is never used again, so that late events of a cancelled request cannot
    reach a later one of the same name."""
    return RequestId(f"{request_id}#{attempt}#{serial}")


def router_request_id(engine_id: RequestId) -> str:
    """What the router calls the request that the engine knows as `engine_id`."""
    return engine_id.rsplit("#", 2)[0]


def steps_json(records: tuple[StepRecord, ...]) -> bytes:
    """The body of `GET /debug/steps`. Encodes step by step, so that a thread which does it never keeps the interpreter
    from others for long."""
    return b'{"steps": [' + b", ".join(json.dumps(shown(record)).encode() for record in records) + b"]}"


def shown(record: StepRecord) -> dict[str, object]:
    """One step as JSON. `idle_seconds` is 0 where nothing waited for the step."""
    return {
        "step_id": record.step_id,
        "started_at": record.started_at,
        "seconds": record.seconds,
        "schedule_seconds": record.schedule_seconds,
        "execute_seconds": record.execute_seconds,
        "apply_seconds": record.apply_seconds,
        "idle_seconds": record.idle_seconds or 0.0,
        "predicted_seconds": record.predicted_seconds,
        "predicted_quantile_seconds": record.predicted_quantile_seconds,
        "budget_seconds": record.budget_seconds,
        "budget_tokens": record.budget_tokens,
        "decode_tokens": record.num_decode_tokens,
        "prefill_tokens": record.num_prefill_tokens,
        "num_decodes": record.num_decodes,
        "chunks": [
            {"request_id": router_request_id(request_id), "num_tokens": num_tokens, "context_tokens": context_tokens}
            for request_id, num_tokens, context_tokens in zip(
                record.request_ids, record.chunk_tokens, record.context_tokens, strict=True
            )
        ],
        "preemptions": len(record.preempted_request_ids),
        "requests_running": record.requests_running,
        "requests_waiting": record.requests_waiting,
    }
