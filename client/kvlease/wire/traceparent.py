"""Own the traceparent of the caller's span; OpenTelemetry, which knows it, is imported only on use."""

from collections.abc import Callable

from kvlease.errors import InvalidError

Traceparent = Callable[[], str]
"""Returns the W3C traceparent of the caller's span; empty if the caller is in no span."""


def otel() -> Traceparent:
    """Return a function that asks OpenTelemetry for the span of the calling thread or task.

    Raises:
        InvalidError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 -- an extra
            TraceContextTextMapPropagator,
        )
    except ImportError as error:
        message = "with_traces needs OpenTelemetry; install kvlease[otel]"
        raise InvalidError(message, resource="with_traces") from error
    inject = TraceContextTextMapPropagator().inject

    def traceparent() -> str:
        carrier: dict[str, str] = {}
        inject(carrier)
        return carrier.get("traceparent", "")

    return traceparent
