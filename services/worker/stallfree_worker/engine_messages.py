"""What the worker's HTTP front and its engine process say to each other over two pipes.

The front sends one `EngineSetup`, then commands. The engine answers with the `TokenizerFile`, with `EngineReady`, then
with one `EngineReport` per step, and at least one every `STATUS_INTERVAL_SECONDS`; or with `EngineFailed` as its last
word. Both ends are ours and on one machine, so the messages are pickled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from stallfree_shared.wire import ModelCard, RequestId
from stallfree_worker.engine.step import EngineEvent, EngineStatus, NewRequest, StepRecord, StepReport
from stallfree_worker.loaded_model import ModelLoader, TokenizerFile
from stallfree_worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """All that the engine's process is told before it starts."""

    settings: WorkerSettings
    load_model: ModelLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    request: NewRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The engine ends after the step it is in."""


Command = Submit | Cancel | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The model is loaded and one real forward pass has succeeded."""

    card: ModelCard
    """`max_model_len` as the KV cache can hold it."""
    num_blocks: int
    kv_cache_tokens: int
    """What all blocks together hold, in requests of the longest kind."""
    kv_cache_bytes: int
    """What all blocks together take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    step: StepReport
    submits_taken: int
    """`Submit` commands that this process has handed to its engine so far; `step.status` includes all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Events and the record travel as plain tuples: pickling events as objects took the engine 5 µs a token between
        its steps."""
        step = self.step
        events = tuple(map(_event_values, step.events))
        record = None if step.record is None else _record_values(step.record)
        return _restore_report, (events, step.status, record, self.submits_taken)


_EVENT_FIELDS = tuple(field.name for field in dataclasses.fields(EngineEvent))
_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(StepRecord))
_event_values = attrgetter(*_EVENT_FIELDS)
_record_values = attrgetter(*_RECORD_FIELDS)


def _restore_report(
    events: tuple[tuple[Any, ...], ...], status: EngineStatus, record: tuple[Any, ...] | None, submits_taken: int
) -> EngineReport:
    step = StepReport(
        events=tuple(EngineEvent(**dict(zip(_EVENT_FIELDS, values, strict=True))) for values in events),
        status=status,
        record=None if record is None else StepRecord(**dict(zip(_RECORD_FIELDS, record, strict=True))),
    )
    return EngineReport(step=step, submits_taken=submits_taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    reason: str


EngineMessage = TokenizerFile | EngineReady | EngineReport | EngineFailed
