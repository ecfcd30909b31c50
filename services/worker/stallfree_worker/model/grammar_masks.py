"""Which tokens may follow a text that must keep to a schema, a regular expression, a grammar or choices.

Asks the llguidance library, which works without the interpreter's lock. Knows nothing of steps or of time: called by
`structured_output`, in its threads.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray
from torch import Tensor

from stallfree_shared.grammars import LIMITS, make_grammar
from stallfree_shared.wire import StructuredOutput
from stallfree_worker.model.id_masks import WORD_BITS, mask_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GrammarVocabulary:
    """What grammars know of the model's tokens."""

    tokenizer: LLTokenizer
    num_ids: int
    """Columns of the logits: no id from there on can be drawn."""
    eos_token_ids: frozenset[int]
    """Those that can be drawn; may be empty."""

    @functools.cached_property
    def all_ids(self) -> NDArray[np.int32]:
        return mask_of(range(self.num_ids), num_ids=self.num_ids)

    @functools.cached_property
    def ends(self) -> NDArray[np.int32]:
        return mask_of(self.eos_token_ids, num_ids=self.num_ids)

    @classmethod
    def load(
        cls, tokenizer_path: Path, *, num_tokenizer_ids: int, num_ids: int, eos_token_ids: frozenset[int]
    ) -> GrammarVocabulary | None:
        """Takes 2.5 seconds for 262,144 tokens, and holds the interpreter's lock: not for a process that serves.

        None where the library cannot read the tokenizer: the model can be served, without structured output.
        """
        known = frozenset(token for token in eos_token_ids if token < num_ids)
        tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
        ends = sorted(known)
        if not known:
            tokenizer_json, ends = _with_end_token(tokenizer_json, num_tokenizer_ids), [num_tokenizer_ids]
        try:
            tokenizer = LLTokenizer(tokenizer_json, n_vocab=max(num_tokenizer_ids, ends[-1] + 1), eos_token=ends)
        except ValueError as error:
            _logger.warning("structured output is off: the tokenizer cannot be read", extra={"reason": str(error)})
            return None
        return cls(tokenizer=tokenizer, num_ids=num_ids, eos_token_ids=known)


class TextMatcher:
    """One request's grammar, and how far its text has got. Used by one thread at a time."""

    def __init__(self, output: StructuredOutput, *, ignore_eos: bool) -> None:
        self.output = output
        self.ignore_eos = ignore_eos
        self._library: LLMatcher | None = None
        self._text: tuple[int, ...] = ()

    def advance(self, text: tuple[int, ...], vocabulary: GrammarVocabulary) -> LLMatcher:
        """The library's matcher after the output token ids `text`, whatever it stood after before. At the first call
        the grammar is compiled. What goes wrong is told by the matcher.

        Raises:
            ValueError: the definition is not even JSON, where it should be.
        """
        if self._library is None:
            grammar = make_grammar(self.output)
            self._library = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
        num_consumed = len(self._text)
        if text[:num_consumed] != self._text:
            self._library.reset()
            num_consumed = 0
        self._library.consume_tokens(list(text[num_consumed:]))
        self._text = text
        return self._library


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What may follow one text."""

    text: tuple[int, ...]
    """The output token ids that it follows."""
    allowed: Tensor  # see `id_masks`, on the host
    can_only_end: bool
    """Nothing may follow but an end-of-sequence id, or, where the model has none, whatever is drawn."""
    failure: str | None
    """Why the text cannot go on; the rest means nothing then."""


def compute_masks(
    tasks: Sequence[tuple[TextMatcher, tuple[int, ...]]],
    vocabulary: GrammarVocabulary,
    executor: LLExecutor,
    *,
    is_pinned: bool,
) -> list[Mask]:
    """What may follow each text, by its matcher; all of them in parallel. `is_pinned` is for copies to a GPU.

    Raises:
        ValueError: see `TextMatcher.advance`.
    """
    matchers = [matcher.advance(text, vocabulary) for matcher, text in tasks]
    words = np.zeros((len(tasks), -(-vocabulary.tokenizer.vocab_size // WORD_BITS)), dtype=np.int32)
    sound = [(matcher, row) for row, matcher in enumerate(matchers) if not matcher.is_error()]
    if sound:
        fill_next_token_bitmask_par(executor, sound, words)
    masks = []
    for (matcher, text), library, row in zip(tasks, matchers, words, strict=True):
        # a copy: whoever keeps its mask for long keeps no other's
        allowed = row[: len(vocabulary.all_ids)] & vocabulary.all_ids
        can_only_end = _settle_ends(allowed, vocabulary.ends, ignore_eos=matcher.ignore_eos)
        tensor = torch.from_numpy(allowed)
        masks.append(
            Mask(
                text=text,
                allowed=tensor.pin_memory() if is_pinned else tensor,
                can_only_end=can_only_end,
                failure=_failure(library),
            )
        )
    return masks


def _settle_ends(allowed: NDArray[np.int32], ends: NDArray[np.int32], *, ignore_eos: bool) -> bool:
    """Whether a text can only end, by the mask of what may follow it and that of the end-of-sequence ids. It is left an
    id to draw then; any other text that ignores the end-of-sequence ids loses them."""
    can_only_end = not (allowed & ~ends).any()
    if can_only_end and not ends.any():
        allowed[0] |= 1
    if ignore_eos and not can_only_end:
        allowed &= ~ends
    return can_only_end


def _failure(matcher: LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    error = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return f"its structured output cannot go on: {error}"


def _with_end_token(tokenizer_json: str, token_id: int) -> str:
    """A tokenizer with one more token, which no logit stands for: matchers need an end, though the model has none."""
    tokenizer = json.loads(tokenizer_json)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": token_id, "content": "<|end of structured output|>", "special": True, **flags}
    return json.dumps({**tokenizer, "added_tokens": [*(tokenizer.get("added_tokens") or []), added]})
