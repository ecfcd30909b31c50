"""Text events to OpenAI bodies and chunks: one class a route. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stallfree_router.generation import Answer, TextEvent
from stallfree_shared.openai_api import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionUsage,
)
from stallfree_shared.wire import FinishReason


@dataclass(slots=True, kw_only=True)
class ChoiceSoFar:
    """What one choice has come to."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, event: TextEvent) -> None:
        self.pieces.append(event.text)
        self.token_ids += event.token_ids
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


class CompletionShape:
    """/v1/completions."""

    def __init__(self, answer: Answer, *, call_id: str, returns_token_ids: bool) -> None:
        self._answer = answer
        self._id = f"cmpl-{call_id}"
        self._created = int(time.time())
        self._returns_token_ids = returns_token_ids
        self._begun: set[int] = set()

    def opening(self) -> list[str]:
        return []

    def chunk(self, event: TextEvent) -> str:
        choice = CompletionChoice(
            index=event.choice,
            text=event.text,
            finish_reason=event.finish_reason,
            token_ids=event.token_ids if self._returns_token_ids else None,
            prompt_token_ids=None if event.choice in self._begun else self._prompt_token_ids(event.choice),
        )
        self._begun.add(event.choice)
        return self._completion([choice], None)

    def usage_chunk(self, usage: CompletionUsage) -> str:
        return self._completion([], usage)

    def whole(self, choices: Mapping[int, ChoiceSoFar], usage: CompletionUsage) -> str:
        return self._completion(
            [
                CompletionChoice(
                    index=index,
                    text=choice.text,
                    finish_reason=choice.finish_reason,
                    token_ids=choice.token_ids if self._returns_token_ids else None,
                    prompt_token_ids=self._prompt_token_ids(index),
                )
                for index, choice in sorted(choices.items())
            ],
            usage,
        )

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | None) -> str:
        return Completion(
            id=self._id, created=self._created, model=self._answer.model, choices=choices, usage=usage
        ).model_dump_json()

    def _prompt_token_ids(self, choice: int) -> tuple[int, ...] | None:
        return self._answer.prompts[choice // self._answer.n] if self._returns_token_ids else None


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, answer: Answer, *, call_id: str, returns_token_ids: bool) -> None:
        self._answer = answer
        self._id = f"chatcmpl-{call_id}"
        self._created = int(time.time())
        self._returns_token_ids = returns_token_ids

    def opening(self) -> list[str]:
        """The role of every choice. No token is in these, so they end no clock."""
        role = ChatDelta(role="assistant", content="")
        return [
            self._chunk(
                [ChatChunkChoice(index=index, delta=role, finish_reason=None)],
                prompt_token_ids=self._prompt_token_ids() if index == 0 else None,
            )
            for index in range(self._answer.num_choices)
        ]

    def chunk(self, event: TextEvent) -> str:
        has_content = bool(event.text) or self._returns_token_ids
        choice = ChatChunkChoice(
            index=event.choice,
            delta=ChatDelta(content=event.text if has_content else None),
            finish_reason=event.finish_reason,
            token_ids=event.token_ids if self._returns_token_ids else None,
        )
        return self._chunk([choice])

    def usage_chunk(self, usage: CompletionUsage) -> str:
        return self._chunk([], usage=usage)

    def whole(self, choices: Mapping[int, ChoiceSoFar], usage: CompletionUsage) -> str:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._answer.model,
            choices=[self._whole_choice(index, choice) for index, choice in sorted(choices.items())],
            usage=usage,
            prompt_token_ids=self._prompt_token_ids(),
        ).model_dump_json()

    def _whole_choice(self, index: int, choice: ChoiceSoFar) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=choice.text),
            finish_reason=choice.finish_reason,
            token_ids=choice.token_ids if self._returns_token_ids else None,
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
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
            prompt_token_ids=prompt_token_ids,
        ).model_dump_json()

    def _prompt_token_ids(self) -> tuple[int, ...] | None:
        return self._answer.prompts[0] if self._returns_token_ids else None
