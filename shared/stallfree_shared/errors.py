"""The one error tree of Stallfree, drawn whole at the top.

    StallfreeError
    ├── InvalidRequestError            400  the user's mistake; names field, limit and value
    │   ├── ContextLengthExceededError 400
    │   ├── UnsupportedParameterError  400
    │   ├── AuthenticationError        401
    │   ├── ModelNotFoundError         404
    │   ├── RouteNotFoundError         404
    │   ├── MethodNotAllowedError      405
    │   ├── SlowClientError            408
    │   ├── PayloadTooLargeError       413
    │   └── UnsupportedEncodingError   415
    ├── OverloadedError                429  refused early, with a time to come back
    ├── UnavailableError               503  nobody can serve this now
    │   └── DrainingError              503  this process is leaving
    └── ServingError                   500  our fault
        ├── StepFailedError            500  the model could not compute this request (NaN logits)
        ├── WorkerLostError            502  the worker, its engine or the way to it is gone
        └── WorkerTimeoutError         504  the worker is there and silent

Errors are raised where they are known and translated in one place: `ErrorInfo` is both the body that the OpenAI
API shows to clients and what travels from a worker to a router.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


def _is_none(value: object) -> bool:
    return value is None


class ErrorInfo(BaseModel):
    """The OpenAI error object; `{"error": {...}}` around it is the body of every refusal."""

    model_config = ConfigDict(frozen=True)

    message: str
    type: str
    param: str | None = None
    code: str
    retry_after_seconds: float | None = Field(None, exclude_if=_is_none)
    """From a worker to a router; clients are told in the Retry-After header."""


class StallfreeError(Exception):
    """An error that knows what a client should be told.

    `is_retryable` says whether another worker may succeed with the very same request.
    """

    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(
            message=self.message,
            type=self.type,
            param=self.param,
            code=self.code,
            retry_after_seconds=self.retry_after_seconds,
        )

    @property
    def http_headers(self) -> dict[str, str]:
        """What an HTTP answer says besides its status and body."""
        if self.retry_after_seconds is None:
            return {}
        return {"Retry-After": str(math.ceil(self.retry_after_seconds))}

    @classmethod
    def from_info(cls, info: ErrorInfo) -> StallfreeError:
        """The error that `info` was made from; an unknown code becomes a plain `ServingError`."""
        error = _class_by_code().get(info.code, ServingError)
        return error(info.message, param=info.param, retry_after_seconds=info.retry_after_seconds)


class InvalidRequestError(StallfreeError):
    code = "invalid_request"
    type = "invalid_request_error"
    http_status = 400


class ContextLengthExceededError(InvalidRequestError):
    code = "context_length_exceeded"


class UnsupportedParameterError(InvalidRequestError):
    code = "unsupported_parameter"


class AuthenticationError(InvalidRequestError):
    code = "invalid_api_key"
    http_status = 401


class ModelNotFoundError(InvalidRequestError):
    code = "model_not_found"
    http_status = 404


class RouteNotFoundError(InvalidRequestError):
    code = "route_not_found"
    http_status = 404


class MethodNotAllowedError(InvalidRequestError):
    code = "method_not_allowed"
    http_status = 405


class SlowClientError(InvalidRequestError):
    """The client takes its answer so slowly that what waits for it has reached its bound."""

    code = "slow_client"
    http_status = 408


class PayloadTooLargeError(InvalidRequestError):
    code = "payload_too_large"
    http_status = 413


class UnsupportedEncodingError(InvalidRequestError):
    """The body is compressed: what a few bytes would become has no bound."""

    code = "unsupported_encoding"
    http_status = 415


class OverloadedError(StallfreeError):
    code = "overloaded"
    type = "rate_limit_error"
    http_status = 429
    is_retryable = True


class UnavailableError(StallfreeError):
    code = "unavailable"
    http_status = 503
    is_retryable = True


class DrainingError(UnavailableError):
    code = "draining"


class ServingError(StallfreeError):
    code = "serving_error"


class StepFailedError(ServingError):
    code = "step_failed"


class WorkerLostError(ServingError):
    code = "worker_lost"
    http_status = 502
    is_retryable = True


class WorkerTimeoutError(ServingError):
    code = "worker_timeout"
    http_status = 504
    is_retryable = True


def _tree(root: type[StallfreeError]) -> Iterator[type[StallfreeError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _class_by_code() -> dict[str, type[StallfreeError]]:
    return {error.code: error for error in _tree(StallfreeError)}
