"""Messages between the front and the engine's process come through the pipe as they were."""

from __future__ import annotations

from stallfree_shared.errors import StepFailedError
from stallfree_shared.wire import RequestId, TokenLogprobs
from stallfree_worker.engine.step import EngineEvent, EngineStatus, StepReport
from stallfree_worker.engine.step_time import StepTimeLine
from stallfree_worker.engine_messages import EngineFailed, EngineReport, pack, unpack
from tests.worker.step_records import step_record

STATUS = EngineStatus(
    requests_running=1,
    requests_waiting=2,
    num_blocks=10,
    num_free_blocks=4,
    token_budget_tokens=512,
    prefill_tokens_left=5,
    expected_output_tokens_left=6,
    step_time=StepTimeLine(base_seconds=0.01, seconds_per_token=0.001),
    step_time_error_ratio=0.5,
)

LOGPROBS = TokenLogprobs(logprob=-0.5, top=((4, -0.25), (7, -0.5)))


def test_report_comes_through_the_pipe_as_it_was() -> None:
    token = EngineEvent(
        request_id=RequestId("a"),
        output_index=3,
        token_id=7,
        num_prompt_tokens=4,
        num_cached_tokens=2,
        logprobs=LOGPROBS,
        finish_reason="stop",
        time_between_tokens_seconds=0.3,
        stall_seconds=0.1,
        stall_cause="prefill",
    )
    failure = EngineEvent(
        request_id=RequestId("b"), output_index=0, token_id=None, num_prompt_tokens=1, error=StepFailedError("NaN").info
    )
    prompt = EngineEvent(
        request_id=RequestId("c"),
        output_index=0,
        token_id=None,
        num_prompt_tokens=3,
        prompt_logprobs=(LOGPROBS, LOGPROBS),
    )
    step = StepReport(events=(token, failure, prompt), status=STATUS, record=step_record())
    report = EngineReport(step=step, submits_taken=9)
    nothing_computed = EngineReport(step=StepReport(events=(), status=STATUS), submits_taken=0)
    for message in (report, nothing_computed):
        received = unpack(pack(message))
        assert isinstance(received, EngineReport)
        assert received == message
        assert types_of(received) == types_of(message)  # a tuple of any kind is equal to another


def test_other_messages_come_through_the_pipe_too() -> None:
    failed = EngineFailed(reason="no memory")
    assert unpack(pack(failed)) == failed


def types_of(report: EngineReport) -> list[type]:
    step = report.step
    return [type(part) for part in (report, step, *step.events, step.status, step.status.step_time, step.record)]
