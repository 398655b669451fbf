"""The live page: a few files of the package, as they are, with what a browser needs to hold them to this server."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes() -> list[Route]:
    """The page and its parts. They hold no secret: whoever may not use the API gets them all the same."""
    return [Route(path, _sender(name, kind)) for path, (name, kind) in FILES.items()]


def _sender(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        body, tag = _content(name)
        headers = {
            "ETag": tag,
            "Cache-Control": "no-cache",  # asked for each time, sent only when it has changed
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        known = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return send


@cache
def _content(name: str) -> tuple[bytes, str]:
    """A file, and the tag by which a browser knows whether it still has the same."""
    body = files("outrider.serve").joinpath("page", name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
