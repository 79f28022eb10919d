"""Own the spans of calls and copies, where the settings want any; sending them is OpenTelemetry's business.

Spans name verbs, transports, caches and codes, and count blocks; they carry no token, key, request or tenant.
Where REST or gRPC has a span of a request already, those of the calls are below it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from google.protobuf.message import Message

from kvlease.errors import InternalError, KVLeaseError
from kvleased.access.callers import Caller
from kvleased.core.commands import Command, CopyDone, CopyFailed, CopyLost, MoverDied
from kvleased.core.effects import Copy
from kvleased.idempotency import Answer
from kvleased.movers.batches import Moved
from kvleased.telemetry.span_file import SpanFile

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span

SERVICE_NAME: Final = "kvleased"
_COPIES_MAX: Final = 4_096
"""Spans of copies that are under way at once; those of further ones are left out."""
_BYTES_PER_ID: Final = 4


class MissingOtelError(Exception):
    """Traces are wanted, and OpenTelemetry is not installed; install kvlease[otel]."""


class Tracing:
    """The spans of one life of the daemon."""

    def __init__(self, *, endpoint: str, file: Path | None, epoch: int) -> None:
        """Remember where spans go: to an OTLP endpoint, into a file, or both."""
        self._endpoint = endpoint
        self._file = file
        self._epoch = epoch
        self._out: SpanFile | None = None
        self._provider: Any = None
        self._tracer: Any = None
        self._now: Span | None = None
        """The span of the call that is being answered."""
        self._copies: dict[tuple[int, int], Span] = {}
        """By pool and copy: the spans of copies under way."""

    def __repr__(self) -> str:
        """Show life: how many copies are under way."""
        return f"<Tracing {len(self._copies)} copies>"

    def start(self) -> None:
        """Open the way out.

        Raises:
            MissingOtelError: OpenTelemetry is not installed.
            OSError: the file cannot be written.
        """
        try:
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 -- an extra
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise MissingOtelError(MissingOtelError.__doc__) from error
        resource = Resource.create({"service.name": SERVICE_NAME, "kvlease.epoch": self._epoch})
        self._provider = TracerProvider(resource=resource)
        for exporter in self._exporters():
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE_NAME)

    def stop(self) -> None:
        """Send what there is, and close the way out."""
        for span in self._copies.values():
            span.end()
        self._copies.clear()
        self._provider.shutdown()
        if self._out is not None:
            self._out.close()

    def _exporters(self) -> list[Any]:
        found: list[Any] = []
        if self._endpoint:
            try:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                    OTLPSpanExporter,
                )
            except ImportError as error:
                raise MissingOtelError(MissingOtelError.__doc__) from error
            found.append(OTLPSpanExporter(endpoint=f"{self._endpoint.rstrip('/')}/v1/traces"))
        if self._file is not None:
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

            self._out = SpanFile(self._file)
            # It is written to and flushed, no more.
            found.append(ConsoleSpanExporter(out=cast("IO[str]", self._out), formatter=_line))
        return found

    # Requests, as the servers of REST and gRPC see them

    @property
    def provider(self) -> Any:
        """What makes spans, once started: OpenTelemetry's TracerProvider."""
        return self._provider

    @contextmanager
    def request(
        self, name: str, traceparent: str, attributes: Mapping[str, str]
    ) -> "Iterator[Span]":
        """Make the span of a request, below the one that its caller names; calls within it are below it."""
        from opentelemetry.trace import SpanKind, use_span  # noqa: PLC0415 -- an extra

        span: Span = self._tracer.start_span(
            name, context=_context(traceparent), kind=SpanKind.SERVER, attributes=attributes
        )
        # What goes wrong is told by its code: a message may name what no span shall.
        with use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            yield span

    # Calls

    def call(self, verb: str, transport: str, traceparent: str) -> "Span":
        """Begin the span of a call, below its request's or the one that its caller names, where there is none.

        What follows belongs to it until `leave`.
        """
        from opentelemetry.trace import (  # noqa: PLC0415 -- an extra
            SpanKind,
            get_current_span,
            set_span_in_context,
        )

        request = get_current_span()
        is_below = request.get_span_context().is_valid
        span: Span = self._tracer.start_span(
            f"kvlease.{verb}",
            context=set_span_in_context(request) if is_below else _context(traceparent),
            kind=SpanKind.INTERNAL if is_below else SpanKind.SERVER,
            attributes={"kvlease.verb": verb, "kvlease.transport": transport},
        )
        self._now = span
        return span

    def leave(self) -> None:
        """Say that nothing that follows belongs to the last call."""
        self._now = None

    # Copies

    def copy_began(self, pool: int, cache: str, copy: Copy) -> None:
        """Begin the span of a copy that a call has led to, from its way to the mover until it has answered."""
        if self._now is None or len(self._copies) >= _COPIES_MAX:
            return
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415 -- an extra

        num_blocks = max(len(copy.source_ids), len(copy.target_ids)) // _BYTES_PER_ID
        self._copies[pool, copy.copy_id] = self._tracer.start_span(
            f"kvlease.copy {copy.direction.value}",
            context=set_span_in_context(self._now),
            kind=SpanKind.CLIENT,
            attributes={
                "kvlease.cache": cache,
                "kvlease.direction": copy.direction.value,
                "kvlease.blocks": num_blocks,
            },
        )

    def moved(self, batch: Moved) -> None:
        """Make the span of a batch of a copy, of as many nanoseconds until now as its mover has measured."""
        copy = self._copies.get((batch.pool, batch.copy_id))
        if copy is None:
            return
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 -- an extra

        now = time.time_ns()
        span = self._tracer.start_span(
            f"kvlease.move {batch.direction}",
            context=set_span_in_context(copy),
            start_time=now - batch.nanoseconds,
            attributes={"kvlease.bytes": batch.num_bytes, "kvlease.is_done": batch.is_done},
        )
        span.end(now)

    def copy_ended(self, pool: int, command: Command) -> None:
        """End the span of a copy of which the mover has spoken, or of all of a pool whose mover died."""
        if isinstance(command, CopyDone | CopyFailed | CopyLost):
            span = self._copies.pop((pool, command.copy_id), None)
            if span is not None:
                outcome = type(command).__name__
                span.set_attribute("kvlease.outcome", _OUTCOMES[outcome])
                span.end()
        elif isinstance(command, MoverDied):
            for name in [one for one in self._copies if one[0] == pool]:
                span = self._copies.pop(name)
                span.set_attribute("kvlease.outcome", "mover died")
                span.end()


_OUTCOMES: Final = {"CopyDone": "done", "CopyFailed": "failed", "CopyLost": "lost"}


def finish(span: "Span", code: str) -> None:
    """End the span of a call that was answered under a code."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 -- an extra

    span.set_attribute("kvlease.code", code)
    if code == "INTERNAL":
        span.set_status(Status(StatusCode.ERROR))
    span.end(time.time_ns())


def _context(traceparent: str) -> Any:
    """Return the context that a caller names; what is malformed names none, as the standard wants it."""
    from opentelemetry.context import Context  # noqa: PLC0415 -- an extra
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _line(span: "ReadableSpan") -> str:
    text: str = span.to_json(indent=None)
    return f"{text}\n"


Ask = Callable[[str, Message, Caller], Answer]
"""What answers a call."""


def traced(tracing: Tracing, answer: Ask, settle: Callable[[], None]) -> Ask:
    """Return what answers calls as `answer` does, each in a span of its own, below which its copies are."""

    def within(verb: str, request: Message, caller: Caller) -> Answer:
        # What the last call left to be done is not this one's.
        settle()
        span = tracing.call(verb, caller.transport, caller.traceparent)
        try:
            found = answer(verb, request, caller)
            settle()
        except KVLeaseError as error:
            finish(span, error.code)
            raise
        finally:
            tracing.leave()
        if isinstance(found, asyncio.Future):
            found.add_done_callback(lambda done: finish(span, _code_of(done)))
        else:
            finish(span, "OK")
        return found

    return within


def _code_of(done: "asyncio.Future[Message]") -> str:
    """Return the code under which a call that had to wait was answered."""
    if done.cancelled():
        return "CANCELLED"
    error = done.exception()
    if error is None:
        return "OK"
    return error.code if isinstance(error, KVLeaseError) else InternalError.code
