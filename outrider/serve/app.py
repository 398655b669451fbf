"""The ASGI application: routes, and what stands around all of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.core.errors import OutriderError
from outrider.core.version import __version__
from outrider.serve import chat, completions, static, status, tokens
from outrider.serve.bodies import parse, read_body
from outrider.serve.caller import HEADER, Caller, RequestIds
from outrider.serve.errors import ApiError, unavailable
from outrider.serve.guard import KeyGuard, OriginGuard
from outrider.serve.live import Live
from outrider.serve.live import status as live_status
from outrider.serve.metrics import TEXT_FORMAT, exposition
from outrider.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.serve.service import Service
from outrider.serve.web import ClientGoneError, Faults, Json, error_response, unless_gone

logger = logging.getLogger("outrider")
M = TypeVar("M", bound=BaseModel)
EXPOSED = (HEADER, "retry-after")
"""What a page of another origin may read of a response's headers."""
_CLIENT_GONE = 499
"""nginx's status for it: nobody sees it but logs."""


def create_app(service: Service) -> Starlette:
    """The API over ``service``, whose engine runs from the application's start to its end."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.loop.start()
        try:
            yield
        finally:
            await service.loop.stop()
            service.close()

    settings = service.settings
    middleware = [
        Middleware(Faults),
        Middleware(OriginGuard, allowed=settings.cors_origin, local=settings.is_local and not settings.api_key),
        Middleware(KeyGuard, keys=settings.api_key),
    ]
    if settings.cors_origin:
        allowed: dict[str, Any] = {"allow_origins": list(settings.cors_origin), "expose_headers": [*EXPOSED]}
        cors = Middleware(CORSMiddleware, **allowed, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    middleware.insert(0, Middleware(RequestIds))
    app = Starlette(
        routes=_routes(service),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={
            ApiError: _on_error,
            OutriderError: _on_error,
            HTTPException: _on_http_error,
            ClientGoneError: _on_gone,
            ClientDisconnect: _on_gone,
        },
    )
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    live = Live()

    async def health(_: Request) -> Response:
        if not service.loop.alive:
            raise unavailable("the engine has stopped; the server must be restarted")
        return Json({"status": "ok"})

    async def ready(_: Request) -> Response:
        if not service.loop.accepting:
            raise unavailable("the server takes no requests now")
        return Json({"status": "ready", "model": service.name})

    async def list_models(_: Request) -> Response:
        return Json(status.models(service))

    async def one_model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return Json(status.model(service))

    async def speculation(_: Request) -> Response:
        return Json(await service.loop.call(status.speculation))

    async def now(_: Request) -> Response:
        return Json(await service.loop.call(lambda engine: live_status(service, live, engine)))

    async def version(_: Request) -> Response:
        return Json({"version": __version__})

    async def metrics(_: Request) -> Response:
        return Response(await exposition(service.loop), media_type=TEXT_FORMAT)

    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await completions.complete(service, body, Caller.of(request))

    async def answer(request: Request, body: ChatRequest) -> Response:
        return await chat.answer(service, body, Caller.of(request))

    async def tokenize(_: Request, body: TokenizeRequest) -> Response:
        return Json(await tokens.tokenize(service, body))

    async def detokenize(_: Request, body: DetokenizeRequest) -> Response:
        return Json(await tokens.detokenize(service, body))

    return [
        *static.routes(),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/speculation", speculation),
        Route("/v1/status", now),
        Route("/v1/completions", _taking(CompletionRequest, service, complete), methods=["POST"]),
        Route("/v1/chat/completions", _taking(ChatRequest, service, answer), methods=["POST"]),
        Route("/tokenize", _taking(TokenizeRequest, service, tokenize), methods=["POST"]),
        Route("/detokenize", _taking(DetokenizeRequest, service, detokenize), methods=["POST"]),
    ]


def _taking(
    kind: type[M], service: Service, handle: Callable[[Request, M], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that takes a JSON body; its work is dropped when the client goes away."""

    async def endpoint(request: Request) -> Response:
        body = parse(kind, await read_body(request, service.settings.max_body_bytes))
        service.check_model(getattr(body, "model", None))

        async def work() -> Response:
            return await handle(request, body)

        return await unless_gone(request.receive, work())

    return endpoint


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    if error.status_code == 405:
        said = f"{request.method} is not allowed on {request.url.path}; allowed is {headers.get('Allow', 'another')}"
    elif error.status_code == 404:
        said = f"there is nothing at {request.url.path}"
    else:
        said = str(error.detail)
    return error_response(ApiError(error.status_code, said, headers=headers))


async def _on_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
