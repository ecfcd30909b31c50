"""One request between its submit and its end, as the HTTP front knows it: its names on either side, the stream that its
events take, and what has been told so far. Owned by `connections.Connections`; knows nothing of the engine's process.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from stallfree_shared.errors import ErrorInfo
from stallfree_shared.wire import RequestId, TokenEvent, Usage
from stallfree_worker.engine.step import EngineEvent
from stallfree_worker.frame_stream import FrameStream
from stallfree_worker.request_timing import RequestTiming


@dataclass(slots=True, kw_only=True)
class ServedRequest:
    engine_id: RequestId
    """See `step_history.engine_request_id`."""
    request_id: RequestId
    attempt: int
    num_prompt_tokens: int
    stream: FrameStream
    timing: RequestTiming
    hold: contextlib.ExitStack
    """Keeps the process from leaving; closed at the end."""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    def tell(self, event: EngineEvent) -> TokenEvent:
        """Takes `event` into account, and turns it into what the router reads."""
        self.num_cached_tokens = event.num_cached_tokens
        has_token = event.token_id is not None
        if has_token:
            self.num_output_tokens = event.output_index + 1
        is_last = event.finish_reason is not None or event.error is not None
        return TokenEvent(
            request_id=self.request_id,
            attempt=self.attempt,
            index=event.output_index,
            token_ids=() if event.token_id is None else (event.token_id,),
            logprobs=None if event.logprobs is None else (event.logprobs,),
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=event.finish_reason,
            usage=self.usage if is_last or (has_token and event.output_index == 0) else None,
            error=event.error,
        )

    def failure(self, error: ErrorInfo) -> TokenEvent:
        """Its end by an error that the engine did not tell."""
        return TokenEvent(
            request_id=self.request_id,
            attempt=self.attempt,
            index=self.num_output_tokens,
            token_ids=(),
            usage=self.usage,
            error=error,
        )
