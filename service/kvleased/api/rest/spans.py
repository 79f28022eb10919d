"""Own FastAPI's spans of requests, if calls are traced; the app of `server` still answers the requests.

FastAPI writes the path, query and host of a request into its span. Here only the route of the table is let through,
without the caller's words. This module imports FastAPI, so it is imported only if calls are traced.
"""

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

from fastapi import FastAPI
from opentelemetry import trace
from starlette.types import ASGIApp

from kvleased.api.rest.routes import ROUTES
from kvleased.api.seam import Traces

ATTRIBUTES: Final = frozenset({"http.request.method", "network.protocol.version", "url.scheme"})
"""The attributes that FastAPI may write into a span when it begins; the others repeat the caller's words."""

_STREAMS: Final = tuple(
    re.compile(re.sub(r"{[a-z_]+}", "[^/]+", route.path)) for route in ROUTES if route.is_stream
)
"""The paths of streams, whose requests last as long as somebody watches."""


def in_spans(app: ASGIApp, traces: Traces) -> FastAPI:
    """Return a FastAPI app that answers as `app` does, each call in a span below the span that its caller names."""
    outer = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={
            "tracer_provider": _Provider(traces.provider),
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
            "exclude": _is_no_call,
        },
    )
    outer.router.default = app
    return outer


def _is_no_call(scope: MutableMapping[str, Any]) -> bool:
    """Tell whether a request is no call: a probe, a page, metrics, or a stream."""
    path = str(scope["path"])
    return not path.startswith("/v1/") or any(one.fullmatch(path) for one in _STREAMS)


class _Provider(trace.TracerProvider):
    """A provider that wraps another one, and keeps only the allowed attributes of spans."""

    def __init__(self, inner: trace.TracerProvider) -> None:
        self._inner = inner

    def get_tracer(self, *args: Any, **options: Any) -> trace.Tracer:
        return _Tracer(self._inner.get_tracer(*args, **options))


class _Tracer(trace.Tracer):
    """A tracer that wraps another one, and keeps only the allowed attributes of spans."""

    def __init__(self, inner: trace.Tracer) -> None:
        self._inner = inner

    def start_span(self, *args: Any, **options: Any) -> trace.Span:
        return self._inner.start_span(*args, **_discreet(options))

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # its decorator is OpenTelemetry's own
        self, *args: Any, **options: Any
    ) -> Iterator[trace.Span]:
        with self._inner.start_as_current_span(*args, **_discreet(options)) as span:
            yield span


def _discreet(options: dict[str, Any]) -> dict[str, Any]:
    written = options.get("attributes") or {}
    kept = {name: value for name, value in written.items() if name in ATTRIBUTES}
    return {**options, "attributes": kept}
