"""Which tokens are told with which text, whatever is held back and however the output is cut into events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree_router.messages import OutputTokens
from stallfree_router.output_text import OutputText, TextEvent, told_prompt
from stallfree_router.text.tokenizer import Tokenizer
from stallfree_shared.wire import TokenLogprobs
from tests.support.scripted import EOS, scripted_logprobs, scripted_tokenizer

_LIBRARY = scripted_tokenizer()
_TOKENIZER = Tokenizer(_LIBRARY.to_str().encode())


def ids(text: str) -> list[int]:
    return list(_LIBRARY.encode(text).ids)


def events_of(token_ids: Sequence[int], sizes: Sequence[int], stop: Sequence[str], *, has_end: bool) -> list[TextEvent]:
    """The text events of an output that comes in pieces of these sizes, and then whole."""
    script = [*token_ids, EOS] if has_end else list(token_ids)
    cuts = [*(cut for cut in accumulate(sizes) if cut < len(script)), len(script)]
    text, events, start = OutputText(0, _TOKENIZER, stop), [], 0
    for cut in cuts:
        piece = tuple(script[start:cut])
        output = OutputTokens(
            index=start,
            token_ids=piece,
            logprobs=tuple(scripted_logprobs(token_id, 1) for token_id in piece),
            received_at=0.0,
            tbt_target_seconds=0.2,
            finish_reason=None if cut < len(script) else ("stop" if has_end else "length"),
        )
        events.append(text.extend(output))
        if events[-1].finish_reason is not None:
            break
        start = cut
    return events


@given(
    text=st.text(st.sampled_from("ABCDEFHIx🔥é\n"), min_size=1, max_size=24),
    sizes=st.lists(st.integers(1, 4), max_size=30),
    stop=st.lists(st.text(st.sampled_from("ABCDxé🔥"), min_size=1, max_size=4), max_size=2),
    has_end=st.booleans(),
)
def test_told_tokens_are_those_whose_text_begins_in_what_is_shown(
    text: str, sizes: list[int], stop: list[str], *, has_end: bool
) -> None:
    token_ids = ids(text)
    events = events_of(token_ids, sizes, stop, has_end=has_end)
    shown = "".join(event.text for event in events)
    is_cut = shown != text
    told = [token for event in events for token in event.told]
    # The slow truth: where a token begins is the number of whole characters in all bytes before it.
    starts = [
        len(b"".join(map(_TOKENIZER.token_bytes, token_ids[:n])).decode(errors="ignore")) for n in range(len(token_ids))
    ]
    expected = [(token, start) for token, start in zip(token_ids, starts, strict=True) if start < len(shown)]
    if has_end and not is_cut and events[-1].token_ids[-1:] == (EOS,):
        expected.append((EOS, len(text)))
    assert [(token.token_id, token.offset) for token in told] == expected
    assert [token.is_end for token in told] == [token.token_id == EOS for token in told]
    assert all(token.logprobs == scripted_logprobs(token.token_id, 1) for token in told)


@given(sizes=st.lists(st.integers(1, 4), max_size=30))
def test_each_event_tells_the_tokens_of_its_own_text(sizes: list[int]) -> None:
    shown = 0
    for event in events_of(ids("ABCDEFGHIJKLM🔥🔥 and the rest"), sizes, ["DEFGHIJKLMN", "🔥 or"], has_end=True):
        assert all(shown <= token.offset < shown + len(event.text) for token in event.told if not token.is_end)
        shown += len(event.text)


def test_a13_a_token_that_a_stop_string_cuts_in_two_is_told_and_one_that_it_takes_whole_is_not() -> None:
    (event,) = events_of(ids("xABCDEFy"), [], ["BCDEF"], has_end=True)
    assert (event.text, event.finish_reason) == ("xA", "stop")
    assert [token.token_id for token in event.told] == ids("x") + ids("ABC")
    assert list(event.token_ids) == ids("xABCDEF")


def test_without_log_probabilities_nothing_is_told() -> None:
    output = OutputTokens(
        index=0, token_ids=tuple(ids("abc")), received_at=0.0, tbt_target_seconds=0.2, finish_reason="length"
    )
    assert OutputText(0, _TOKENIZER, ()).extend(output).told == ()


@pytest.mark.parametrize(
    ("text", "offsets"), [("ab", [0, 1]), ("é!", [0, 0, 1]), ("🔥", [0, 0, 0, 0]), ("ABCDEF", [0, 3]), ("a", [0])]
)
def test_a_prompts_tokens_are_told_from_the_first_which_has_no_log_probability(text: str, offsets: list[int]) -> None:
    token_ids = ids(text)
    logprobs = [scripted_logprobs(token_id, 0) for token_id in token_ids[1:]]
    told = told_prompt(token_ids, text, logprobs, _TOKENIZER)
    assert [token.token_id for token in told] == token_ids
    assert [token.offset for token in told] == offsets
    assert [token.logprobs for token in told] == [None, *logprobs]


def test_a_text_that_the_tokenizer_lengthens_at_its_start_keeps_its_offsets() -> None:
    token_ids = ids(" ab")
    told = told_prompt(token_ids, "ab", [TokenLogprobs(logprob=-1.0)] * 2, _TOKENIZER)
    assert [token.offset for token in told] == [0, 0, 1]
