"""What the worker's HTTP front and its engine process say to each other over two pipes.

The front sends one `EngineSetup`, then commands. The engine answers with `EngineReady`, then one `EngineReport` per
step, and at least one every `STATUS_INTERVAL_SECONDS`; or with `EngineFailed` as its last word. Both ends are ours and
on one machine, so the messages are pickled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from stallfree_shared.wire import ModelCard, RequestId
from stallfree_worker.engine.step import EngineEvent, NewRequest, StepReport
from stallfree_worker.loaded_model import ModelLoader
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
    tokenizer_path: Path
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    step: StepReport
    submits_taken: int
    """`Submit` commands that this process has handed to its engine so far; `step.status` includes all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Events travel as plain tuples: pickling them as objects took the engine 5 µs a token between its steps."""
        events = tuple(map(_event_values, self.step.events))
        return _restore_report, (events, dataclasses.replace(self.step, events=()), self.submits_taken)


_EVENT_FIELDS = tuple(field.name for field in dataclasses.fields(EngineEvent))
_event_values = attrgetter(*_EVENT_FIELDS)


def _restore_report(events: tuple[tuple[Any, ...], ...], step: StepReport, submits_taken: int) -> EngineReport:
    restored = tuple(EngineEvent(**dict(zip(_EVENT_FIELDS, values, strict=True))) for values in events)
    return EngineReport(step=dataclasses.replace(step, events=restored), submits_taken=submits_taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    reason: str


EngineMessage = EngineReady | EngineReport | EngineFailed
