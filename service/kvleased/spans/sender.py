"""Own what is said of a collector that takes no spans: one line when that begins, and one when it takes them again.

OpenTelemetry sends, tries again, and logs several lines for each batch; the last of them is kept as the reason.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvleased.config.addresses import without_credentials
from kvleased.telemetry import logs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_SENDING: Final = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
_QUEUEING: Final = logging.getLogger("opentelemetry.sdk._shared_internal")
_QUEUE_FULL: Final = "Queue full"
"""How the line begins that OpenTelemetry writes of spans that come while too many wait to be sent."""


class SpanSender(SpanExporter):
    """An exporter over OTLP that logs seldom."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        """Take OpenTelemetry's own exporter, and the address that it sends spans to."""
        self._exporter = exporter
        self._url = without_credentials(url)
        self._reason = _Reason()
        self._num_lost = 0
        """Spans that were lost since some were last taken."""
        _SENDING.propagate = False
        _SENDING.addHandler(self._reason)
        _QUEUEING.addFilter(self._is_news)

    def __repr__(self) -> str:
        """Show life."""
        return f"<SpanSender {self._num_lost} lost>"

    def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
        """Send spans; if that fails they are lost, and the log tells when losses begin and end."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lose(len(spans))
        elif self._num_lost:
            logs.line("info", "spans_sent_again", endpoint=self._url, lost=self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        """Send nothing more."""
        self._exporter.shutdown()

    def _lose(self, num_spans: int) -> None:
        if not self._num_lost:
            logs.line(
                "warning",
                "spans_lost",
                endpoint=self._url,
                error=without_credentials(self._reason.last),
                advice="see that the collector at trace_endpoint answers; spans are lost until it takes them",
            )
        self._num_lost += num_spans

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Tell whether a line of the queue says more than that the collector takes nothing."""
        return not (self._num_lost and record.msg.startswith(_QUEUE_FULL))


class _Reason(logging.Handler):
    """Keeps the last of OpenTelemetry's lines, and writes none."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.last = record.getMessage()
