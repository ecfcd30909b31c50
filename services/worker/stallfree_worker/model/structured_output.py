"""Has the masks of structured outputs ready when tokens are drawn, and lets nobody wait for them.

Grammars are compiled by threads while forward passes run. The mask of a row's next draw is begun right after the draw
before it, when its text is known and the other cores have nothing to do: most are ready when the next step begins. A
row whose mask is not there when tokens are drawn is postponed: its last token is computed again with the next step. So
a grammar that takes a second to compile costs its own request that second, and the others nothing.

A matcher stands where the request's output so far brings it, so preemptions, resumed requests and tokens that are taken
back need nothing of their own. It is forgotten when its request ends.

When a text can only end, the next token ends the request whatever it asked for: with `ignore_eos`, with `min_tokens`,
or with a model that has no end-of-sequence id, it would otherwise go on with nothing that it may say. Before that,
`ignore_eos` makes the text as long as its grammar lets it be.

Owned by `runner`, which calls `begin` before the forward pass, `finish` before the draw and `expect` after it, from one
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from llguidance import LLExecutor
from torch import Tensor

from stallfree_shared.grammars import grammar_threads
from stallfree_shared.wire import RequestId
from stallfree_worker.engine.step import Chunk, StepPlan
from stallfree_worker.model.grammar_masks import GrammarVocabulary, Mask, TextMatcher, compute_masks

MAX_WAIT_SECONDS = 0.005
"""Most that a step waits for the masks that it began, once its forward pass is through."""
PATIENCE_SECONDS = 10.0
"""A request fails when its grammar or one of its masks takes longer. The library's own limits end such work far earlier
on an idle machine."""

_Text = tuple[int, ...]
"""The output token ids before the one that is drawn next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """What a step's draws must keep to. Requests without a structured output are in none of these."""

    allowed_by_request: Mapping[RequestId, Tensor] = field(default_factory=dict)
    """Ids that may be drawn: see `id_masks`, on the device."""
    completed: frozenset[RequestId] = frozenset()
    """Their text can only end: the token drawn now ends them, whatever it is."""
    postponed: frozenset[RequestId] = frozenset()
    """Nothing can be drawn for them yet."""
    failure_by_request: Mapping[RequestId, str] = field(default_factory=dict)


class _Work:
    """Masks that a thread computes, or has computed."""

    def __init__(self, tasks: Sequence[tuple[_Constraint, _Text]], masks: Future[list[Mask]], begun_at: float) -> None:
        self._row = {constraint: row for row, (constraint, _) in enumerate(tasks)}
        self.masks = masks
        self.begun_at = begun_at
        self.is_late = False
        """A step has waited for it in vain: no other does."""

    @property
    def is_done(self) -> bool:
        return self.masks.done()

    def drop(self) -> None:
        """A request of it is gone: what nobody waits for need not begin."""
        if len(self._row) == 1:
            self.masks.cancel()

    def mask(self, constraint: _Constraint) -> Mask:
        """Waits for nothing: ask `is_done` first. What the work raised is a failure of all its requests."""
        error = self.masks.exception()
        if error is not None:
            return _failed(f"its structured output cannot begin: {error}")
        return self.masks.result()[self._row[constraint]]


@dataclass(slots=True, kw_only=True, eq=False)
class _Constraint:
    """One request's grammar."""

    matcher: TextMatcher
    """That of the thread that works on it: there is never more than one."""
    work: _Work | None = None
    """What is computed for it now. Not kept for longer: it holds the masks of a whole step."""
    newest: Mask | None = None

    def mask(self, text: _Text) -> Mask | None:
        """What may follow `text`, or why this request fails; None where that is not known yet."""
        if self.work is not None and self.work.is_done:
            self.newest, self.work = self.work.mask(self), None
        mask = self.newest
        return mask if mask is not None and (mask.text == text or mask.failure is not None) else None

    def needs_work(self, text: _Text) -> bool:
        return self.mask(text) is None and self.work is None


class StructuredOutputs:
    """Sole owner of the grammars of all requests."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary | None,
        device: torch.device,
        *,
        num_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a vocabulary every request with a structured output fails."""
        self._vocabulary = vocabulary
        self._device = device
        self._clock = clock
        self._constraints: dict[RequestId, _Constraint] = {}
        self._compiling = grammar_threads(num_threads, name="grammars")
        self._masking = ThreadPoolExecutor(num_threads, thread_name_prefix="masks")
        """Threads of their own: no mask waits behind grammars that are compiled."""
        self._executor = LLExecutor(num_threads)

    @property
    def num_requests(self) -> int:
        """Requests whose grammar is kept."""
        return len(self._constraints)

    def begin(self, plan: StepPlan) -> None:
        """Has threads work on what `finish` will want for this plan, and returns at once. The first chunk of a request
        has its grammar compiled, even where no token is drawn after it."""
        for request_id in plan.ended_request_ids:
            self._forget(request_id)
        tasks: list[tuple[_Constraint, _Text]] = []
        for chunk in plan.chunks:
            output = chunk.sampling.structured_output
            if output is None:
                continue
            constraint = self._constraints.get(chunk.request_id)
            if constraint is None or constraint.matcher.output != output:
                matcher = TextMatcher(output, ignore_eos=chunk.sampling.ignore_eos)
                constraint = self._constraints[chunk.request_id] = _Constraint(matcher=matcher)
                # alone, as long as nobody knows what it takes
                self._start([(constraint, _text(chunk))], self._compiling)
            elif chunk.output_index is not None and constraint.needs_work(_text(chunk)):
                tasks.append((constraint, _text(chunk)))
        if tasks:
            self._start(tasks, self._masking)

    def finish(self, sampled: Sequence[Chunk]) -> StepMasks:
        """What the draws after `sampled` must keep to, as far as it is known within `MAX_WAIT_SECONDS`."""
        some = sampled if self._constraints else ()  # else nobody need be asked
        chunks = [chunk for chunk in some if chunk.sampling.structured_output is not None]
        if not chunks:
            return _NO_MASKS
        constraints = {chunk.request_id: self._constraints[chunk.request_id] for chunk in chunks}
        _wait_for([one.work for one in constraints.values() if one.work is not None])
        masks = {chunk.request_id: self._mask(constraints[chunk.request_id], _text(chunk)) for chunk in chunks}
        known = {request_id: mask for request_id, mask in masks.items() if mask is not None}
        sound = {request_id: mask for request_id, mask in known.items() if mask.failure is None}
        return StepMasks(
            allowed_by_request={
                request_id: mask.allowed.to(self._device, non_blocking=True) for request_id, mask in sound.items()
            },
            completed=frozenset(request_id for request_id, mask in sound.items() if mask.can_only_end),
            postponed=frozenset(masks.keys() - known.keys()),
            failure_by_request={request_id: mask.failure for request_id, mask in known.items() if mask.failure},
        )

    def expect(self, sampled: Sequence[Chunk], tokens: Sequence[int | None], masks: StepMasks) -> None:
        """Begins what the draws after these will want. `tokens` were drawn after `sampled`, by `masks`."""
        if not masks.allowed_by_request:
            return
        going_on = masks.allowed_by_request.keys() - masks.completed
        tasks: list[tuple[_Constraint, _Text]] = []
        for chunk, token in zip(sampled, tokens, strict=True):
            if token is None or chunk.request_id not in going_on or self._is_last(chunk, token):
                continue
            constraint, text = self._constraints[chunk.request_id], (*_text(chunk), token)
            if constraint.needs_work(text):
                tasks.append((constraint, text))
        if tasks:
            self._start(tasks, self._masking)

    def _is_last(self, chunk: Chunk, token: int) -> bool:
        """Whether nothing is drawn after this token, as far as that is known here."""
        sampling = chunk.sampling
        eos_token_ids = frozenset() if self._vocabulary is None else self._vocabulary.eos_token_ids
        is_end = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in eos_token_ids)
        return is_end or len(_text(chunk)) + 1 >= sampling.max_tokens

    def _forget(self, request_id: RequestId) -> None:
        constraint = self._constraints.pop(request_id, None)
        if constraint is not None and constraint.work is not None:
            constraint.work.drop()

    def _start(self, tasks: Sequence[tuple[_Constraint, _Text]], threads: ThreadPoolExecutor) -> None:
        asked = [(constraint.matcher, text) for constraint, text in tasks]
        work = _Work(tasks, threads.submit(self._compute, asked), self._clock())
        for constraint, _ in tasks:
            constraint.work = work

    def _compute(self, asked: Sequence[tuple[TextMatcher, _Text]]) -> list[Mask]:
        """In a thread."""
        if self._vocabulary is None:
            return [_failed("this model's tokenizer does not allow structured output")] * len(asked)
        is_pinned = self._device.type == "cuda"
        return compute_masks(asked, self._vocabulary, self._executor, is_pinned=is_pinned)

    def _mask(self, constraint: _Constraint, text: _Text) -> Mask | None:
        mask = constraint.mask(text)
        begun_at = self._clock() if constraint.work is None else constraint.work.begun_at
        if mask is None and self._clock() - begun_at > PATIENCE_SECONDS:
            return _failed(f"its structured output took longer than {PATIENCE_SECONDS:g} seconds for one token")
        return mask


_NO_MASKS = StepMasks()


def _wait_for(works: Sequence[_Work]) -> None:
    wait([work.masks for work in works if not work.is_late], timeout=MAX_WAIT_SECONDS)
    for work in works:
        work.is_late = not work.is_done


def _text(chunk: Chunk) -> _Text:
    """Nothing, where no token is drawn after `chunk`."""
    return chunk.history.output_token_ids if chunk.history is not None else ()


def _failed(reason: str) -> Mask:
    return Mask(text=(), allowed=torch.empty(0, dtype=torch.int32), can_only_end=False, failure=reason)
