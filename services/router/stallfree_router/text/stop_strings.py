"""Finds stop strings in text that arrives in pieces. Pure; one matcher a choice.

Held back is only what may still become a stop string: the longest tail of the text that is a proper prefix of one
(Knuth, Morris and Pratt's automaton gives its length at every character). So nothing of a stop string ever reaches
a client, and text that cannot be part of one is never late.

The stop string that is complete first ends the text; of two that are complete at the same character, the longer.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text goes in through `feed`, what may be shown comes out. After a match it must not be fed again."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stop_strings]
        self._held = ""
        self.is_matched = False

    def feed(self, text: str) -> str:
        """What can be shown now. Sets `is_matched` where a stop string is complete: the text ends before it."""
        if not self._automata:
            return text
        pending = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            matched = [len(automaton.stop) for automaton in self._automata if automaton.advance(character)]
            if matched:
                self.is_matched = True
                self._held = ""
                return pending[: end - max(matched)]
        num_held = max(automaton.num_matched for automaton in self._automata)
        cut = len(pending) - num_held
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text ends here: what was held back became no stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knows how many characters of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Whether the stop string is complete with `character`."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For every prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
