"""One call from its body to text events: admit, tokenize, dispatch, detokenize, stop. The order stands here alone.

The routes call `TextGenerator.answer`; streamed or not, an answer is made the same way. Everything that is wrong with
a call before a worker sees it is raised when the context is entered, everything later by the events.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stallfree_router.admission import Admission
from stallfree_router.choices import merge
from stallfree_router.messages import Generation, Outputs, OutputTokens
from stallfree_router.sampling import resolve_sampling
from stallfree_router.text.detokenizer import Detokenizer
from stallfree_router.text.prompts import TokenIds, tokenize_prompts
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_router.text.stop_strings import StopMatcher
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.errors import InvalidRequestError, ModelNotFoundError, ServingError, UnavailableError
from stallfree_shared.openai_api import ChatCompletionRequest, CompletionRequest
from stallfree_shared.wire import FinishReason, ModelCard, RequestId

GenerationBody = CompletionRequest | ChatCompletionRequest

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
class TextEvent:
    """What some tokens of one choice added to its text."""

    choice: int
    """Prompt number * n + answer number."""
    text: str
    """Often empty: a stop string or a character may not be whole yet."""
    token_ids: tuple[int, ...]
    """All of them counted and new, an end-of-sequence or stop token included."""
    received_at: float
    tbt_target_seconds: float
    finish_reason: FinishReason | None = None
    """Set on the choice's last event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A call that workers are answering."""

    model: str
    prompts: Sequence[TokenIds]
    n: int
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
        generator: Generator,
        max_choices: int,
    ) -> None:
        self._admission = admission
        self._served_models = served_models
        self._tokenizers = tokenizers
        self._generator = generator
        self._max_choices = max_choices

    @contextlib.asynccontextmanager
    async def answer(
        self, body: GenerationBody, account: Account, *, silence_seconds: float | None = None
    ) -> AsyncIterator[Answer]:
        """Has a call answered. Leaving the context cancels on the workers what still runs.

        Raises:
            StallfreeError: any of the tree, see errors.py.
        """
        self._check_num_choices(body)
        with self._admission.admitted():
            card = self._served_card(body.model)
            account.model = card.model
            prompts = await tokenize_prompts(body, card, self._tokenizers)
            generations = _generations(body, card, prompts, account)
            account.dispatched(prompt_tokens=sum(map(len, prompts)))
            texts = [
                self._continue(choice, generation, body.stop, self._tokenizers.tokenizer(card))
                for choice, generation in enumerate(generations)
            ]
            async with contextlib.aclosing(merge(texts, silence_seconds=silence_seconds)) as events:
                yield Answer(
                    model=card.model,
                    prompts=prompts,
                    n=body.n,
                    events=events,
                    is_waiting_for_worker=not self._served_models.usable(card.model),
                )

    async def _continue(
        self, choice: int, generation: Generation, stop_strings: Sequence[str], tokenizer: Tokenizer
    ) -> AsyncGenerator[TextEvent, None]:
        """One choice: its tokens from a worker, as text up to the first stop string."""
        text = OutputText(tokenizer, stop_strings)
        async with contextlib.aclosing(self._generator.generate(generation)) as outputs:
            async for output in outputs:
                event = text.extend(choice, output)
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
        if num_prompts * body.n > self._max_choices:
            raise InvalidRequestError(
                f"n times the number of prompts may be {self._max_choices} at most, and is {num_prompts} * {body.n}",
                param="n" if body.n > 1 else "prompt",
            )


class OutputText:
    """The text of one choice as it grows: detokenize, then stop."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stop_strings)

    def extend(self, choice: int, output: OutputTokens) -> TextEvent:
        """What `output` adds. A stop string ends the choice at the token that completes it: later tokens of the same
        output are neither shown nor counted."""
        pieces: list[str] = []
        finish_reason = output.finish_reason
        token_ids = output.token_ids
        for position, token_id in enumerate(_text_token_ids(output), 1):
            pieces.append(self._stop.feed(self._detokenizer.feed(token_id)))
            if self._stop.is_matched:
                finish_reason, token_ids = "stop", token_ids[:position]
                break
        else:
            if finish_reason is not None:
                pieces.append(self._stop.feed(self._detokenizer.flush()))
                pieces.append(self._stop.flush())
        return TextEvent(
            choice=choice,
            text="".join(pieces),
            token_ids=token_ids,
            received_at=output.received_at,
            tbt_target_seconds=output.tbt_target_seconds,
            finish_reason=finish_reason,
        )


def _text_token_ids(output: OutputTokens) -> tuple[int, ...]:
    """An end-of-sequence or stop token is counted and never text."""
    return output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids


def _generations(
    body: GenerationBody, card: ModelCard, prompts: Sequence[TokenIds], account: Account
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
            sampling=resolve_sampling(body, card, num_prompt_tokens=len(prompt), answer=answer),
            arrived_at=account.arrived_at,
        )
        for index, prompt in enumerate(prompts)
        for answer in range(body.n)
    ]
