"""sse.py: what is encoded is decoded again, and what the standard allows is understood."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree_shared import sse
from stallfree_shared.sse import Decoder, Event

_TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("\n\r:\u2028 \ufeff")))


def decode(data: bytes, cuts: list[int] | None = None) -> list[Event]:
    """All events of `data`, fed in pieces that end at `cuts`."""
    decoder = Decoder()
    ends = sorted({min(cut, len(data)) for cut in cuts or []} | {len(data)})
    starts = [0, *ends]
    return [event for start, end in zip(starts, ends, strict=False) for event in decoder.feed(data[start:end])]


@settings(deadline=None)
@given(texts=st.lists(_TEXTS, max_size=5), cuts=st.lists(st.integers(0, 200)))
def test_decode_gives_back_what_was_encoded_however_the_bytes_are_cut(texts: list[str], cuts: list[int]) -> None:
    data = b"".join(sse.encode_event(text) + sse.encode_comment("keepalive") for text in texts)
    expected = [re.sub(r"\r\n|\r", "\n", text) for text in texts]
    assert [event.data for event in decode(data, cuts)] == expected


@settings(deadline=None)
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200)))
def test_cuts_never_change_what_is_decoded(data: bytes, cuts: list[int]) -> None:
    assert decode(data, cuts) == decode(data)


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
def test_lines_end_with_cr_lf_or_both(line_end: bytes) -> None:
    data = line_end.join([b"data: one", b"data: two", b"", b"data: three", b"", b""])
    for cut in range(len(data)):
        assert [event.data for event in decode(data, [cut])] == ["one\ntwo", "three"]


def test_comments_unknown_fields_and_retry_are_skipped() -> None:
    assert decode(b": hello\n\n:\n\nretry: 5\nfoo: bar\nfoo\n\ndata: x\n\n") == [Event(data="x")]


def test_one_space_after_the_colon_is_not_part_of_the_value() -> None:
    assert [event.data for event in decode(b"data:a\ndata: b\ndata:  c\n\n")] == ["a\nb\n c"]


def test_an_event_without_data_is_dropped_and_one_with_empty_data_is_not() -> None:
    assert decode(b"event: ping\n\ndata\n\n") == [Event(data="")]


def test_id_stays_until_it_is_set_again_and_event_does_not() -> None:
    data = b"id: 7\nevent: token\ndata: a\n\ndata: b\n\nid\ndata: c\n\nid: 1\0\ndata: d\n\n"
    assert decode(data) == [
        Event(data="a", event="token", id="7"),
        Event(data="b", id="7"),
        Event(data="c"),
        Event(data="d"),
    ]


def test_an_event_that_is_cut_off_never_appears() -> None:
    assert decode(b"data: a\n\ndata: b\n") == [Event(data="a")]


def test_a_byte_order_mark_at_the_start_is_skipped() -> None:
    data = b"\xef\xbb\xbfdata: a\n\n"
    for cut in range(len(data)):
        assert decode(data, [cut]) == [Event(data="a")]


def test_id_and_event_are_encoded() -> None:
    data = sse.encode_event("x", event="token", id="req:3")
    assert decode(data) == [Event(data="x", event="token", id="req:3")]


def test_a_line_end_in_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="one line"):
        sse.encode_event("x", id="a\ndata: b")


def test_a49_comments_start_at_column_0_and_are_followed_by_an_empty_line() -> None:
    assert sse.encode_comment("keepalive") == b": keepalive\n\n"
