"""Who may come in: API keys, and no web page from elsewhere."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.serve.caller import tenant_of
from outrider.serve.errors import ApiError
from outrider.serve.static import FILES
from outrider.serve.web import error_response

OPEN_PATHS = frozenset({"/health", "/ready", *FILES})


class KeyGuard:
    """Lets requests in that bring one of the keys as ``Authorization: Bearer KEY``; without keys, everybody.

    Comparing takes the same time for every wrong key. Health checks, the live page's files and a browser's
    OPTIONS need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            known = scheme.lower() == "bearer" and self._knows(key.strip())
            free = not self._digests or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
            if not known and not free:
                refusal = ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(refusal)(scope, receive, send)
                return
            scope["tenant"] = tenant_of(key.strip()) if known else ""
        await self._app(scope, receive, send)

    def _knows(self, key: str) -> bool:
        found = [hmac.compare_digest(_digest(key), digest) for digest in self._digests]
        return any(found)


class OriginGuard:
    """Keeps pages of other origins out, unless they are allowed.

    A browser sends simple requests for any page, and only hides the answer from it; the work would be done. Programs
    other than browsers send no ``Origin``.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            own = origin is None or origin.partition("://")[2] == headers.get("host")
            if not own and "*" not in self._allowed and origin not in self._allowed:
                refusal = ApiError(403, f"pages of {origin} may not call this server", code="origin_not_allowed")
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
