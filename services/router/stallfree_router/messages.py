"""What the API side of the router hands to its dispatching side, and gets back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from stallfree_shared.wire import FinishReason, RequestId, SamplingParams, TokenLogprobs, Usage

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One prompt to be continued once. A call for several prompts or answers makes several of these."""

    request_id: RequestId
    """Ours and unique; what the client calls its request is only echoed and logged."""
    model: str
    tenant: str = DEFAULT_TENANT
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tbt_target_seconds: float | None = None
    """None: the worker's default."""
    ttft_target_seconds: float | None = None
    """None: the worker's default."""
    priority: int = 0
    """Lower comes first."""
    cache_salt: str = ""
    """Prefixes are shared only among generations of the same salt."""
    prompt_id: str | None = None
    """The same for all answers to one prompt of a call, where there are several: a worker that has read the prompt for
    one of them need not read it for the others."""
    arrived_at: float
    """Monotonic instant at which the call reached this router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTokens:
    """Tokens of one generation, as they came."""

    index: int
    """Position of the first of `token_ids` in the output, from 0."""
    token_ids: tuple[int, ...]
    """At least one."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of all prompt tokens from the second on, with the first token, where they were asked for."""
    received_at: float
    """Monotonic instant at which this router read them from the worker."""
    tbt_target_seconds: float
    """The target that holds for this generation."""
    finish_reason: FinishReason | None = None
    """Set on the last; "stop" means that the last token is an end or stop token, which is never text."""
    usage: Usage | None = None
    """So far; set on the first and on the last."""


class Outputs(Protocol):
    """The output of one generation, in order, each token once; the last item has `finish_reason` and `usage`."""

    def __aiter__(self) -> AsyncIterator[OutputTokens]: ...

    async def __anext__(self) -> OutputTokens:
        """Raises the error tree's errors: before the first token any of them, after it `ServingError` only."""
        ...

    def complete(self, *, num_tokens: int) -> None:
        """The answer is whole with its first `num_tokens` tokens, for its text has come to a stop string. What was
        received beyond them does not count, and closing is no cancellation."""
        ...

    async def aclose(self) -> None:
        """Lets go of the generation; what still runs of it is cancelled on its worker."""
        ...
