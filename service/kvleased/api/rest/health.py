"""Own the probes /livez, /readyz and /startupz and the page /metrics; none of them is part of the API's description."""

import sys
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvlease.errors import KVLeaseError
from kvleased.access.roles import OF_PATH
from kvleased.api.rest.endpoints import admitted, refusal
from kvleased.api.seam import Backend, Observer

HEAVY_MODULES: Final = ("torch", "cuda.bindings", "transformers")
"""Modules that the control process must never import; `/livez?verbose` tells whether it has.

`cuda.bindings` is named, not `cuda`: where it is installed, every interpreter imports that empty package.
"""
TEXT_FORMAT: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the metrics."""


class Probes:
    """The probes; once the daemon was ready, the startup is over for good."""

    def __init__(self, daemon: Backend, metrics: Observer) -> None:
        """Take the daemon and the metrics."""
        self._daemon = daemon
        self._metrics = metrics
        self._was_ready = False

    def note_start(self) -> None:
        """Take note that the daemon serves now, so that a drain before the first probe does not look like a start."""
        self._was_ready = True

    def add_to(self, app: Starlette, *, is_for_all: bool) -> None:
        """Serve the probes, beside the API, or alone and to everybody who reaches the address."""
        for path, probe in (
            ("/livez", self.live),
            ("/readyz", self.ready),
            ("/startupz", self.startup),
            ("/metrics", self.metrics if is_for_all else self.metrics_for_some),
        ):
            app.router.add_route(path, probe, methods=["GET"], include_in_schema=False)

    async def live(self, request: Request) -> Response:
        """Answer, which proves that the event loop turns."""
        heavy = [name for name in HEAVY_MODULES if name in sys.modules]
        loaded = ", ".join(heavy) or "none"
        reason = f"epoch {self._daemon.epoch}; modules that no control process should have loaded: {loaded}"
        return _told(request, "live", is_good=True, reason=reason)

    async def ready(self, request: Request) -> Response:
        """Tell whether calls can be granted."""
        is_ready, reason = self._daemon.readiness
        return _told(request, "ready", is_good=is_ready, reason=reason)

    async def startup(self, request: Request) -> Response:
        """Tell whether the daemon was ready once."""
        is_ready, reason = self._daemon.readiness
        self._was_ready = self._was_ready or is_ready
        return _told(request, "started", is_good=self._was_ready, reason=reason)

    async def metrics_for_some(self, request: Request) -> Response:
        """Return the metrics to callers that may read them."""
        try:
            admitted(self._daemon, OF_PATH["/metrics"], request)
        except KVLeaseError as error:
            return refusal(error)
        return await self.metrics(request)

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002 - a route's signature
        """Return the metrics."""
        return Response(await self._metrics.scrape(), media_type=TEXT_FORMAT)


def _told(request: Request, word: str, *, is_good: bool, reason: str) -> Response:
    text = word if is_good else f"not {word}: {reason}"
    if "verbose" in request.query_params and is_good:
        text += f"\n{reason}"
    headers = {"cache-control": "no-store"}
    return PlainTextResponse(text.rstrip() + "\n", 200 if is_good else 503, headers)
