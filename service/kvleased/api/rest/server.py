"""Own the REST server: the app over the route table, on a Unix socket and on loopback TCP.

FastAPI only makes the documents that describe the API, and the spans of requests if calls are traced. So a restarted
daemon is ready before FastAPI is imported, and neither calls nor refusals pay for FastAPI's routing.
"""

import asyncio
import gc
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from kvlease.errors import InternalError, InvalidError
from kvleased.api.places import Places
from kvleased.api.rest.endpoints import Endpoint, refusal
from kvleased.api.rest.events import EventsEndpoint, Streams
from kvleased.api.rest.health import Probes
from kvleased.api.rest.http_server import HttpLimits, HttpServer
from kvleased.api.rest.routes import ROUTES, Route
from kvleased.api.rest.table import Answers, TableApp
from kvleased.api.rest.uninvited import Uninvited
from kvleased.api.rest.whole import in_pieces
from kvleased.api.seam import Backend, Beside, Limits, Observer
from kvleased.api.sockets import is_loopback, listen_tcp, listen_unix, remove_unix
from kvleased.api.turns import Line, OneATurn
from kvleased.calls import checks
from kvleased.credentials.tls import TlsFiles, tls_files

DOCUMENTS: Final = frozenset({"/openapi.json", "/docs"})
"""The paths of the documents that describe the API."""

_CACHES: Final = "/v1/caches/"
_SPANS: Final = "kvleased.api.rest.spans"
"""A module that imports FastAPI, and so is only imported if calls are traced."""
_LISTS: Final = tuple(what for route in ROUTES for name, what in route.settled if name == "what")


class RestServer:
    """REST, from `start` to `stop`."""

    def __init__(self, metrics: Observer, page: Beside | None = None) -> None:
        """Take the object that counts calls, and what is served beside the API."""
        self._metrics = metrics
        self._page = page
        self._servers: list[HttpServer] = []
        self._remove: Callable[[], None] = lambda: None
        self._streams: Streams = set()
        self.app: Starlette
        """The app that is served, once started."""
        self._probes: Probes
        self.http_port = 0
        """The TCP port; 0 if there is none."""

    @property
    def places(self) -> dict[str, Places]:
        """The places by listener: that of the Unix socket, and that of TCP if there is one."""
        names = ("rest_unix", "rest_tcp")
        return {name: server.places for name, server in zip(names, self._servers, strict=False)}

    @property
    def probes(self) -> Probes:
        """The probes, once started; another server may answer them, too."""
        return self._probes

    async def start(self, daemon: Backend, settings: Limits) -> None:
        """Begin to listen at `http.sock` in the runtime directory and, if the settings ask for it, on TCP."""
        local = listen_unix(settings.runtime_dir / "http.sock")
        self._remove = lambda: remove_unix(local)
        line = Line()
        app = self.app = make_app(
            daemon, self._metrics, message_bytes_max=settings.max_message_bytes, line=line
        )
        if self._page is not None:
            self._page.add_to(app, daemon)
        self._streams = app.state.streams
        self._probes = app.state.probes
        served: ASGIApp = app
        if daemon.tracing is not None:
            spans = await asyncio.to_thread(importlib.import_module, _SPANS)
            served = spans.in_spans(app, daemon.tracing)
        limits = HttpLimits(
            connections_max=settings.max_connections,
            head_seconds_max=settings.head_seconds_max,
            body_seconds_max=settings.body_seconds_max,
            idle_seconds_max=settings.idle_seconds_max,
        )
        headers = [("KVLease-Epoch", str(daemon.epoch))]
        paced = OneATurn(Uninvited(served), line)
        # Strangers on TCP cannot use up the connections of the Unix socket.
        self._servers = [
            HttpServer(paced, local, limits, headers=headers, knows=daemon.knows, line=line)
        ]
        if settings.listen_tcp:
            tcp = listen_tcp(settings.tcp_host, settings.http_port)
            self.http_port = tcp.getsockname()[1]
            files = tls_files(settings)
            self._servers.append(
                HttpServer(
                    paced,
                    tcp,
                    replace(limits, takes_any_host=not is_loopback(settings.tcp_host)),
                    tls=None if files is None else files.context(),
                    headers=headers,
                    knows=daemon.knows,
                    line=line,
                )
            )
        for server in self._servers:
            await server.start()

    def renew(self, files: TlsFiles) -> None:
        """Take the certificate that the files have now, for future connections.

        Raises:
            UnusableError: the certificate cannot be used; the old one stays.
        """
        context = files.context()
        for server in self._servers[1:]:
            server.renew(context)

    def note_start(self) -> None:
        """Take note that the daemon serves."""
        self._probes.note_start()

    async def stop(self) -> None:
        """Stop listening, and let requests in progress finish for a moment."""
        servers, self._servers = self._servers, []
        if not servers:
            return
        for gone in tuple(self._streams):
            gone.cancel()
        self._remove()
        await asyncio.gather(*(server.stop() for server in servers))


def make_app(
    daemon: Backend, metrics: Observer, *, message_bytes_max: int, line: Line
) -> Starlette:
    """Return the app: the routes of the table, the probes, and the documents, whose readers wait in the line."""
    app = TableApp(_HANDLERS)
    app.state.streams = set()
    for route in ROUTES:
        kind = EventsEndpoint if route.is_stream else Endpoint
        answer = kind(route, daemon, metrics, message_bytes_max=message_bytes_max).answer
        app.table.add(route, answer if daemon.tracing is None else _named(route, answer))
    app.state.probes = Probes(daemon, metrics)
    app.state.probes.add_to(app, is_for_all=False)
    app.router.default = _Documents(line)
    return app


def _named(route: Route, answer: Answers) -> Answers:
    """Return a function that answers as `answer` does, and names the current span after the route."""
    from opentelemetry.trace import get_current_span  # noqa: PLC0415 -- an extra

    async def within(request: Request) -> Response:
        span = get_current_span()
        span.update_name(f"{route.method} {route.path}")
        span.set_attribute("http.route", route.path)
        return await answer(request)

    return within


class _Documents:
    """The documents that describe the API; FastAPI, which makes them, is imported when somebody asks for one.

    In most lives of the daemon nobody does, and the import would take a quarter of the processor time of a start.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._made: asyncio.Future[Mapping[str, BaseRoute]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in DOCUMENTS:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        made = self.made()
        if not made.done():
            await asyncio.wait([made])
            # All waiting requests are woken at once, and each is sent hundreds of kilobytes.
            await self._line.breathe()
        documents = made.result()
        await documents[scope["path"]].handle(scope, receive, in_pieces(send, self._line))

    def made(self) -> "asyncio.Future[Mapping[str, BaseRoute]]":
        """Return a future of the documents' routes: the import takes half a second, in which calls go on."""
        if self._made is None:
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return self._made

    @staticmethod
    def _make() -> Mapping[str, BaseRoute]:
        # These objects stay until the end, and the collector would hold up the loop for 50 ms to look at all of them.
        gc.disable()
        try:
            module = importlib.import_module("kvleased.api.rest.app")
            found: Mapping[str, BaseRoute] = module.documents()
            gc.freeze()
        finally:
            gc.enable()
        return found


async def _refused_by_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    path = request.scope["path"]
    detail = f"{request.method} {path[:200]}: {HTTPStatus(error.status_code).phrase}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail += "; /docs lists all paths, and /ui is the web page"
    elif taken := (error.headers or {}).get("Allow"):
        detail += f"; use {taken}"
    wrong = _wrong_argument(request.method, path)
    answer = refusal(wrong or InvalidError(detail, resource="path"), error.status_code)
    for name, value in (error.headers or {}).items():
        answer.raw_headers.append((name.lower().encode(), value.encode()))
    return answer


def _wrong_argument(method: str, path: str) -> InvalidError | None:
    """Return the error for a path that is only wrong in its argument: it is empty, or not the name of a list."""
    for route in ROUTES:
        prefix, _, rest = route.path.partition("{")
        name, _, suffix = rest.partition("}")
        if route.method == method and name and path == prefix + suffix:
            return InvalidError(f"{name} is empty; give its value in the path", resource=name)
    cache, _, what = path.removeprefix(_CACHES).partition("/")
    if method == "GET" and path.startswith(_CACHES) and cache and what:
        try:
            checks.one_of("what", what, _LISTS)
        except InvalidError as error:
            return error
    return None


async def _unforeseen(request: Request, error: Exception) -> Response:  # noqa: ARG001 - Starlette's contract; it logs the error itself
    return refusal(InternalError())


_HANDLERS: Final[dict[Any, ExceptionHandler]] = {
    HTTPException: _refused_by_http,
    Exception: _unforeseen,
}
