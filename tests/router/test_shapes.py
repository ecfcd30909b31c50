"""A chunk of a stream is written piece by piece; it must be what writing it whole gives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

import pytest

from stallfree_router.generation import Answer
from stallfree_router.output_text import TextEvent
from stallfree_router.routes.shapes import ChatShape, CompletionShape
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.openai_api import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
)

ODD_NAMES = ("demo", '"choices":[]', '\\"choices\\":[] \u2028 {}', "\n")
TEXTS = ("", "word", '"choices":[]', "\\", "\u00e9\U0001f600")


async def _no_events() -> AsyncGenerator[TextEvent | None, None]:
    return
    yield


def _answer(model: str) -> Answer:
    return Answer(
        model=model,
        prompts=((1, 2, 3),),
        prompt_texts=(),
        n=2,
        tokenizer=cast("Tokenizer", None),
        service_tier="flex",
        events=_no_events(),
        is_waiting_for_worker=False,
    )


def _events() -> list[TextEvent]:
    """Of two choices, the last one of each with a finish reason."""
    return [
        TextEvent(
            choice=choice,
            text=text,
            token_ids=(7, 8),
            received_at=0.0,
            tbt_target_seconds=0.1,
            finish_reason="stop" if text == TEXTS[-1] else None,
        )
        for choice in (0, 1)
        for text in TEXTS
    ]


@pytest.mark.parametrize("model", ODD_NAMES)
@pytest.mark.parametrize("more", [{}, {"service_tier": "flex"}, {"return_token_ids": True}])
def test_a_chunk_is_what_writing_it_whole_gives(model: str, more: dict[str, object]) -> None:
    completion = CompletionRequest.model_validate({"model": model, "prompt": [1, 2, 3], "n": 2, **more})
    messages = [{"role": "user", "content": "hello"}]
    chat = ChatCompletionRequest.model_validate({"model": model, "messages": messages, "n": 2, **more})
    shapes = (
        (CompletionShape(_answer(model), completion, call_id='x"choices":[]'), Completion),
        (ChatShape(_answer(model), chat, call_id='x"choices":[]'), ChatCompletionChunk),
    )
    for shape, whole_type in shapes:
        for event in _events():
            written = shape.chunk(event)
            whole = whole_type.model_validate_json(written)
            assert whole.model_dump_json() == written
            assert whole.model == model
            assert [choice.index for choice in whole.choices] == [event.choice]
