"""Own the way from a request's method and path to the function that answers it; the routes are in `routes`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from kvleased.api.rest import texts
from kvleased.api.rest.routes import Route

Answers = Callable[[Request], Awaitable[Response]]
"""Answers the requests of one route."""

_PARTS_MAX: Final = 16
"""Most parts of a path that are looked at; no route has as many."""


class Table(BaseRoute):
    """The routes as a tree of path parts: trying one pattern after the other would take longer than answering."""

    def __init__(self) -> None:
        """Start with no routes."""
        self._root = _Place()

    def __repr__(self) -> str:
        """Show the first parts of the paths."""
        return f"<Table of /{', /'.join(self._root.below)}>"

    def add(self, route: Route, answers: Answers) -> None:
        """Add a route, and the function that answers it."""
        place = self._root
        for part in route.path.split("/")[1:]:
            if part.startswith("{"):
                place.below_any = place.below_any or _Place()
                place = place.below_any
            else:
                place = place.below.setdefault(part, _Place())
        place.answering[route.method] = route.in_path, _straight(answers)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Find the route of a path and exactly this method: a HEAD served as a GET would carry out a verb in vain."""
        place, named = self._root, []
        for part in _parts(scope):
            below = place.below.get(part)
            if below is None:
                if not part or place.below_any is None:
                    return Match.NONE, {}
                below = place.below_any
                named.append(part)
            place = below
        if scope["method"] in place.answering:
            names, answering = place.answering[scope["method"]]
            params = dict(zip(names, named, strict=True))
            return Match.FULL, {"path_params": params, "answering": answering}
        if place.answering:
            return Match.PARTIAL, {"answering": place.refuse}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the function that `matches` found."""
        await scope["answering"](scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: Any) -> NoReturn:
        """Raise NoMatchFound: nobody asks for paths by name."""
        raise NoMatchFound(name, path_params)


class TableApp(Starlette):
    """An app that answers its table's routes without Starlette's routing, which takes a fifth of a refusal's time.

    A request that no route of the table answers takes Starlette's way.
    """

    def __init__(self, handlers: dict[Any, ExceptionHandler]) -> None:
        """Take the handlers of errors; the one for `Exception` answers unforeseen errors."""
        super().__init__(exception_handlers=handlers)
        self.router.redirect_slashes = False
        self.table = Table()
        self.routes.append(self.table)
        self._straight = ServerErrorMiddleware(self.table.handle, handlers[Exception])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        match, found = self.table.matches(scope)
        if match is Match.FULL:
            scope.update(found, app=self)
            await self._straight(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _straight(answers: Answers) -> ASGIApp:
    """Return an app that sends the answer to a request."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        response = await answers(Request(scope, receive, send))
        await response(scope, receive, send)

    return answered


def _parts(scope: Scope) -> list[str]:
    """Return the decoded parts of a path; a slash that is written as %2F belongs to its part."""
    written: bytes = scope.get("raw_path") or b""
    if b"%" not in written:
        return str(scope["path"]).split("/", _PARTS_MAX)[1:]
    return [texts.part(one) for one in written.split(b"/", _PARTS_MAX)[1:]]


@dataclass(slots=True)
class _Place:
    """A place in the tree of paths."""

    below: "dict[str, _Place]" = field(default_factory=dict)
    below_any: "_Place | None" = None
    """The place below for a parameter, whose part may be anything."""
    answering: dict[str, tuple[tuple[str, ...], ASGIApp]] = field(default_factory=dict)
    """By method: the names of the path's parameters, and the app that answers."""

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> NoReturn:  # noqa: ARG002 - ASGI
        """Refuse a method that no route of this path takes."""
        allowed = {"Allow": ", ".join(sorted(self.answering))}
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers=allowed)
