"""Log-probabilities in the shapes that clients know: OpenAI's for chat, OpenAI's older one for completions, and vLLM's
for prompts. Pure but for the tokenizer's cache. Used by shapes.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from stallfree_router.output_text import ToldToken
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.openai_api import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from stallfree_shared.wire import TokenLogprobs


def chat_logprobs(told: Sequence[ToldToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """Of the message's own tokens: an end token is none."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=_chat_text(token.token_id, tokenizer),
                logprob=token.logprobs.logprob,
                bytes=_bytes(token.token_id, tokenizer),
                top_logprobs=[
                    ChatTopLogprob(
                        token=_chat_text(token_id, tokenizer), logprob=logprob, bytes=_bytes(token_id, tokenizer)
                    )
                    for token_id, logprob in token.logprobs.top
                ],
            )
            for token in told
            if token.logprobs is not None and not token.is_end
        ]
    )


def completion_logprobs(
    told: Sequence[ToldToken], tokenizer: Tokenizer, *, num_top: int, start: int = 0
) -> CompletionLogprobs:
    """With the end token, so that there are as many as tokens are counted: who scores answers counts on that. `start`
    is where the text that the offsets count from begins in the choice's text."""
    return CompletionLogprobs(
        tokens=[_completion_text(token.token_id, tokenizer) for token in told],
        token_logprobs=[None if token.logprobs is None else token.logprobs.logprob for token in told],
        top_logprobs=[_completion_top(token, tokenizer, num_top) for token in told],
        text_offset=[start + token.offset for token in told],
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[*first.tokens, *second.tokens],
        token_logprobs=[*first.token_logprobs, *second.token_logprobs],
        top_logprobs=[*first.top_logprobs, *second.top_logprobs],
        text_offset=[*first.text_offset, *second.text_offset],
    )


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, num_top: int
) -> PromptLogprobs:
    """vLLM's: one entry for each prompt token, None for the first."""
    entries = zip(token_ids[1:], logprobs, strict=True)
    return [None, *(_prompt_entry(token_id, own, tokenizer, num_top) for token_id, own in entries)]


def _prompt_entry(
    token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer, num_top: int
) -> dict[int, PromptLogprob]:
    ranked = {token_id: (logprobs.logprob, None)} | {
        other: (logprob, rank) for rank, (other, logprob) in enumerate(logprobs.top[:num_top], 1)
    }
    return {
        each: PromptLogprob(logprob=logprob, rank=rank, decoded_token=_chat_text(each, tokenizer))
        for each, (logprob, rank) in ranked.items()
    }


def _completion_top(token: ToldToken, tokenizer: Tokenizer, num_top: int) -> dict[str, float] | None:
    """By text. Two tokens may have the same text: the likelier one is told."""
    if token.logprobs is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*token.logprobs.top[:num_top], (token.token_id, token.logprobs.logprob)):
        top.setdefault(_completion_text(token_id, tokenizer), logprob)
    return top


def _chat_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Half a character becomes U+FFFD: the bytes tell what it is."""
    return tokenizer.token_bytes(token_id).decode(errors="replace") or tokenizer.token_name(token_id)


def _completion_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Half a character is written as OpenAI does in this shape, which has no field for bytes: `bytes:\\xe2\\x80`."""
    token = tokenizer.token_bytes(token_id)
    try:
        return token.decode() or tokenizer.token_name(token_id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _bytes(token_id: int, tokenizer: Tokenizer) -> list[int] | None:
    return list(tokenizer.token_bytes(token_id)) or None
