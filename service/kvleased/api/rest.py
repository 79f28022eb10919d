"""Own the REST server: the app over the route table, on a Unix socket and on loopback TCP.

Probes and the routes of workers are answered by a small router in front; everything else, and the documents, by FastAPI
behind it. So a restarted daemon is ready before FastAPI is imported, and a hot call does not pay for its routing.
"""

import asyncio
import importlib
import re
from collections.abc import Awaitable, Callable
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, compile_path
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from kvlease.errors import InternalError, InvalidError
from kvleased.api.health import Probes
from kvleased.api.http_server import HttpLimits, HttpServer
from kvleased.api.rest_endpoints import Endpoint, refusal
from kvleased.api.rest_events import EventsEndpoint, Streams
from kvleased.api.rest_routes import ROUTES, Route
from kvleased.api.seam import Backend, Beside, Limits, Observer
from kvleased.api.sockets import is_loopback, listen_tcp, listen_unix, remove_unix
from kvleased.api.tls import tls_files

Answers = Callable[[Request], Awaitable[Response]]
"""What answers the requests of one route."""


class RestServer:
    """REST, from `start` to `stop`."""

    def __init__(self, metrics: Observer, page: Beside | None = None) -> None:
        """Remember who counts, and what is served beside the API."""
        self._metrics = metrics
        self._page = page
        self._servers: list[HttpServer] = []
        self._remove: Callable[[], None] = lambda: None
        self._streams: Streams = set()
        self._behind: _Behind
        self._probes: Probes
        self.http_port = 0
        """The TCP port; 0 where there is none."""

    @property
    def probes(self) -> Probes:
        """The probes, once started: another server may answer them, too."""
        return self._probes

    async def start(self, daemon: Backend, settings: Limits) -> None:
        """Begin to listen at `http.sock` in the runtime directory and, where wanted, on TCP."""
        local = listen_unix(settings.runtime_dir / "http.sock")
        self._remove = lambda: remove_unix(local)
        app = make_app(daemon, self._metrics, message_bytes_max=settings.max_message_bytes)
        if self._page is not None:
            self._page.add_to(app, daemon)
        self._streams, self._behind = app.state.streams, app.state.behind
        self._probes = app.state.probes
        limits = HttpLimits(
            connections_max=settings.max_connections,
            head_seconds_max=settings.head_seconds_max,
            body_seconds_max=settings.body_seconds_max,
            idle_seconds_max=settings.idle_seconds_max,
        )
        headers = [("KVLease-Epoch", str(daemon.epoch))]
        # Strangers on TCP cannot use up the connections of the Unix socket.
        self._servers = [HttpServer(app, local, limits, headers=headers)]
        if settings.listen_tcp:
            tcp = listen_tcp(settings.tcp_host, settings.http_port)
            self.http_port = tcp.getsockname()[1]
            files = tls_files(settings)
            self._servers.append(
                HttpServer(
                    app,
                    tcp,
                    limits,
                    tls=None if files is None else files.context(),
                    is_for_any_host=not is_loopback(settings.tcp_host),
                    headers=headers,
                )
            )
        for server in self._servers:
            await server.start()

    async def complete(self) -> None:
        """Take note that the daemon serves, and make the part of the app that is seldom the first to be called."""
        self._probes.note_start()
        await self._behind.made()

    async def stop(self) -> None:
        """Stop listening, and let requests in progress finish for a moment."""
        servers, self._servers = self._servers, []
        if not servers:
            return
        for gone in tuple(self._streams):
            gone.cancel()
        self._remove()
        await asyncio.gather(*(server.stop() for server in servers))


def make_app(daemon: Backend, metrics: Observer, *, message_bytes_max: int) -> Starlette:
    """Return the app: the probes and hot routes first, and FastAPI with all routes behind them."""
    app = Starlette(exception_handlers=_HANDLERS)
    app.router.redirect_slashes = False
    app.state.streams = set()
    endpoints: dict[Route, Answers] = {}
    for route in ROUTES:
        kind = EventsEndpoint if route.is_stream else Endpoint
        answers = kind(route, daemon, metrics, message_bytes_max=message_bytes_max).answer
        endpoints[route] = answers
        if route.is_hot:
            app.routes.append(_Exact(route.path, answers, methods=[route.method]))
    app.state.probes = Probes(daemon, metrics)
    app.state.probes.add_to(app, is_for_all=False)
    app.state.behind = app.router.default = _Behind(endpoints, app)
    return app


class _Exact(StarletteRoute):
    """A route that answers just its own method: other methods of its path are looked for further on."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        is_other = match is Match.PARTIAL or scope["method"] not in self.own_methods
        return (Match.NONE, {}) if is_other else (match, child_scope)

    def __init__(self, path: str, answers: Answers, *, methods: list[str]) -> None:
        super().__init__(path, answers, methods=methods)
        # Starlette adds HEAD to GET, which would carry the verb out and throw its answer away.
        self.own_methods = frozenset(methods)


class _Behind:
    """The FastAPI app, made when it is first needed or when the daemon is ready, whichever comes first."""

    def __init__(self, endpoints: dict[Route, Answers], front: Starlette) -> None:
        self._endpoints = endpoints
        self._front = front
        self._made: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = await asyncio.shield(self.made())
        scope["app"] = app
        await app(scope, receive, send)

    def made(self) -> "asyncio.Future[ASGIApp]":
        """Return the app, or the promise of it: its import takes half a second, in which hot calls go on."""
        if self._made is None:
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return self._made

    def _make(self) -> ASGIApp:
        module = importlib.import_module("kvleased.api.rest_app")
        app: Starlette = module.make_described_app(self._endpoints)
        app.state.streams = self._front.state.streams
        for kind, handler in _HANDLERS.items():
            app.add_exception_handler(kind, handler)
        return app


async def _refused_by_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    detail = f"{request.method} {request.url.path[:200]}: {HTTPStatus(error.status_code).phrase}"
    wrong = _wrong_argument(request.method, request.scope["path"])
    answer = refusal(wrong or InvalidError(detail, resource="path"), error.status_code)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The router knows the methods of one route, and several may have the same path.
        headers["Allow"] = _methods_at(request.scope["path"]) or headers.get("Allow", "")
    for name, value in headers.items():
        answer.raw_headers.append((name.lower().encode(), value.encode()))
    return answer


def _methods_at(path: str) -> str:
    """Return the methods of all routes of the table that take a path."""
    found = {route.method for route, takes in _patterns() if takes.fullmatch(path)}
    return ", ".join(sorted(found))


@cache
def _patterns() -> list[tuple[Route, re.Pattern[str]]]:
    return [(route, compile_path(route.path)[0]) for route in ROUTES]


def _wrong_argument(method: str, path: str) -> InvalidError | None:
    """Name the argument that is empty or has a slash in it, so that no route takes the path although one is meant."""
    for route in ROUTES:
        prefix, _, name = route.path.partition("{")
        if route.method == method and name.endswith("}") and path.startswith(prefix):
            value = path.removeprefix(prefix)
            message = f"{name[:-1]} is {value[:80]!r}; it must not be empty, nor have a slash in it"
            return InvalidError(message, resource=name[:-1])
    return None


async def _unforeseen(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's contract; it logs the error itself
    return refusal(InternalError())


_HANDLERS: Final[dict[Any, ExceptionHandler]] = {
    HTTPException: _refused_by_http,
    Exception: _unforeseen,
}
