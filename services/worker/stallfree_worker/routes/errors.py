"""The one place where errors become HTTP answers: `{"error": ErrorInfo}` with the error's own status."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypedDict

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from stallfree_shared.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    RouteNotFoundError,
    ServingError,
    StallfreeError,
)

_logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARACTERS = 80


class _Problem(TypedDict):
    loc: tuple[int | str, ...]
    msg: str
    input: object


def answer(error: StallfreeError) -> JSONResponse:
    body = {"error": error.info.model_dump()}
    return JSONResponse(body, status_code=error.http_status, headers=error.http_headers)


def invalid_body(error: ValidationError) -> InvalidRequestError:
    """Names the first wrong field, the rule it breaks, and its value."""
    return _invalid([_Problem(loc=part["loc"], msg=part["msg"], input=part["input"]) for part in error.errors()])


def _invalid(problems: Sequence[_Problem]) -> InvalidRequestError:
    problem = problems[0]
    field = ".".join(map(str, problem["loc"])) or "body"
    shown = repr(problem["input"])
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:_MAX_SHOWN_CHARACTERS]}…"
    return InvalidRequestError(f"{field}: {problem['msg']}; got {shown}", param=field)


def translate_errors(app: FastAPI) -> None:
    """Makes every error of `app` an answer of our own shape, FastAPI's and Starlette's included."""

    @app.exception_handler(StallfreeError)
    async def ours(_request: Request, error: StallfreeError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(
            _invalid([_Problem(loc=part["loc"][1:], msg=part["msg"], input=part["input"]) for part in error.errors()])
        )

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}"
        if error.status_code == RouteNotFoundError.http_status:
            return answer(RouteNotFoundError(f"there is no route {what}"))
        if error.status_code == MethodNotAllowedError.http_status:
            return answer(MethodNotAllowedError(f"{what} is not allowed"))
        return answer(InvalidRequestError(f"{what}: {error.detail}"))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        _logger.error("request handler failed", extra={"path": request.url.path}, exc_info=error)
        return answer(ServingError("this worker failed on the request"))
