"""What the outside is told of a request: its next token, log-probabilities of its prompt, or its end by an error. Used
by the scheduler only."""

from __future__ import annotations

from stallfree_shared.errors import StepFailedError
from stallfree_shared.metrics import stall_seconds
from stallfree_shared.wire import FinishReason, TokenLogprobs
from stallfree_worker.engine.request import Request
from stallfree_worker.engine.step import EngineEvent, StallCause, StepPlan, StepResult


def token_event(
    request: Request,
    result: StepResult,
    *,
    now: float,
    plan: StepPlan,
    finish_reason: FinishReason | None,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
) -> EngineEvent:
    """The event of a token that was just drawn and is not yet part of the request. `now` is the end of its step."""
    gap = None if request.last_token_at is None else now - request.last_token_at
    stall = 0.0 if gap is None else stall_seconds(gap, request.new.tbt_target_seconds)
    return EngineEvent(
        request_id=request.request_id,
        output_index=len(request.output_token_ids),
        token_id=result.token_id_by_request[request.request_id],
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        logprobs=result.logprobs_by_request.get(request.request_id),
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        time_to_first_token_seconds=now - request.submitted_at if gap is None else None,
        time_between_tokens_seconds=gap,
        stall_seconds=stall,
        stall_cause=_stall_cause(request, plan) if stall > 0 else None,
    )


def prompt_logprobs_event(request: Request, prompt_logprobs: tuple[TokenLogprobs, ...]) -> EngineEvent:
    """Log-probabilities of a prompt that is still being computed: they do not wait for the first token."""
    return EngineEvent(
        request_id=request.request_id,
        output_index=0,
        token_id=None,
        num_prompt_tokens=request.num_prompt_tokens,
        prompt_logprobs=prompt_logprobs,
    )


def failure_event(request: Request, reason: str) -> EngineEvent:
    """The end of a request that the model could not compute."""
    return EngineEvent(
        request_id=request.request_id,
        output_index=len(request.output_token_ids),
        token_id=None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        error=StepFailedError(reason).info,
    )


def _stall_cause(request: Request, plan: StepPlan) -> StallCause:
    if request.was_preempted_since_last_token:
        return "preemption"
    return "prefill" if plan.num_prefill_tokens > 0 else "decode"
