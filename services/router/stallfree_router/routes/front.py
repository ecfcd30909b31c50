"""What every HTTP request passes first: its ids, its key, its account, and the last handler for what goes wrong.

While this router is leaving, every answer also asks its client to close the connection: a client that keeps one for
next calls would otherwise find it cut, and perhaps with a call on its way (C20).

A plain ASGI middleware, so that a client's leaving reaches the handlers behind it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import uuid
from collections.abc import Iterator

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stallfree_router.accounting import Accounting, CallAccount
from stallfree_router.routes.errors import error_response
from stallfree_shared.drain import Drain
from stallfree_shared.errors import AuthenticationError, ServingError

_logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_GUARDED_PREFIX = "/v1"
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Front:
    def __init__(self, app: ASGIApp, *, accounting: Accounting, drain: Drain, api_key: SecretStr | None) -> None:
        self._app = app
        self._accounting = accounting
        self._drain = drain
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call_id = uuid.uuid4().hex
        client_request_id = _client_request_id(scope) or call_id
        tagged = _Tagged(send, client_request_id, self._drain)
        with self._account(scope, call_id, client_request_id) as account:
            try:
                self._authenticate(scope)
                await self._app(scope, receive, tagged)
            except AuthenticationError as error:
                if account is not None:
                    account.failed(error)
                await error_response(error)(scope, receive, tagged)
            except ClientDisconnect:
                if account is not None:
                    account.aborted()
            except Exception as error:
                _logger.exception("request failed", extra={"request_id": call_id})
                if account is not None:
                    account.failed(error)
                if tagged.is_started:
                    raise
                await error_response(ServingError("internal error"))(scope, receive, tagged)

    @contextlib.contextmanager
    def _account(self, scope: Scope, call_id: str, client_request_id: str) -> Iterator[CallAccount | None]:
        if scope["path"] not in GENERATION_PATHS:
            yield None
            return
        account = self._accounting.open(call_id=call_id, client_request_id=client_request_id)
        account.attach(scope)
        try:
            yield account
        finally:
            self._accounting.close(account)

    def _authenticate(self, scope: Scope) -> None:
        """Every path under /v1 needs the key, whether there is such a route or not.

        Raises:
            AuthenticationError: the key is missing or wrong.
        """
        if self._api_key is None or not scope["path"].startswith(_GUARDED_PREFIX):
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        wanted = self._api_key.get_secret_value()
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), wanted.encode()):
            raise AuthenticationError("send the API key as a bearer token in the Authorization header")


class _Tagged:
    """`send`, with the headers that every response has."""

    def __init__(self, send: Send, request_id: str, drain: Drain) -> None:
        self._send = send
        self._request_id = request_id
        self._drain = drain
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._request_id
            if self._drain.is_draining:
                headers["Connection"] = "close"
        await self._send(message)


def _client_request_id(scope: Scope) -> str | None:
    """What the client calls this request, if that is safe to echo and to log."""
    value = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return value if _SAFE_ID.fullmatch(value) else None
