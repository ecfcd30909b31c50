"""Reads what a worker, or a proxy before it, answers over HTTP; whatever is not the wire's becomes a clean error."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stallfree_shared.errors import (
    ErrorInfo,
    InvalidRequestError,
    OverloadedError,
    StallfreeError,
    UnavailableError,
    WorkerLostError,
    WorkerTimeoutError,
)

MAX_LINE_BYTES = 16 * 1024 * 1024
DEFAULT_RETRY_AFTER_SECONDS = 1.0

_MessageT = TypeVar("_MessageT", bound=BaseModel)


def read_json(response: httpx.Response, message: type[_MessageT]) -> _MessageT:
    """The message in a good answer.

    Raises:
        StallfreeError: the worker's own error; `WorkerLostError` where the answer is not from the wire (C15).
    """
    if not response.is_success:
        raise _error_of(response)
    try:
        return message.model_validate_json(response.content)
    except ValidationError as error:
        raise WorkerLostError("the worker answered with something that is not of the wire") from error


def failure_of(error: Exception, doing: str) -> StallfreeError:
    """What a failure below HTTP means."""
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return WorkerTimeoutError(f"the worker was silent while {doing}")
    return WorkerLostError(f"the worker was lost while {doing}")


async def read_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines ended by a newline only: other line separators are legal inside JSON strings.

    Raises:
        WorkerLostError: a line has no end.
    """
    buffer = bytearray()
    async for part in response.aiter_bytes():
        *lines, rest = part.split(b"\n")
        for line in lines:
            yield bytes(buffer) + line
            buffer.clear()
        buffer += rest
        if len(buffer) > MAX_LINE_BYTES:
            raise WorkerLostError("the worker sent a frame without an end")


def _error_of(response: httpx.Response) -> StallfreeError:
    status = response.status_code
    try:
        info = ErrorInfo.model_validate(json.loads(response.content)["error"])
    except (ValueError, KeyError, TypeError):  # ValidationError is a ValueError; a proxy's text is no JSON
        info = None
    retry_after_seconds = _retry_after_seconds(response)
    if status == httpx.codes.TOO_MANY_REQUESTS:
        return OverloadedError("the worker is full", retry_after_seconds=retry_after_seconds)
    error = None if info is None else StallfreeError.from_info(info)
    if isinstance(error, UnavailableError):
        error.retry_after_seconds = retry_after_seconds
    if error is not None and (isinstance(error, InvalidRequestError) or status >= httpx.codes.INTERNAL_SERVER_ERROR):
        return error
    return WorkerLostError(f"the worker, or a proxy before it, answered with HTTP status {status}")


def _retry_after_seconds(response: httpx.Response) -> float:
    with contextlib.suppress(KeyError, ValueError):
        return max(0.0, float(response.headers["retry-after"]))
    return DEFAULT_RETRY_AFTER_SECONDS
