"""One model's tokenizer: text to ids, and each id's bytes. Synchronous; the registry runs it off the event loop."""

from __future__ import annotations

import re

from tokenizers import Tokenizer as LibraryTokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR_TEXT = "a"


class Tokenizer:
    """Wraps one tokenizer.json. Safe to share between threads and requests: nothing in it changes but a cache."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises:
        ValueError: the bytes are no tokenizer.
        """
        try:
            self._library: LibraryTokenizer = LibraryTokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"not a tokenizer.json: {error}") from error
        # A file may ask to cut or fill what it encodes. A prompt is never shortened here.
        self._library.no_truncation()
        self._library.no_padding()
        self._bytes_by_id: dict[int, bytes] = {}
        self._anchor_ids, self._anchor_text = self._find_anchor()
        self.max_token_bytes = max((len(token.encode()) for token in self._library.get_vocab()), default=1)
        """No token stands for more bytes of text than this."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # Encoding one text alone would hold the interpreter's lock for all of it; a batch of one does not.
        encoding = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, in UTF-8, perhaps part of a character. Empty for special and unknown ids."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            known = self._bytes_by_id[token_id] = self._token_bytes(token_id)
        return known

    def token_name(self, token_id: int) -> str:
        """What a token without bytes is called, such as <eos>; empty for unknown ids."""
        return self._library.id_to_token(token_id) or ""

    def _token_bytes(self, token_id: int) -> bytes:
        text = self._decode([*self._anchor_ids, token_id]).removeprefix(self._anchor_text)
        if _REPLACEMENT not in text:
            return text.encode()
        token = self._library.id_to_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes((int(byte[1], 16),))
        try:
            return bytes(_BYTE_BY_CHARACTER[character] for character in token)
        except KeyError:  # the token is the replacement character itself
            return text.encode()

    def _find_anchor(self) -> tuple[list[int], str]:
        """Ordinary text to decode before a token. Some decoders drop a space at the very start, and what a model
        writes is never the start: it continues the prompt."""
        for token_id in reversed(self.encode(_ANCHOR_TEXT, add_special_tokens=False)):
            text = self._decode([token_id])
            if text and _REPLACEMENT not in text and self._decode([token_id, token_id]).startswith(text):
                return [token_id], text
        return [], ""

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._library.decode(token_ids, skip_special_tokens=True))


def _byte_by_character() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_BY_CHARACTER = _byte_by_character()
