"""Own the spans of calls and copies, if the settings ask for any; sending them is OpenTelemetry's business.

Spans name verbs, transports, caches and codes, and count blocks; they carry no token, key, request or tenant.
If REST or gRPC has made a span of a request, the spans of its calls are below it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Final, cast

from google.protobuf.message import Message

from kvlease.errors import InternalError, KVLeaseError
from kvleased.access.callers import Caller
from kvleased.calls.idempotency import Answer
from kvleased.core.commands import Command, CopyDone, CopyFailed, CopyLost, MoverDied
from kvleased.core.effects import Copy
from kvleased.movers.batches import Moved
from kvleased.spans.file import SpanFile
from kvleased.telemetry import logs
from kvleased.telemetry.wall_clock import unix_nanoseconds

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Span

SERVICE_NAME: Final = "kvleased"
_COPIES_MAX: Final = 4_096
"""Spans of copies under way at once; further copies get none."""
_BYTES_PER_ID: Final = 4
_OF_CALLERS: Final = ("opentelemetry.trace", "opentelemetry.baggage")
"""Loggers of OpenTelemetry's that warn of the headers of a request, each time, and repeat what these say."""
_STOP_SECONDS_MAX: Final = 2.0
"""Seconds for what is left at the end: well below those after which the supervisor kills who does not stop."""


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
        """The spans of copies under way, by pool and copy id."""

    def __repr__(self) -> str:
        """Show life: how many copies are under way."""
        return f"<Tracing {len(self._copies)} copies>"

    def start(self) -> None:
        """Set up the exporters.

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
        for name in _OF_CALLERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        resource = Resource.create({"service.name": SERVICE_NAME, "kvlease.epoch": self._epoch})
        self._provider = TracerProvider(resource=resource)
        for exporter in self._exporters():
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE_NAME)

    def stop(self) -> None:
        """End all spans, send them, and close the exporters; wait only moments for a collector that does not answer."""
        for span in self._copies.values():
            span.end(unix_nanoseconds())
        self._copies.clear()
        # OpenTelemetry would wait for such a collector for half a minute.
        sending = Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(_STOP_SECONDS_MAX)
        if sending.is_alive():
            logs.line(
                "warning",
                "spans_lost",
                error=f"not sent within {_STOP_SECONDS_MAX:g} seconds of the end",
                advice="see that the collector at trace_endpoint answers; the last spans may be missing there",
            )
        if self._out is not None:
            self._out.close()

    def _exporters(self) -> list[Any]:
        found: list[Any] = []
        if self._endpoint:
            try:
                import requests  # noqa: PLC0415 -- comes with the exporter
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                    OTLPSpanExporter,
                )

                from kvleased.spans.sender import SpanSender  # noqa: PLC0415
            except ImportError as error:
                raise MissingOtelError(MissingOtelError.__doc__) from error
            url = f"{self._endpoint.rstrip('/')}/v1/traces"
            session = requests.Session()
            # A redirected batch would be a question without spans, and its answer would pass for theirs.
            session.max_redirects = 0
            found.append(SpanSender(OTLPSpanExporter(endpoint=url, session=session), url))
        if self._file is not None:
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

            self._out = SpanFile(self._file)
            # The exporter only writes to it and flushes it. It is the first: its end waits for no collector.
            found.insert(0, ConsoleSpanExporter(out=cast("IO[str]", self._out), formatter=_line))
        return found

    # Requests, as the servers of REST and gRPC see them

    @property
    def provider(self) -> Any:
        """OpenTelemetry's TracerProvider, once started."""
        return self._provider

    @contextmanager
    def request(
        self, name: str, traceparent: str, attributes: Mapping[str, str]
    ) -> "Iterator[Span]":
        """Make the span of a request, below the span that its caller names; spans of calls within it are below it."""
        from opentelemetry.trace import SpanKind, use_span  # noqa: PLC0415 -- an extra

        span: Span = self._tracer.start_span(
            name,
            context=_context(traceparent),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=unix_nanoseconds(),
        )
        # The span tells an error by its code only: a message may name what no span may carry.
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        finally:
            span.end(unix_nanoseconds())

    # Calls

    def call(self, verb: str, transport: str, traceparent: str) -> "Span":
        """Begin the span of a call, below its request's span, or else below the span that its caller names.

        Copies that begin before `leave` belong to it.
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
            start_time=unix_nanoseconds(),
        )
        self._now = span
        return span

    def leave(self) -> None:
        """Say that copies from here on do not belong to the last call."""
        self._now = None

    # Copies

    def copy_began(self, pool: int, cache: str, copy: Copy) -> None:
        """Begin the span of a copy that a call has led to; it lasts from the sending to the mover until its answer."""
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
            start_time=unix_nanoseconds(),
        )

    def moved(self, batch: Moved) -> None:
        """Make the span of a batch of a copy; it ends now, and is as long as its mover has measured."""
        copy = self._copies.get((batch.pool, batch.copy_id))
        if copy is None:
            return
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 -- an extra

        now = unix_nanoseconds()
        span = self._tracer.start_span(
            f"kvlease.move {batch.direction}",
            context=set_span_in_context(copy),
            start_time=now - batch.nanoseconds,
            attributes={"kvlease.bytes": batch.num_bytes, "kvlease.is_done": batch.is_done},
        )
        span.end(now)

    def copy_ended(self, pool: int, command: Command) -> None:
        """End the span of a copy that the mover has answered, or of all copies of a pool whose mover died."""
        if isinstance(command, CopyDone | CopyFailed | CopyLost):
            span = self._copies.pop((pool, command.copy_id), None)
            if span is not None:
                outcome = type(command).__name__
                span.set_attribute("kvlease.outcome", _OUTCOMES[outcome])
                span.end(unix_nanoseconds())
        elif isinstance(command, MoverDied):
            self._end_all_of(pool, "mover died")

    def cache_ended(self, pool: int) -> None:
        """End the spans of all copies of a cache that was deleted: nobody hears of their ends any more."""
        self._end_all_of(pool, "cache deleted")

    def _end_all_of(self, pool: int, outcome: str) -> None:
        for name in [one for one in self._copies if one[0] == pool]:
            span = self._copies.pop(name)
            span.set_attribute("kvlease.outcome", outcome)
            span.end(unix_nanoseconds())


_OUTCOMES: Final = {"CopyDone": "done", "CopyFailed": "failed", "CopyLost": "lost"}


def finish(span: "Span", code: str) -> None:
    """End the span of a call, answered with this code."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 -- an extra

    span.set_attribute("kvlease.code", code)
    if code == "INTERNAL":
        span.set_status(Status(StatusCode.ERROR))
    span.end(unix_nanoseconds())


def _context(traceparent: str) -> Any:
    """Return the context that a caller names; a malformed one counts as none, as the standard says."""
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
"""Answers a call."""


def traced(tracing: Tracing, answer: Ask, settle: Callable[[], None]) -> Ask:
    """Return a function that answers calls as `answer` does, each in a span of its own, with its copies below it."""

    def within(verb: str, request: Message, caller: Caller) -> Answer:
        # Work that the last call left does not belong to this call.
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
    """Return the code with which a waiting call was answered."""
    if done.cancelled():
        return "CANCELLED"
    error = done.exception()
    if error is None:
        return "OK"
    return error.code if isinstance(error, KVLeaseError) else InternalError.code
