"""The simplest vocabulary that a grammar can be asked about: token ids are the bytes of the text, 256 is the end."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from stallfree_shared.grammars import LIMITS, make_grammar
from stallfree_shared.wire import StructuredOutput


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def accepts(output: StructuredOutput, text: str) -> bool:
    """Whether `text`, whole, is what `output` describes."""
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), make_grammar(output), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = list(text.encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
