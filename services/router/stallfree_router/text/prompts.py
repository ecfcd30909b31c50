"""Request bodies to prompts in token ids: chat template, tokenizer, and the bounds that hold before both.

Called by generation.py. Text is turned into tokens in the registry's threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from stallfree_router.text.chat_template import render_chat
from stallfree_router.text.registry import TokenizerRegistry
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.errors import ContextLengthExceededError, InvalidRequestError
from stallfree_shared.openai_api import ChatCompletionRequest, CompletionRequest
from stallfree_shared.openai_fields import Prompt
from stallfree_shared.wire import ModelCard

TokenIds = tuple[int, ...]


def prompt_param(body: CompletionRequest | ChatCompletionRequest) -> str:
    """The field that holds the prompt, as errors name it."""
    return "messages" if isinstance(body, ChatCompletionRequest) else "prompt"


async def tokenize_prompts(
    body: CompletionRequest | ChatCompletionRequest, card: ModelCard, registry: TokenizerRegistry
) -> list[TokenIds]:
    """The prompts of a call, each at least one token long.

    Raises:
        ContextLengthExceededError: a text is so long that it cannot fit, found without tokenizing it.
        InvalidRequestError: a prompt is empty, names an id outside the vocabulary, or does not suit the template.
        UnavailableError: the tokenizer is not loaded.
    """
    tokenizer = registry.tokenizer(card)
    if isinstance(body, ChatCompletionRequest):
        prompts = [await registry.run(_tokenize_chat, body, card, tokenizer)]
    else:
        prompts = [await _tokenize_prompt(prompt, card, tokenizer, registry) for prompt in body.prompt]
    if not all(prompts):
        raise InvalidRequestError("the prompt is empty: it has no tokens", param=prompt_param(body))
    return prompts


async def prompt_texts(
    body: CompletionRequest | ChatCompletionRequest,
    prompts: Sequence[TokenIds],
    tokenizer: Tokenizer,
    registry: TokenizerRegistry,
) -> list[str]:
    """The prompts' texts where they are to be echoed: a text as it was given, and what token ids stand for."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return []
    return [
        given if isinstance(given, str) else await registry.run(_text_of, prompt, tokenizer)
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]


def _text_of(prompt: TokenIds, tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, prompt)).decode(errors="replace")


async def _tokenize_prompt(
    prompt: Prompt, card: ModelCard, tokenizer: Tokenizer, registry: TokenizerRegistry
) -> TokenIds:
    if isinstance(prompt, str):
        _check_size(len(prompt.encode()), card, tokenizer, param="prompt")
        return await registry.run(tokenizer.encode, prompt, add_special_tokens=True)
    _check_ids(prompt, card)
    return prompt


def _tokenize_chat(body: ChatCompletionRequest, card: ModelCard, tokenizer: Tokenizer) -> TokenIds:
    if card.chat_template is None:
        raise InvalidRequestError(
            f"the model {card.model!r} has no chat template; /v1/completions serves it", param="messages"
        )
    _check_size(sum(len(message.content.encode()) for message in body.messages), card, tokenizer, param="messages")
    text = render_chat(card.chat_template, body.messages, special_tokens=card.special_tokens)
    # The template writes the special tokens itself.
    return tokenizer.encode(text, add_special_tokens=False)


def _check_size(num_bytes: int, card: ModelCard, tokenizer: Tokenizer, *, param: str) -> None:
    """Megabytes that cannot fit are not worth seconds of tokenizing."""
    least_tokens = -(-num_bytes // tokenizer.max_token_bytes)
    if least_tokens > card.max_model_len:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {card.max_model_len} tokens. However, your {param} "
            f"{'have' if param == 'messages' else 'has'} at least {least_tokens} tokens.",
            param=param,
        )


def _check_ids(prompt: TokenIds, card: ModelCard) -> None:
    if prompt and not (min(prompt) >= 0 and max(prompt) < card.vocab_size):
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < card.vocab_size)
        raise InvalidRequestError(
            f"prompt holds the token id {str(wrong)[:24]}; this model's ids are 0 to {card.vocab_size - 1}",
            param="prompt",
        )
