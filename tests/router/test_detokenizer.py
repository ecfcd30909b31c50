"""Token by token gives what decoding the whole output gives, and no half characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from stallfree_router.text.detokenizer import Detokenizer
from stallfree_router.text.tokenizer import Tokenizer
from tests.support.scripted import scripted_tokenizer

_LIBRARY = scripted_tokenizer()
_TOKENIZER = Tokenizer(_LIBRARY.to_str().encode())
_NUM_IDS = _LIBRARY.get_vocab_size()


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.feed, token_ids), detokenizer.flush()]


def ids(library: LibraryTokenizer, *tokens: str) -> list[int]:
    """The ids of tokens that are in the vocabulary."""
    found = [library.token_to_id(token) for token in tokens]
    return [token_id for token_id in found if token_id is not None]


def byte_fallback_tokenizer() -> LibraryTokenizer:
    """As SentencePiece makes them: ▁ is a space, one space at the very start is dropped, bytes are <0x..>."""
    words = ["<unk>", "▁", "▁leading", "▁x", "a", "▁a", "def", "▁▁▁▁", "ě", "日"]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    library = LibraryTokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))  # noqa: S106
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


@settings(deadline=None)
@given(st.lists(st.integers(0, _NUM_IDS - 1), max_size=60))
def test_a15_all_pieces_together_are_the_whole_decode_of_any_bytes(token_ids: list[int]) -> None:
    assert "".join(pieces(_TOKENIZER, token_ids)) == _LIBRARY.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_a15_no_half_character_is_ever_shown_of_valid_text(text: str) -> None:
    token_ids = _TOKENIZER.encode(text, add_special_tokens=False)
    shown = pieces(_TOKENIZER, token_ids)
    assert "".join(shown) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)


def test_a15_a_character_is_shown_with_its_last_byte() -> None:
    token_ids = ids(_LIBRARY, *"ðŁĶ¥")  # the four bytes of 🔥
    assert pieces(_TOKENIZER, token_ids) == ["", "", "", "🔥", ""]


def test_bytes_that_can_become_nothing_are_not_held_back() -> None:
    (continuation,) = ids(_LIBRARY, "Ģ")  # byte 0x80, which starts no character
    assert pieces(_TOKENIZER, [continuation] * 5) == ["\ufffd"] * 5 + [""]


def test_half_a_character_at_the_end_becomes_one_replacement_character() -> None:
    token_ids = ids(_LIBRARY, *"ðŁ")
    assert pieces(_TOKENIZER, token_ids) == ["", "", "\ufffd"]


def test_special_and_unknown_ids_are_no_text() -> None:
    assert pieces(_TOKENIZER, [0, 1, 2, _NUM_IDS + 5]) == [""] * 5


def test_a17_leading_and_inner_spaces_survive() -> None:
    library = byte_fallback_tokenizer()
    token_ids = ids(library, "▁leading", "▁x", "▁", "▁▁▁▁", "def")
    shown = pieces(Tokenizer(library.to_str().encode()), token_ids)
    assert "".join(shown) == " leading x     def"
    assert "".join(shown).removeprefix(" ") == library.decode(token_ids)


@pytest.mark.parametrize("text", ["ďábelské 🔥 👩‍👩‍👧 日本", "é🙂", "🔥🔥🔥"])
def test_a15_byte_tokens_one_at_a_time_give_whole_characters(text: str) -> None:
    library = byte_fallback_tokenizer()
    token_ids = ids(library, *(f"<0x{byte:02X}>" for byte in text.encode()))
    shown = pieces(Tokenizer(library.to_str().encode()), token_ids)
    assert "".join(shown) == text == library.decode(token_ids)
    assert [piece for piece in shown if piece] == list(text)


def test_a_bad_byte_token_costs_only_itself() -> None:
    library = byte_fallback_tokenizer()
    token_ids = ids(library, "<0x41>", "<0xF0>", "a", "<0xE6>", "<0x97>", "<0xA5>")
    shown = pieces(Tokenizer(library.to_str().encode()), token_ids)
    assert "".join(shown) == "A\ufffda日"
