"""Own the form of the logs: JSON, one event a line, on standard error; never token ids, keys or tokens of workers.

The supervisor and the movers import little, and write lines with `line`. The control process uses structlog, whose
lines have the same fields.
"""

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final

from kvleased.telemetry import streams

_SEVERITY: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_threshold = 20


def set_level(level: str) -> None:
    """Write only events that are at least as severe as `level`."""
    global _threshold  # noqa: PLW0603 -- one process, one log
    _threshold = _SEVERITY[level]


def line(level: str, event: str, **fields: object) -> None:
    """Write one event as one line of JSON."""
    if _SEVERITY[level] < _threshold:
        return
    sys.stderr.write(_line(level, event, fields))
    sys.stderr.flush()


def hold_up_nobody() -> None:
    """Have a thread write the lines from now on: a reader that is too slow loses some, and is told how many."""
    streams.take_over(_lost)


def catch_all(role: str) -> None:
    """Log every uncaught exception of this process as one event, with its traceback in a field."""

    def log(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not issubclass(kind, (KeyboardInterrupt, SystemExit)):
            lines = traceback.format_exception(kind, error, trace)
            line("error", "unexpected_exception", role=role, error=str(error), trace="".join(lines))

    sys.excepthook = log
    threading.excepthook = lambda args: log(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: log(args.exc_type, args.exc_value, args.exc_traceback)


def import_structlog() -> None:
    """Import structlog without rich, which takes 0.15 s to import and only serves a console that nobody sees here."""
    absent = [name for name in ("rich", "rich.console") if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python marks what cannot be imported
    import structlog  # noqa: F401, PLC0415

    for name in absent:
        del sys.modules[name]


def configure(level: str) -> None:
    """Have structlog write the same lines; called once by the control process."""
    import structlog  # noqa: PLC0415 -- the other processes need not pay for it

    set_level(level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _headed,
            structlog.processors.ExceptionRenderer(
                # The local variables of a failed call may be keys and tokens.
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_threshold),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_Lines()], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)


def _line(level: str, event: str, fields: Mapping[str, object]) -> str:
    record = {"timestamp": _now(), "level": level, "event": event, "pid": os.getpid(), **fields}
    return json.dumps(record, default=str) + "\n"


def _lost(num_lines: int) -> str:
    return _line("warning", "log_lines_lost", {"num_lines": num_lines})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _headed(_logger: object, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Begin a line as `line` does: with timestamp, level, event and process id."""
    head = {"timestamp": _now(), "level": event.pop("level"), "event": event.pop("event")}
    return {**head, "pid": os.getpid(), **event}


class _Lines(logging.Handler):
    """Writes the log records of libraries in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its traceback but without the values of variables."""
        level = record.levelname.lower()
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else None
        fields = {"trace": trace} if trace else {}
        line(
            level if level in _SEVERITY else "error",
            record.getMessage(),
            logger=record.name,
            **fields,
        )
