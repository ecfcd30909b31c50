"""What the worker's HTTP front and its engine process say to each other over two pipes.

The front sends one `EngineSetup`, then commands. The engine answers with the `TokenizerFile`, with `EngineReady`, then
with one `EngineReport` per step, and at least one every `STATUS_INTERVAL_SECONDS`; or with `EngineFailed` as its last
word. Both ends are ours and on one machine, so the messages are pickled.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import cast

from stallfree_shared.wire import ModelCard, RequestId
from stallfree_worker.engine.step import EngineEvent, EngineStatus, NewRequest, StepRecord, StepReport
from stallfree_worker.engine.step_time import StepTimeLine
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    reason: str


EngineMessage = TokenizerFile | EngineReady | EngineReport | EngineFailed


def pack(message: EngineMessage) -> bytes:
    """For the pipe. A report, which is made between two steps, travels in plain tuples: to pickle what it is made of by
    class took 5 µs a token."""
    if not isinstance(message, EngineReport):
        return pickle.dumps(message)
    events, status, record = message.step
    plain_status = tuple([tuple(part) if isinstance(part, StepTimeLine) else part for part in status])
    plain_record = None if record is None else tuple(record)
    return pickle.dumps((tuple(map(tuple, events)), plain_status, plain_record, message.submits_taken))


def unpack(data: bytes) -> EngineMessage:
    """What `pack` was given."""
    message = pickle.loads(data)  # noqa: S301 - from our own process
    if not isinstance(message, tuple):
        return cast("EngineMessage", message)
    events, plain_status, record, submits_taken = message
    status = EngineStatus._make(plain_status)
    step = StepReport(
        events=tuple(map(EngineEvent._make, events)),
        status=status._replace(step_time=StepTimeLine._make(status.step_time)),
        record=None if record is None else StepRecord._make(record),
    )
    return EngineReport(step=step, submits_taken=submits_taken)
