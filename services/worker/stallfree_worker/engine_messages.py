"""What the worker's HTTP front and its engine process say to each other over two pipes.

The front sends one `EngineSetup`, then commands. The engine answers with the `TokenizerFile`, with `EngineReady`, then
with one `EngineReport` per step, and at least one every `STATUS_INTERVAL_SECONDS`; or with `EngineFailed` as its last
word. Both ends are ours and on one machine, so the messages are pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        """Its parts travel as plain tuples: pickling events by their class took the engine 5 µs a token between its
        steps."""
        events, status, record = self.step
        plain = (tuple(map(tuple, events)), tuple(status), None if record is None else tuple(record))
        return _restore_report, (*plain, self.submits_taken)


def _restore_report(
    events: tuple[tuple[Any, ...], ...], status: tuple[Any, ...], record: tuple[Any, ...] | None, submits_taken: int
) -> EngineReport:
    step = StepReport(
        events=tuple(map(EngineEvent._make, events)),
        status=EngineStatus._make(status),
        record=None if record is None else StepRecord._make(record),
    )
    return EngineReport(step=step, submits_taken=submits_taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    reason: str


EngineMessage = TokenizerFile | EngineReady | EngineReport | EngineFailed
