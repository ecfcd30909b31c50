"""The stop matcher against the obvious search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree_router.text.stop_strings import StopMatcher

_FEW_LETTERS = st.text("ab", max_size=30)


def search(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, the slow and obvious way."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def feed(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """What each piece makes visible, the rest at the end included."""
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.is_matched:
            return shown, True
    return [*shown, matcher.flush()], False


@settings(deadline=None)
@given(pieces=st.lists(_FEW_LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_the_matcher_agrees_with_a_search_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    shown, is_matched = feed(pieces, stops)
    expected = search("".join(pieces), stops)
    assert is_matched == (expected is not None)
    assert "".join(shown) == ("".join(pieces) if expected is None else expected)


@settings(deadline=None)
@given(pieces=st.lists(_FEW_LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_a11_only_a_proper_prefix_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.feed(piece)
        if matcher.is_matched:
            return
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a09_a_stop_string_over_several_tokens_never_leaks() -> None:
    assert feed(["ABC", "DEF", "G", "HI", "J", "KLM"], ["DEFGHIJ"]) == (["ABC", "", "", "", ""], True)
    assert feed(["x", "\nUser", ":"], ["\nUser:"]) == (["x", "", ""], True)


def test_a09_what_only_looked_like_a_stop_string_is_shown_after_all() -> None:
    assert feed(["ab", "ac"], ["aba!"]) == (["", "abac", ""], False)


def test_a11_a_long_stop_string_that_never_comes_delays_nothing() -> None:
    pieces = [f"t{number} " for number in range(50)]
    shown, _ = feed(pieces, ["#" * 200])
    assert shown == [*pieces, ""]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"), [(["go", "stop!", "x"], "stop", "go"), (["..."], "..", ""), (["a🙂b"], "🙂", "a")]
)
def test_a13_a_stop_string_may_end_inside_a_token(pieces: list[str], stop: str, expected: str) -> None:
    shown, is_matched = feed(pieces, [stop])
    assert ("".join(shown), is_matched) == (expected, True)


def test_of_two_stop_strings_complete_at_once_the_longer_one_wins() -> None:
    assert feed(["xab"], ["b", "ab"]) == (["x"], True)
