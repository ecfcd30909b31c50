"""Text events to OpenAI bodies and chunks: one class a route. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from pydantic import BaseModel

from stallfree_router.generation import Answer
from stallfree_router.output_text import TextEvent, ToldToken, told_prompt
from stallfree_router.routes.logprob_shapes import chat_logprobs, completion_logprobs, joined, prompt_logprobs
from stallfree_shared.openai_api import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionUsage,
    GenerationBody,
    PromptLogprobs,
)
from stallfree_shared.wire import FinishReason, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class ChoiceSoFar:
    """What one choice has come to."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    told: list[ToldToken] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None

    def add(self, event: TextEvent) -> None:
        self.pieces.append(event.text)
        self.token_ids += event.token_ids
        self.told += event.told
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.finish_reason = event.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Shape(Protocol):
    """How one route writes its answers; each method gives JSON on one line."""

    def opening(self) -> list[str]:
        """Chunks that come before any token."""
        ...

    def chunk(self, event: TextEvent) -> str: ...

    def usage_chunk(self, usage: CompletionUsage) -> str: ...

    def whole(self, choices: Mapping[int, ChoiceSoFar], usage: CompletionUsage) -> str: ...


class _Chunks:
    """The chunks of a stream that differ in their one choice alone."""

    def __init__(self, without_choice: str) -> None:
        """A chunk without any. Its key cannot be mistaken: within strings, quotes are escaped."""
        self._before, self._after = without_choice.split('"choices":[]')

    def with_choice(self, choice: BaseModel) -> str:
        return f'{self._before}"choices":[{choice.model_dump_json()}]{self._after}'


class CompletionShape:
    """/v1/completions."""

    def __init__(self, answer: Answer, body: CompletionRequest, *, call_id: str) -> None:
        self._answer = answer
        self._body = body
        self._id = f"cmpl-{call_id}"
        self._created = int(time.time())
        self._begun: set[int] = set()

    def opening(self) -> list[str]:
        return []

    def chunk(self, event: TextEvent) -> str:
        choice = ChoiceSoFar()
        choice.add(event)
        is_first = event.choice not in self._begun
        self._begun.add(event.choice)
        return self._chunks.with_choice(self._choice(event.choice, choice, has_prompt=is_first))

    def usage_chunk(self, usage: CompletionUsage) -> str:
        return self._completion((), usage)

    def whole(self, choices: Mapping[int, ChoiceSoFar], usage: CompletionUsage) -> str:
        return self._completion(
            tuple([self._choice(index, choice, has_prompt=True) for index, choice in sorted(choices.items())]), usage
        )

    @cached_property
    def _chunks(self) -> _Chunks:
        return _Chunks(self._completion((), None))

    def _choice(self, index: int, choice: ChoiceSoFar, *, has_prompt: bool) -> CompletionChoice:
        """What a choice, or a piece of it, has come to; with what its prompt has to say where `has_prompt`."""
        echoed = self._echoed(index)
        return CompletionChoice(
            index=index,
            text=echoed + choice.text if has_prompt else choice.text,
            logprobs=self._logprobs(index, choice, len(echoed), has_prompt=has_prompt),
            finish_reason=choice.finish_reason,
            token_ids=tuple(choice.token_ids) if self._body.return_token_ids else None,
            prompt_logprobs=_prompt_logprobs(self._answer, self._body, index, choice),
            prompt_token_ids=self._prompt_token_ids(index) if has_prompt else None,
        )

    def _logprobs(
        self, index: int, choice: ChoiceSoFar, num_echoed: int, *, has_prompt: bool
    ) -> CompletionLogprobs | None:
        num_top, tokenizer = self._body.logprobs, self._answer.tokenizer
        if num_top is None:
            return None
        own = completion_logprobs(choice.told, tokenizer, num_top=num_top, start=num_echoed)
        if not (self._body.echo and has_prompt and choice.prompt_logprobs is not None):
            return own
        prompt = self._answer.prompts[index // self._answer.n]
        told = told_prompt(prompt, self._echoed(index), choice.prompt_logprobs, tokenizer)
        return joined(completion_logprobs(told, tokenizer, num_top=num_top), own)

    def _completion(self, choices: tuple[CompletionChoice, ...], usage: CompletionUsage | None) -> str:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._answer.model,
            choices=choices,
            usage=usage,
            service_tier=_service_tier(self._answer, self._body),
        ).model_dump_json()

    def _echoed(self, choice: int) -> str:
        texts = self._answer.prompt_texts
        return texts[choice // self._answer.n] if texts else ""

    def _prompt_token_ids(self, choice: int) -> tuple[int, ...] | None:
        return self._answer.prompts[choice // self._answer.n] if self._body.return_token_ids else None


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, answer: Answer, body: ChatCompletionRequest, *, call_id: str) -> None:
        self._answer = answer
        self._body = body
        self._id = f"chatcmpl-{call_id}"
        self._created = int(time.time())

    def opening(self) -> list[str]:
        """The role of every choice. No token is in these, so they end no clock."""
        role = ChatDelta(role="assistant", content="")
        return [
            self._chunk(
                (ChatChunkChoice(index=index, delta=role, finish_reason=None),),
                prompt_token_ids=self._prompt_token_ids() if index == 0 else None,
            )
            for index in range(self._answer.num_choices)
        ]

    def chunk(self, event: TextEvent) -> str:
        has_content = bool(event.text) or self._body.return_token_ids
        choice = ChatChunkChoice(
            index=event.choice,
            delta=ChatDelta(content=event.text if has_content else None),
            logprobs=self._logprobs(event.told) if event.told else None,
            finish_reason=event.finish_reason,
            token_ids=event.token_ids if self._body.return_token_ids else None,
        )
        return self._chunks.with_choice(choice)

    def usage_chunk(self, usage: CompletionUsage) -> str:
        return self._chunk((), usage=usage)

    def whole(self, choices: Mapping[int, ChoiceSoFar], usage: CompletionUsage) -> str:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._answer.model,
            choices=tuple([self._whole_choice(index, choice) for index, choice in sorted(choices.items())]),
            usage=usage,
            service_tier=_service_tier(self._answer, self._body),
            prompt_logprobs=_prompt_logprobs(self._answer, self._body, 0, choices[0]),
            prompt_token_ids=self._prompt_token_ids(),
        ).model_dump_json()

    @cached_property
    def _chunks(self) -> _Chunks:
        return _Chunks(self._chunk(()))

    def _whole_choice(self, index: int, choice: ChoiceSoFar) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=choice.text),
            logprobs=self._logprobs(choice.told),
            finish_reason=choice.finish_reason,
            token_ids=tuple(choice.token_ids) if self._body.return_token_ids else None,
        )

    def _logprobs(self, told: Sequence[ToldToken]) -> ChatLogprobs | None:
        return chat_logprobs(told, self._answer.tokenizer) if self._body.logprobs else None

    def _chunk(
        self,
        choices: tuple[ChatChunkChoice, ...],
        *,
        usage: CompletionUsage | None = None,
        prompt_token_ids: tuple[int, ...] | None = None,
    ) -> str:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._answer.model,
            choices=choices,
            usage=usage,
            service_tier=_service_tier(self._answer, self._body),
            prompt_token_ids=prompt_token_ids,
        ).model_dump_json()

    def _prompt_token_ids(self) -> tuple[int, ...] | None:
        return self._answer.prompts[0] if self._body.return_token_ids else None


def _service_tier(answer: Answer, body: GenerationBody) -> str | None:
    """Told where the call names one, as OpenAI does."""
    return None if body.service_tier is None else answer.service_tier


def _prompt_logprobs(answer: Answer, body: GenerationBody, choice: int, so_far: ChoiceSoFar) -> PromptLogprobs | None:
    if body.prompt_logprobs is None or so_far.prompt_logprobs is None:
        return None
    prompt = answer.prompts[choice // answer.n]
    return prompt_logprobs(prompt, so_far.prompt_logprobs, answer.tokenizer, num_top=body.prompt_logprobs)
