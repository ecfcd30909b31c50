"""Tokens to text, one token at a time. One detokenizer a choice; pure but for the tokenizer's cache.

A character may span tokens, so bytes are held back until they are whole, at most three of them: bytes that can no
longer become a character are shown as U+FFFD at once, as in any lenient UTF-8 decoder. All texts together are what
decoding the whole output at once gives. (Where a vocabulary spells rare characters as <0x..> tokens, the library
gives up a whole run of them for one bad byte; here only the bad byte is lost.)
"""

from __future__ import annotations

import codecs

from stallfree_router.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _utf8_decoder(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that is whole with this token."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The output ends here: half a character that is left becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
