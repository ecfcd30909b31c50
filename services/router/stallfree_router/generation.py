"""One call from its body to text events: admit, tokenize, dispatch, detokenize, stop. The order stands here alone.

The routes call `TextGenerator.answer`; streamed or not, an answer is made the same way. Everything that is wrong with
a call before a worker sees it is raised when the context is entered, everything later by the events.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stallfree_router.admission import Admission
from stallfree_router.choices import merge
from stallfree_router.messages import DEFAULT_TENANT, Generation, Outputs
from stallfree_router.output_text import OutputText, TextEvent
from stallfree_router.request_classes import Terms, cache_salt, resolve_terms
from stallfree_router.sampling import resolve_sampling
from stallfree_router.settings import ApiSettings
from stallfree_router.text.prompts import TokenIds, prompt_texts, tokenize_prompts
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_router.text.structured_output import StructuredOutputChecks
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.errors import InvalidRequestError, ModelNotFoundError, ServingError, UnavailableError
from stallfree_shared.openai_api import ChatCompletionRequest, CompletionRequest
from stallfree_shared.wire import ModelCard, RequestId, StructuredOutput

GenerationBody = CompletionRequest | ChatCompletionRequest

MAX_PROMPT_LOGPROBS = 64_000
"""Most log-probabilities of prompt tokens that one call may ask for: all of them are in memory at once, and writing so
many holds the interpreter for about 0.1 s, in which no stream moves."""
_MAX_SHOWN_NAME_CHARACTERS = 64


class Generator(Protocol):
    """Continues prompts on workers (`dispatch.Dispatcher`)."""

    def generate(self, generation: Generation) -> Outputs: ...


class ServedModels(Protocol):
    """What the workers serve (`workers.Workers`)."""

    def models(self) -> Mapping[str, ModelCard]: ...

    def usable(self, model: str) -> bool: ...


class Account(Protocol):
    """Who a call is, and who counts what is done for it (`accounting.CallAccount`)."""

    call_id: str
    arrived_at: float
    model: str

    def dispatched(self, *, prompt_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A call that workers are answering."""

    model: str
    prompts: Sequence[TokenIds]
    prompt_texts: Sequence[str]
    """Where the prompts are to be echoed; else empty."""
    n: int
    tokenizer: Tokenizer
    service_tier: str
    """The class that the call was served in."""
    events: AsyncGenerator[TextEvent | None, None]
    """Of all choices, as they come; None stands for a while of silence."""
    is_waiting_for_worker: bool
    """No worker is usable now: the first event, or error, tells what becomes of the call."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class TextGenerator:
    """Holds what all calls share, and nothing of any call."""

    def __init__(
        self,
        *,
        admission: Admission,
        served_models: ServedModels,
        tokenizers: TokenizerRegistry,
        structured_output_checks: StructuredOutputChecks,
        generator: Generator,
        settings: ApiSettings,
    ) -> None:
        self._admission = admission
        self._served_models = served_models
        self._tokenizers = tokenizers
        self._structured_output_checks = structured_output_checks
        self._generator = generator
        self._settings = settings

    @contextlib.asynccontextmanager
    async def answer(
        self, body: GenerationBody, account: Account, *, silence_seconds: float | None = None
    ) -> AsyncIterator[Answer]:
        """Has a call answered. Leaving the context cancels on the workers what still runs.

        Raises:
            StallfreeError: any of the tree, see errors.py.
        """
        self._check_num_choices(body)
        terms = resolve_terms(body, self._settings)
        with self._admission.admitted():
            card = self._served_card(body.model)
            account.model = card.model
            tokenizer = self._tokenizers.tokenizer(card)
            prompts = await tokenize_prompts(body, card, self._tokenizers)
            _check_num_prompt_logprobs(body, prompts)
            structure = await self._structured_output_checks.structured_output(body)
            generations = _generations(body, card, prompts, account, terms=terms, structure=structure)
            echoed = await prompt_texts(body, prompts, tokenizer, self._tokenizers)
            account.dispatched(prompt_tokens=sum(map(len, prompts)))
            texts = [
                self._continue(
                    OutputText(choice, tokenizer, body.stop), generation, is_scored_only=body.max_tokens == 0
                )
                for choice, generation in enumerate(generations)
            ]
            async with contextlib.aclosing(merge(texts, silence_seconds=silence_seconds)) as events:
                yield Answer(
                    model=card.model,
                    prompts=prompts,
                    prompt_texts=echoed,
                    n=body.n,
                    tokenizer=tokenizer,
                    service_tier=terms.service_tier,
                    events=events,
                    is_waiting_for_worker=not self._served_models.usable(card.model),
                )

    async def _continue(
        self, text: OutputText, generation: Generation, *, is_scored_only: bool
    ) -> AsyncGenerator[TextEvent, None]:
        """One choice: its tokens from a worker, as text up to the first stop string. Where only the prompt is scored,
        the one token that a worker draws nevertheless is nobody's."""
        async with contextlib.aclosing(self._generator.generate(generation)) as outputs:
            async for output in outputs:
                event = text.extend(output)
                if is_scored_only:
                    event = replace(event, text="", token_ids=(), told=(), finish_reason="length")
                if event.finish_reason is not None and output.finish_reason is None:
                    outputs.complete(num_tokens=output.index + len(event.token_ids))
                yield event
                if event.finish_reason is not None:
                    return
        raise ServingError("the answer ended without a finish reason")

    def _served_card(self, model: str) -> ModelCard:
        models = self._served_models.models()
        if model in models:
            return models[model]
        if not models:
            raise UnavailableError("no worker is there to serve any model", retry_after_seconds=1)
        shown = model if len(model) <= _MAX_SHOWN_NAME_CHARACTERS else f"{model[:_MAX_SHOWN_NAME_CHARACTERS]}…"
        raise ModelNotFoundError(
            f"the model {shown!r} does not exist; GET /v1/models lists those that do", param="model"
        )

    def _check_num_choices(self, body: GenerationBody) -> None:
        num_prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
        limit = self._settings.max_choices
        if num_prompts * body.n > limit:
            raise InvalidRequestError(
                f"n times the number of prompts may be {limit} at most, and is {num_prompts} * {body.n}",
                param="n" if body.n > 1 else "prompt",
            )


def _check_num_prompt_logprobs(body: GenerationBody, prompts: Sequence[TokenIds]) -> None:
    if body.wanted_prompt_logprobs is None:
        return
    number = sum(map(len, prompts)) * body.n * (1 + body.wanted_prompt_logprobs)
    if number > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"one call may ask for {MAX_PROMPT_LOGPROBS} log-probabilities of prompt tokens, and this one asks for "
            f"{number}: its prompt tokens, times n, times one more than the likeliest ones that are told of each",
            param="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )


def _generations(
    body: GenerationBody,
    card: ModelCard,
    prompts: Sequence[TokenIds],
    account: Account,
    *,
    terms: Terms,
    structure: StructuredOutput | None,
) -> list[Generation]:
    """In the order of choices: all answers to the first prompt, then all to the second, …"""
    num_choices = len(prompts) * body.n
    return [
        Generation(
            request_id=RequestId(
                account.call_id if num_choices == 1 else f"{account.call_id}-{index * body.n + answer}"
            ),
            model=card.model,
            prompt_token_ids=prompt,
            sampling=resolve_sampling(
                body, card, num_prompt_tokens=len(prompt), answer=answer, structured_output=structure
            ),
            tbt_target_seconds=terms.tbt_target_seconds,
            ttft_target_seconds=terms.ttft_target_seconds,
            priority=terms.priority,
            cache_salt=cache_salt(DEFAULT_TENANT, body.cache_salt),
            prompt_id=f"{account.call_id}-{index}" if body.n > 1 else None,
            arrived_at=account.arrived_at,
        )
        for index, prompt in enumerate(prompts)
        for answer in range(body.n)
    ]
