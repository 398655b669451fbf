"""Runs the server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from outrider.core.errors import SettingError
from outrider.serve.app import create_app
from outrider.serve.connection import raised_file_limit, room, watched
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings

_LAST_SECONDS = 5
"""What responses get to end in, after the grace period is over."""


def bind(settings: ServerSettings) -> socket.socket:
    """The socket to listen on, so that a port that is taken shows before a model is loaded. Raises SettingError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        where = f"host {settings.host}, port {settings.port}"
        raise SettingError(f"the server cannot listen on {where}: {error.strerror or error}") from None
    bound.set_inheritable(False)
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, with what runs ended in time on shutdown, and an end when the engine has stopped."""

    def __init__(self, service: Service, on_start: Callable[[], None] | None = None, files: int | None = None) -> None:
        """``files`` is how many this process may have open, which limits the connections; None is any number."""
        settings = service.settings
        backlog, connections = room(files)
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=settings.access_log,
            backlog=backlog,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=int(settings.grace) + _LAST_SECONDS,
        )
        config.load()
        config.http_protocol_class = watched(config.http_protocol_class, settings.client_timeout, connections)
        super().__init__(config)
        self._service, self._on_start = service, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_start is not None:
            self._on_start()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._service.loop.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._service.loop.drain(self._service.settings.grace))
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()


def serve(service: Service, bound: socket.socket, on_start: Callable[[], None] | None = None) -> bool:
    """Answers requests on ``bound`` until SIGINT or SIGTERM, then finishes what runs within the grace period.

    False if it was the engine that stopped: whoever watches over the process should start it again.
    """
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if service.settings.access_log else logging.WARNING)
    with _ended_by_signals():
        Server(service, on_start, raised_file_limit()).run(sockets=[bound])
    return service.loop.failure is None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more: a server that was asked to stop has not failed."""
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
