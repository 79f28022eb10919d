"""Own the routes under /ui: the static files, the packed picture of a pool, one block, and the live stream."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from kvlease.errors import InvalidError, KVLeaseError
from kvleased.access.roles import OF_PATH
from kvleased.api.rest import texts
from kvleased.api.rest.endpoints import Answer, admitted, refusal
from kvleased.api.rest.events import STREAM_HEADERS
from kvleased.api.seam import Backend
from kvleased.calls import checks
from kvleased.verbs.picturing import Gallery, PoolName
from kvleased.web.deltas import packed
from kvleased.web.live import Live, Viewers

FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "keeping.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "map.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "panels.js": "text/javascript; charset=utf-8",
    "colours.js": "text/javascript; charset=utf-8",
    "sums.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""The static files, and the content type of each."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load and do: only its own files, nothing inline or from other hosts, and not in a frame."""

_FOLDER: Final = Path(__file__).with_name("static")
_GUARDS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_NOT_MODIFIED: Final = 304
_INTEGER_DIGITS_MAX: Final = 15


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    etag: bytes


class _Asked(NamedTuple):
    """The parameters of a query."""

    cache: str
    tier: str
    block: int


class Page:
    """The page; nothing is read or computed before somebody asks for it."""

    def __init__(self, gallery: Gallery) -> None:
        """Remember where the pictures come from."""
        self._gallery = gallery
        self._viewers = Viewers(gallery)
        self._files: Mapping[str, _File] = {}
        self._daemon: Backend

    def add_to(self, app: Starlette, daemon: Backend) -> None:
        """Serve the page beside the API; like the probes, it is not part of the API's description."""
        self._daemon = daemon
        routes: tuple[tuple[str, Callable[[Request], Awaitable[Response]]], ...] = (
            ("/ui", self.file),
            ("/ui/", self.file),
            ("/ui/data/live", self.live),
            ("/ui/data/map", self.map),
            ("/ui/data/block", self.block),
            ("/ui/{name}", self.file),
        )
        for path, answers in routes:
            app.router.add_route(path, answers, methods=["GET"], include_in_schema=False)

    async def file(self, request: Request) -> Response:
        """Return a static file; files tell nothing about the daemon, so everybody who can connect may have them."""
        name = request.path_params.get("name", "index.html")
        kind = FILES.get(name)
        if kind is None:
            return refusal(InvalidError(f"/ui has no file {name[:40]!r}", resource="path"), 404)
        file = self._read()[name]
        headers = [
            *_GUARDS,
            (b"content-type", kind.encode()),
            (b"cache-control", b"no-cache"),
            (b"etag", file.etag),
        ]
        if request.headers.get("if-none-match", "").encode() == file.etag:
            return Answer(_NOT_MODIFIED, headers, b"")
        return _answer(headers, file.body)

    async def map(self, request: Request) -> Response:
        """Return the packed picture of a pool."""

        def answered() -> Response:
            asked = self._asked(request, ("cache", "tier"))
            name = PoolName(asked.cache, asked.tier)
            return _answer(
                _data(b"application/octet-stream"), packed(name, self._gallery.shown(name))
            )

        return _or_refusal(answered)

    async def block(self, request: Request) -> Response:
        """Describe one block."""

        def answered() -> Response:
            asked = self._asked(request, ("cache", "tier", "block"))
            sheet = self._gallery.block(PoolName(asked.cache, asked.tier), asked.block)
            return _answer(_data(b"application/json"), Live.written(sheet))

        return _or_refusal(answered)

    async def live(self, request: Request) -> Response:
        """Begin to stream figures and pictures."""

        def answered() -> Response:
            caller = admitted(self._daemon, OF_PATH[request.scope["path"]], request)
            asked = _read(request, ("cache",))
            check = partial(self._daemon.check_still, caller)
            return self._viewers.begin(request, asked.cache, [*_GUARDS, *STREAM_HEADERS], check)

        return _or_refusal(answered)

    def _asked(self, request: Request, names: tuple[str, ...]) -> _Asked:
        admitted(self._daemon, OF_PATH[request.scope["path"]], request)
        return _read(request, names)

    def _read(self) -> Mapping[str, _File]:
        if not self._files:
            bodies = {name: (_FOLDER / name).read_bytes() for name in FILES}
            self._files = {
                name: _File(body, b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode())
                for name, body in bodies.items()
            }
        return self._files


def _or_refusal(answered: Callable[[], Response]) -> Response:
    """Return the answer to a request, or the problem document that says why it is refused."""
    try:
        return answered()
    except KVLeaseError as error:
        return refusal(error)


def _read(request: Request, names: tuple[str, ...]) -> _Asked:
    """Read a query strictly.

    Raises:
        InvalidError: a parameter is unknown, given twice, or malformed.
    """
    asked = texts.query(request)
    checks.parameters([name for name, _ in asked], names)
    found = dict(asked)
    block = found.get("block", "0")
    if not (block.isascii() and block.isdecimal() and len(block) <= _INTEGER_DIGITS_MAX):
        raise InvalidError("block must be the number of a block", resource="block")
    return _Asked(found.get("cache", ""), found.get("tier", "device"), int(block))


def _data(kind: bytes) -> list[tuple[bytes, bytes]]:
    return [*_GUARDS, (b"content-type", kind), (b"cache-control", b"no-store")]


def _answer(headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
    return Answer(200, [*headers, (b"content-length", b"%d" % len(body))], body)
