"""Predicted token load: how many seconds of work a worker still owes, and what one more request would cost there.

Pure functions of a `WorkerStatus`; no I/O, no clock. The worker publishes `owed_seconds` as a metric; the router's
policy compares workers by `delay_seconds`. All is in seconds of that worker's own step-time coefficients, so a slow
GPU counts as slow and nobody has to say which one it is.

A step of `n` tokens takes `a + b*n` seconds (`a` = base_seconds, `b` = seconds_per_token). With `d` decodes in every
step, a step of the token budget `B` carries `B - d` prefill tokens (the stall-free rule: decodes first, Sarathi-Serve,
section 4.2). From that:

    prefill_seconds(p)       = ceil(p / (B - d)) * (a + b*d) + b*p
    marginal_decode_seconds  = b + a / d
    owed_seconds             = prefill_seconds(prefill left) + expected output left * marginal_decode_seconds

Steps that carry decodes beside prefill pay `a` in both terms, so what is owed is bounded from above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stallfree_shared.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one request asks of a worker."""

    prefill_tokens: int
    """Prompt tokens to compute."""
    output_tokens: float
    """Tokens that it is expected to generate."""


def with_work(status: WorkerStatus, works: Iterable[Work]) -> WorkerStatus:
    """The status as it would be with `works` waiting there too: what was sent since the worker took its snapshot."""
    pending = tuple(works)
    if not pending:
        return status
    output_tokens = math.ceil(sum(work.output_tokens for work in pending))
    return status.model_copy(
        update={
            "requests_waiting": status.requests_waiting + len(pending),
            "prefill_tokens_left": status.prefill_tokens_left + sum(work.prefill_tokens for work in pending),
            "expected_output_tokens_left": status.expected_output_tokens_left + output_tokens,
        }
    )


def owed_seconds(status: WorkerStatus) -> float:
    """Expected seconds of work that the worker still owes: its predicted token load."""
    decode_seconds = status.expected_output_tokens_left * marginal_decode_seconds(status)
    return prefill_seconds(status, status.prefill_tokens_left) + decode_seconds


def prefill_seconds(status: WorkerStatus, num_tokens: int) -> float:
    """Seconds to compute `num_tokens` prompt tokens at the speed that the token budget leaves beside the decodes."""
    if num_tokens <= 0:
        return 0.0
    num_decodes = status.requests_running
    chunk_tokens = max(1, status.token_budget_tokens - num_decodes)
    num_steps = math.ceil(num_tokens / chunk_tokens)
    return num_steps * _step_seconds(status, num_decodes) + num_tokens * status.step_time.seconds_per_token


def marginal_decode_seconds(status: WorkerStatus) -> float:
    """Seconds per output token: its own part of a step, and its share of the step's fixed part."""
    num_decodes = max(1, min(status.max_num_seqs, _num_requests(status)))
    return status.step_time.seconds_per_token + status.step_time.base_seconds / num_decodes


def time_to_first_token_seconds(status: WorkerStatus, work: Work) -> float:
    """Predicted seconds from a submit to the first output token: a slot, then memory, then all prefill before it.

    The worker serves its queue in order, so the whole prefill that is left there comes first.
    """
    prefill = prefill_seconds(status, status.prefill_tokens_left + work.prefill_tokens)
    return _slot_seconds(status) + _memory_seconds(status, work) + prefill


def decode_seconds(status: WorkerStatus, work: Work) -> float:
    """Predicted seconds that the request's own output takes, beside all that are there already."""
    num_decodes = min(status.max_num_seqs, _num_requests(status) + 1)
    return work.output_tokens * _step_seconds(status, num_decodes)


def harm_seconds(status: WorkerStatus, work: Work) -> float:
    """Seconds by which the request delays those that are there already, summed over them.

    Every prefill token lengthens a step that each of them waits for, and so does every token that it generates while
    they are still running. Those that wait are ahead of it in the queue, so they decode by then.
    """
    shared_steps = min(work.output_tokens, _mean_output_tokens_left(status))
    return _num_requests(status) * status.step_time.seconds_per_token * (work.prefill_tokens + shared_steps)


def delay_seconds(status: WorkerStatus, work: Work) -> float:
    """The cost of placing `work` here: the seconds until its last token, and those by which it delays others."""
    return time_to_first_token_seconds(status, work) + decode_seconds(status, work) + harm_seconds(status, work)


def _slot_seconds(status: WorkerStatus) -> float:
    """Wait for a place among `max_num_seqs`: slots come free at one each (mean output left / slots) steps."""
    num_ahead = _num_requests(status) + 1 - status.max_num_seqs
    if num_ahead <= 0:
        return 0.0
    num_steps = num_ahead * _mean_output_tokens_left(status) / status.max_num_seqs
    return num_steps * _step_seconds(status, status.max_num_seqs)


def _memory_seconds(status: WorkerStatus, work: Work) -> float:
    """Wait for KV memory: the share of the cache that must come free first, of the time until all of it is free.

    A prompt that is half computed has its blocks already and is still counted as needing them: an upper bound.
    """
    needed_tokens = status.prefill_tokens_left + work.prefill_tokens + work.output_tokens
    short_tokens = max(0.0, needed_tokens - status.kv_free_tokens)
    return owed_seconds(status) * short_tokens / max(1, status.kv_total_tokens)


def _step_seconds(status: WorkerStatus, num_tokens: int) -> float:
    return status.step_time.base_seconds + status.step_time.seconds_per_token * num_tokens


def _num_requests(status: WorkerStatus) -> int:
    return status.requests_running + status.requests_waiting


def _mean_output_tokens_left(status: WorkerStatus) -> float:
    return status.expected_output_tokens_left / max(1, _num_requests(status))
