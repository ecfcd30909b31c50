"""What is shown of the last steps."""

from __future__ import annotations

import json

from stallfree_shared.wire import RequestId
from stallfree_worker.step_history import (
    MAX_STEPS,
    StepHistory,
    engine_request_id,
    router_request_id,
    steps_json,
)
from tests.worker.step_records import step_record


def test_history_is_bounded_and_tells_the_newest_last() -> None:
    history = StepHistory()
    for number in range(MAX_STEPS + 5):
        history.add(step_record(step_id=number))
    assert len(history.last(MAX_STEPS)) == MAX_STEPS
    assert [record.step_id for record in history.last(3)] == [MAX_STEPS + 2, MAX_STEPS + 3, MAX_STEPS + 4]
    assert len(StepHistory().last(10)) == 0


def test_body_has_exactly_these_names() -> None:
    record = step_record(("a/b#c#1#7", 1, 40), ("long#2#8", 60, 120), num_decodes=1, step_id=9, idle_seconds=0.004)
    body = json.loads(steps_json((record, step_record())))
    step = {**body["steps"][0], "seconds": round(body["steps"][0]["seconds"], 9)}
    assert step == {
        "step_id": 9,
        "started_at": 100.0,
        "seconds": 0.02,
        "schedule_seconds": 0.001,
        "execute_seconds": 0.018,
        "apply_seconds": 0.001,
        "idle_seconds": 0.004,
        "predicted_seconds": 0.025,
        "predicted_quantile_seconds": 0.03,
        "budget_seconds": 0.19,
        "budget_tokens": None,
        "decode_tokens": 1,
        "prefill_tokens": 60,
        "num_decodes": 1,
        "chunks": [
            {"request_id": "a/b#c", "num_tokens": 1, "context_tokens": 40},
            {"request_id": "long", "num_tokens": 60, "context_tokens": 120},
        ],
        "preemptions": 0,
        "requests_running": 0,
        "requests_waiting": 0,
    }
    assert body["steps"][1]["idle_seconds"] == 0.0
    assert json.loads(steps_json(())) == {"steps": []}


def test_engine_ids_are_shown_as_the_routers_ids() -> None:
    for name in ("plain", "with#hash", "#", "a/b"):
        assert router_request_id(engine_request_id(RequestId(name), 3, 17)) == name
