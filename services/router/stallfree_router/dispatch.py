"""One request's life: predict → pick → submit → stream. Called by `generation`, which turns the tokens into text.

A failure before the first token sends the request to another worker; one after it is told to the client, for a second
generation would not continue the first one's text. What a worker tells of the prompt is kept until the first token, so
nothing is told of an attempt that is lost before. Every token is handed on once: its index says where it belongs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace

from stallfree_router.attempt import Attempt
from stallfree_router.messages import Generation, OutputTokens
from stallfree_router.metrics import RouterMetrics
from stallfree_router.policy import Demand
from stallfree_router.predictor import Predictor
from stallfree_router.records import LiveRecord, RequestRecords
from stallfree_router.settings import DispatchSettings
from stallfree_router.workers import Reservation, Workers
from stallfree_shared.errors import StallfreeError, WorkerLostError, WorkerTimeoutError
from stallfree_shared.wire import FinishReason, TokenEvent, TokenLogprobs, Usage

MAX_WORKERS_LOST = 2
"""A request that takes so many workers down with it is not sent to another one."""
_TOKEN_ID_LIMIT = 2**32


@dataclass(slots=True, kw_only=True)
class _Life:
    """What a request has been through so far."""

    generation: Generation
    demand: Demand
    record: LiveRecord
    attempt: int = 0
    is_placed: bool = False
    """The present attempt has a worker."""
    is_accepted: bool = False
    """And that worker has taken it."""
    num_workers_lost: int = 0
    """After they had accepted it."""
    tried: set[str] = field(default_factory=set)
    dispatch_reason: str = "first"
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """What the present attempt has told of the prompt, until they are handed on."""
    num_output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None


class DispatchedOutputs:
    """The `Outputs` of a generation that workers continue."""

    def __init__(self, life: _Life, outputs: AsyncGenerator[OutputTokens, None]) -> None:
        self._life = life
        self._outputs = outputs

    def __aiter__(self) -> AsyncIterator[OutputTokens]:
        return self

    async def __anext__(self) -> OutputTokens:
        return await anext(self._outputs)

    def complete(self, *, num_tokens: int) -> None:
        life = self._life
        life.num_output_tokens = num_tokens
        life.finish_reason = "stop"
        num_prompt_tokens = len(life.generation.prompt_token_ids)
        usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens, cached_tokens=life.cached_tokens)
        life.record.finish("stop", usage)

    async def aclose(self) -> None:
        await self._outputs.aclose()
        self._life.record.close()  # for outputs that nobody has looked at


class Dispatcher:
    """Sends generations to workers."""

    def __init__(
        self,
        *,
        workers: Workers,
        predictor: Predictor,
        records: RequestRecords,
        metrics: RouterMetrics,
        settings: DispatchSettings,
    ) -> None:
        self._workers = workers
        self._predictor = predictor
        self._records = records
        self._metrics = metrics
        self._settings = settings
        self._urls_by_prompt: dict[str, list[str]] = {}
        """Where the prompts are that several generations share, one entry for each of these that has a worker now."""

    @property
    def num_shared_prompts(self) -> int:
        """Prompts that are remembered for their siblings."""
        return len(self._urls_by_prompt)

    def generate(self, generation: Generation) -> DispatchedOutputs:
        """Begins with the first look at the outputs. Raises, as they are read:

        UnavailableError, OverloadedError, InvalidRequestError: before the first token only.
        ServingError: the worker, or the way to it, failed. After the first token: the answer is incomplete.
        """
        life = self._begin(generation)
        return DispatchedOutputs(life, self._live(life))

    async def _live(self, life: _Life) -> AsyncGenerator[OutputTokens, None]:
        try:
            async with contextlib.aclosing(self._try_workers(life)) as outputs:
                async for output in outputs:
                    yield output
        except StallfreeError as error:
            life.record.fail(error.info)
            raise
        finally:
            life.record.close()
            self._learn(life)

    async def _try_workers(self, life: _Life) -> AsyncGenerator[OutputTokens, None]:
        """Attempts, until one gives output or all are used up."""
        while True:
            try:
                async with contextlib.aclosing(self._try_one(life)) as outputs:
                    async for output in outputs:
                        yield output
            except StallfreeError as error:
                life.num_workers_lost += life.is_accepted and isinstance(error, WorkerLostError | WorkerTimeoutError)
                if not self._may_retry(life, error):
                    raise
                life.dispatch_reason = error.code
            else:
                return

    async def _try_one(self, life: _Life) -> AsyncGenerator[OutputTokens, None]:
        life.is_placed = life.is_accepted = False
        prompt_id = life.generation.prompt_id
        places = self._urls_by_prompt.get(prompt_id) if prompt_id is not None else None
        demand = replace(life.demand, prompt_is_at=places[0]) if places else life.demand
        async with self._workers.reserved(demand, tried=life.tried) as reservation:
            self._place(life, reservation)
            submitted = reservation.connection.submitted(
                life.generation,
                attempt_number=life.attempt,
                expected_output_tokens=life.demand.expected_output_tokens,
            )
            async with self._shown_to_siblings(prompt_id, reservation.url), submitted as (accepted, attempt):
                life.is_accepted = True
                self._workers.mark_accepted(reservation, accepted)
                async with contextlib.aclosing(self._stream(life, attempt, accepted.tbt_target_seconds)) as outputs:
                    async for output in outputs:
                        if output.index == 0:
                            self._workers.mark_output(reservation)
                        yield output

    @contextlib.asynccontextmanager
    async def _shown_to_siblings(self, prompt_id: str | None, url: str) -> AsyncIterator[None]:
        """Tells the other generations of the prompt, while the block runs, where it is."""
        if prompt_id is None:
            yield
            return
        urls = self._urls_by_prompt.setdefault(prompt_id, [])
        urls.append(url)
        try:
            yield
        finally:
            urls.remove(url)
            if not urls:
                self._urls_by_prompt.pop(prompt_id, None)

    async def _stream(
        self, life: _Life, attempt: Attempt, tbt_target_seconds: float
    ) -> AsyncGenerator[OutputTokens, None]:
        """The attempt's events, to the last one."""
        while life.finish_reason is None:
            event, received_at = await attempt.next_event()
            life.prompt_logprobs += event.prompt_logprobs or ()
            token_ids, logprobs = _new_tokens(event, life)
            if not token_ids and event.finish_reason is None:
                continue
            index = life.num_output_tokens
            prompt_logprobs = _prompt_logprobs(life) if index == 0 else None
            life.num_output_tokens += len(token_ids)
            if event.usage is not None:
                life.cached_tokens = event.usage.cached_tokens
            life.finish_reason = event.finish_reason
            life.record.add_tokens(token_ids)
            if event.finish_reason is not None:
                life.record.finish(event.finish_reason, event.usage)
            yield OutputTokens(
                index=index,
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                received_at=received_at,
                tbt_target_seconds=tbt_target_seconds,
                finish_reason=event.finish_reason,
                usage=event.usage,
            )

    def _begin(self, generation: Generation) -> _Life:
        max_tokens = generation.sampling.max_tokens
        expected = (
            float(max_tokens)
            if generation.sampling.ignore_eos
            else self._predictor.expected_output_tokens(generation.model, max_tokens)
        )
        demand = Demand(
            model=generation.model,
            prompt_tokens=len(generation.prompt_token_ids),
            max_tokens=max_tokens,
            expected_output_tokens=expected,
        )
        return _Life(generation=generation, demand=demand, record=self._records.open(generation))

    def _place(self, life: _Life, reservation: Reservation) -> None:
        life.is_placed = True
        life.attempt += 1
        life.prompt_logprobs.clear()
        life.tried.add(reservation.url)
        life.record.dispatch(attempt=life.attempt, worker=reservation.url)
        self._metrics.attempts.labels(life.dispatch_reason).inc()
        if life.attempt == 1:
            queued_seconds = time.monotonic() - life.generation.arrived_at
            labels = life.generation.model, life.generation.tenant
            self._metrics.queue_seconds.labels(*labels).observe(max(0.0, queued_seconds))

    def _may_retry(self, life: _Life, error: StallfreeError) -> bool:
        return (
            life.is_placed
            and life.num_output_tokens == 0
            and life.attempt < self._settings.max_attempts
            and life.num_workers_lost < MAX_WORKERS_LOST
            and error.is_retryable
        )

    def _learn(self, life: _Life) -> None:
        """Tells the predictor the length. One that a client or a failure cut is a lower bound of it."""
        sampling = life.generation.sampling
        if life.num_output_tokens == 0 or sampling.ignore_eos:
            return
        self._predictor.learn(
            life.generation.model,
            sampling.max_tokens,
            num_tokens=life.num_output_tokens,
            predicted=life.demand.expected_output_tokens,
            ended_by_itself=life.finish_reason == "stop",
        )


def _new_tokens(event: TokenEvent, life: _Life) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
    """The tokens of an event that are not known yet, with their log-probabilities where those were asked for.

    Raises:
        StallfreeError: the event is the end by an error; `WorkerLostError` where tokens in between are missing,
            or are no tokens, or log-probabilities do not match them.
    """
    if event.error is not None:
        raise StallfreeError.from_info(event.error)
    num_known = life.num_output_tokens
    if event.index > num_known:
        raise WorkerLostError(f"the worker's tokens {num_known} to {event.index - 1} are missing")
    if any(not 0 <= token_id < _TOKEN_ID_LIMIT for token_id in event.token_ids):
        raise WorkerLostError("the worker sent a number that is no token id")
    token_ids = event.token_ids[num_known - event.index :]
    if life.generation.sampling.logprobs is None:
        return token_ids, None
    if len(event.logprobs or ()) != len(event.token_ids):
        raise WorkerLostError("the worker's log-probabilities are not those of its tokens")
    return token_ids, (event.logprobs or ())[num_known - event.index :]


def _prompt_logprobs(life: _Life) -> tuple[TokenLogprobs, ...] | None:
    """Raises:
    WorkerLostError: they are not those of the prompt.
    """
    if life.generation.sampling.prompt_logprobs is None:
        return None
    if len(life.prompt_logprobs) != len(life.generation.prompt_token_ids) - 1:
        raise WorkerLostError("the worker's log-probabilities are not those of the prompt")
    told = tuple(life.prompt_logprobs)
    life.prompt_logprobs.clear()
    return told
