"""Who may come in: API keys, and no web page from elsewhere."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.serve.caller import tenant_of
from outrider.serve.errors import ApiError
from outrider.serve.settings import LOOPBACK
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
    other than browsers send no ``Origin``. With ``local`` only this machine's own names are known as its host: else a
    page whose name is made to lead here would be one of the server's own.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], local: bool) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._refusal(headers.get("host", ""), headers.get("origin"))
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, host: str, origin: str | None) -> ApiError | None:
        if self._local and _name(host) not in LOOPBACK:
            said = f"this server is not {host[:80]}; it is known as {', '.join(LOOPBACK)} (an API key lifts this)"
            return ApiError(403, said, code="host_not_allowed")
        own = origin is None or origin.partition("://")[2] == host
        if not own and "*" not in self._allowed and origin not in self._allowed:
            return ApiError(403, f"pages of {origin} may not call this server", code="origin_not_allowed")
        return None


def _name(host: str) -> str:
    """A host without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
