"""Errors to HTTP: the only place where one becomes an answer, always in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stallfree_router.accounting import CallAccount
from stallfree_shared.errors import (
    AuthenticationError,
    InvalidRequestError,
    MethodNotAllowedError,
    RouteNotFoundError,
    StallfreeError,
)
from stallfree_shared.openai_api import ErrorBody


def error_response(error: StallfreeError, *, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = {**(headers or {}), **error.http_headers}
    if isinstance(error, AuthenticationError):
        all_headers["WWW-Authenticate"] = "Bearer"
    return Response(
        error_json(error), status_code=error.http_status, media_type="application/json", headers=all_headers
    )


def error_json(error: StallfreeError) -> str:
    # OpenAI's shape has no time to come back: clients are told in the header.
    return ErrorBody(error=error.info.model_copy(update={"retry_after_seconds": None})).model_dump_json()


def add_error_handlers(app: FastAPI) -> None:
    """Errors of the tree and of routing. Anything else is caught by `routes.front.Front`."""
    app.exception_handler(StallfreeError)(_on_stallfree_error)
    app.exception_handler(HTTPException)(_on_http_exception)


async def _on_stallfree_error(request: Request, error: StallfreeError) -> Response:
    return _tell(request, error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    known: StallfreeError
    match error.status_code:
        case 404:
            known = RouteNotFoundError("there is no such route")
        case 405:
            known = MethodNotAllowedError("this route does not take that method")
        case _:
            known = InvalidRequestError("the request cannot be read")
    return _tell(request, known, headers=error.headers)


def _tell(request: Request, error: StallfreeError, *, headers: Mapping[str, str] | None = None) -> Response:
    account = CallAccount.find(request.scope)
    if account is not None:
        account.failed(error)
    return error_response(error, headers=headers)
