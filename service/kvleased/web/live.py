"""Own the live stream: its viewers, and what each is sent how often."""

import asyncio
import json
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvlease.errors import BusyError, KVLeaseError, UnknownCacheError
from kvleased.api.rest.endpoints import Answer, until_gone
from kvleased.api.rest.events import Streams, problem_event
from kvleased.verbs.picturing import Gallery, PoolName, Shown
from kvleased.web.deltas import change

PERIOD_SECONDS: Final = 1.0
"""Seconds between two updates."""
VIEWERS_MAX: Final = 16
"""Most streams at once."""


class Viewers:
    """The viewers of all pages."""

    def __init__(self, gallery: Gallery) -> None:
        """Remember where the pictures come from."""
        self.gallery = gallery
        self.num_viewers = 0

    def __repr__(self) -> str:
        """Show life."""
        return f"<Viewers {self.num_viewers} of {VIEWERS_MAX}>"

    def begin(
        self,
        request: Request,
        cache: str,
        headers: list[tuple[bytes, bytes]],
        check: Callable[[], None],
    ) -> "Live":
        """Return a stream of one cache, or of all, which `check` ends as soon as it refuses to go on.

        Raises:
            UnknownCacheError: there is no such cache.
            BusyError: there are as many viewers as are allowed.
        """
        if self.num_viewers >= VIEWERS_MAX:
            message = (
                f"{self.num_viewers} viewers are watching already, the most allowed; close a page"
            )
            raise BusyError(message, resource="viewers", need=1, available=0, limit=VIEWERS_MAX)
        self.gallery.pools(cache)
        return Live(request, self, cache, headers, check)


class Live(Answer):
    """A response that goes on until the viewer leaves, may not look any more, or the daemon stops."""

    def __init__(
        self,
        request: Request,
        viewers: Viewers,
        cache: str,
        headers: list[tuple[bytes, bytes]],
        check: Callable[[], None],
    ) -> None:
        """Remember the viewer and the cache that it looks at."""
        super().__init__(200, headers, b"")
        self._request = request
        self._viewers = viewers
        self._cache = cache
        self._check = check
        self._seen: dict[PoolName, Shown] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send figures and changes until the viewer leaves or the daemon stops."""
        # Counted before anything is waited for: the next viewer may come while the first bytes are written.
        self._viewers.num_viewers += 1
        gone = asyncio.ensure_future(until_gone(self._request))
        streams: Streams = self._request.app.state.streams
        streams.add(gone)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.done():
                self._check()
                await self._look(send)
                await asyncio.wait({gone}, timeout=PERIOD_SECONDS)
        except KVLeaseError as error:
            await send(_part(problem_event(error)))
        finally:
            self._viewers.num_viewers -= 1
            streams.discard(gone)
            gone.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _look(self, send: Send) -> None:
        """Send the figures and what has changed, one pool after the other, so that calls are answered in between."""
        gallery = self._viewers.gallery
        await send(_event(b"figures", gallery.sheet()))
        try:
            pools = gallery.pools(self._cache)
        except UnknownCacheError:
            # The cache was deleted; the figures tell that.
            return
        self._seen = {name: self._seen[name] for name in pools if name in self._seen}
        for name in pools:
            await asyncio.sleep(0)
            try:
                shown = gallery.shown(name)
            except UnknownCacheError:
                continue
            changed = change(name, shown, self._seen.get(name))
            self._seen[name] = shown
            if changed is not None:
                await send(_event(b"map", changed))

    @staticmethod
    def written(sheet: object) -> bytes:
        """Return a sheet as JSON."""
        return json.dumps(sheet, separators=(",", ":"), allow_nan=False).encode()


def _event(kind: bytes, sheet: object) -> dict[str, object]:
    return _part(b"event: %b\ndata: %b\n\n" % (kind, Live.written(sheet)))


def _part(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}
