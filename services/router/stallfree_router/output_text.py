"""One choice's tokens to text events: detokenize, stop, and say how likely each token was. Pure but for the tokenizer.

A token is told, with its log-probability, together with the first character of its text. So text that is held back
holds its tokens back too, what a stop string cuts off is never told, and all events together tell what a whole answer
does. Called by generation.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stallfree_router.messages import OutputTokens
from stallfree_router.text.detokenizer import Detokenizer
from stallfree_router.text.stop_strings import StopMatcher
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.wire import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldToken:
    """A token with its log-probability."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt."""
    offset: int
    """Characters of the text before the token's own."""
    is_end: bool = False
    """An end-of-sequence or stop token, which is never text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvent:
    """What some tokens of one choice added to its text."""

    choice: int
    """Prompt number * n + answer number."""
    text: str
    """Often empty: a stop string or a character may not be whole yet."""
    token_ids: tuple[int, ...]
    """All of them counted and new, an end-of-sequence or stop token included."""
    told: tuple[ToldToken, ...] = ()
    """The tokens of `text`, and at the very end the end token, where log-probabilities were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's tokens from the second on, where they were asked for; on the choice's first event."""
    cached_tokens: int | None = None
    """Those of the prompt that the prefix cache had; on the choice's first event."""
    received_at: float
    tbt_target_seconds: float
    finish_reason: FinishReason | None = None
    """Set on the choice's last event."""


class OutputText:
    """The text of one choice as it grows."""

    def __init__(self, choice: int, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self._choice = choice
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopMatcher(stop_strings)
        self._untold: deque[ToldToken] = deque()
        self._num_characters = 0
        """Of the text so far, held back or not."""
        self._num_shown = 0

    def extend(self, output: OutputTokens) -> TextEvent:
        """What `output` adds. A stop string ends the choice at the token that completes it: later tokens of the same
        output are neither shown nor counted."""
        pieces: list[str] = []
        finish_reason = output.finish_reason
        token_ids = output.token_ids
        for place, token_id in enumerate(token_ids):
            is_end = output.finish_reason == "stop" and place == len(token_ids) - 1
            if output.logprobs is not None:
                self._hold(token_id, output.logprobs[place], is_end=is_end)
            if is_end:
                break
            pieces.append(self._feed(self._detokenizer.feed(token_id)))
            if self._stop.is_matched:
                finish_reason, token_ids = "stop", token_ids[: place + 1]
                break
        if finish_reason is not None and not self._stop.is_matched:
            pieces += [self._feed(self._detokenizer.flush()), self._stop.flush()]
        text = "".join(pieces)
        return TextEvent(
            choice=self._choice,
            text=text,
            token_ids=token_ids,
            told=self._tell(text, is_over=finish_reason is not None),
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.usage.cached_tokens if output.usage is not None and output.index == 0 else None,
            received_at=output.received_at,
            tbt_target_seconds=output.tbt_target_seconds,
            finish_reason=finish_reason,
        )

    def _hold(self, token_id: int, logprobs: TokenLogprobs, *, is_end: bool) -> None:
        self._untold.append(ToldToken(token_id=token_id, logprobs=logprobs, offset=self._num_characters, is_end=is_end))

    def _feed(self, text: str) -> str:
        self._num_characters += len(text)
        return self._stop.feed(text)

    def _tell(self, text: str, *, is_over: bool) -> tuple[ToldToken, ...]:
        """The tokens whose text begins in what is shown now; at an end that no stop string made, all that are left."""
        self._num_shown += len(text)
        is_whole = is_over and not self._stop.is_matched
        told: list[ToldToken] = []
        while self._untold and (is_whole or self._untold[0].offset < self._num_shown):
            told.append(self._untold.popleft())
        return tuple(told)


def told_prompt(
    token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[ToldToken]:
    """The tokens of a prompt, whose text is `text`. Slow where it is long.

    Some tokenizers give more text back than they were given, a space at the very start: offsets count from the end.
    """
    detokenizer = Detokenizer(tokenizer)
    ends = [0]
    for token_id in token_ids:
        ends.append(ends[-1] + len(detokenizer.feed(token_id)))
    surplus = ends[-1] + len(detokenizer.flush()) - len(text)
    return [
        ToldToken(token_id=token_id, logprobs=own, offset=max(0, start - surplus))
        for token_id, own, start in zip(token_ids, (None, *logprobs), ends, strict=False)
    ]
