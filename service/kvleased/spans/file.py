"""Own the file that spans are appended to: if it fails, spans are lost, but neither calls nor the daemon fail."""

import errno
import os
from pathlib import Path
from typing import Final

from kvleased.telemetry import logs

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
"""Non-blocking, so that a pipe without a reader, or with a slow one, holds up nobody."""
_MODE: Final = 0o600
"""The mode of a new file; an existing one keeps its mode."""


class SpanFile:
    """The stream of text that OpenTelemetry writes spans to."""

    def __init__(self, path: Path) -> None:
        """Open the file; make it if it is missing.

        Raises:
            OSError: the file cannot be written.
        """
        self._path = path
        try:
            self._fd = os.open(path, _FLAGS, _MODE)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            reason = "it is a pipe that no process reads, or a socket"
            raise OSError(errno.ENXIO, reason, str(path)) from error
        self._pending = bytearray()
        self._is_torn = False
        """Whether the last written line lacks its end."""
        self._num_lost = 0
        """Lines that were lost since a line was last written."""

    def __repr__(self) -> str:
        """Show the path."""
        return f"<SpanFile {self._path}>"

    def write(self, text: str) -> int:
        """Take a line, with its end; the next flush writes it."""
        self._pending += text.encode()
        return len(text)

    def flush(self) -> None:
        """Write the lines that were taken; if that fails they are lost, and the log tells when losses begin and end."""
        lines, self._pending = bytes(self._pending), bytearray()
        if not lines:
            return
        try:
            self._write(lines)
        except OSError as error:
            self._lose(lines.count(b"\n"), error)
            return
        if self._num_lost:
            logs.line("info", "spans_written_again", file=str(self._path), lost=self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.flush()
        os.close(self._fd)

    def _write(self, lines: bytes) -> None:
        # A line that followed a torn one directly would be lost with it.
        rest = memoryview(b"\n" + lines if self._is_torn else lines)
        while rest:
            done = os.write(self._fd, rest)
            self._is_torn = rest[done - 1] != ord("\n")
            rest = rest[done:]

    def _lose(self, num_lines: int, error: OSError) -> None:
        if not self._num_lost:
            logs.line(
                "warning",
                "spans_lost",
                file=str(self._path),
                error=error.strerror,
                advice="free space for trace_file, or name another file; spans are lost until it can be written",
            )
        self._num_lost += num_lines
