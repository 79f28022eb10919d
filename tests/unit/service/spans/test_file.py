"""A file of spans that fails: lost spans are logged, and nobody waits for the file or ends because of it."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from kvleased.spans.file import SpanFile
from kvleased.spans.tracing import Tracing

pytest.importorskip("opentelemetry.sdk")


def events(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int]]:
    """Return the events logged since the last look, with the number of lost spans that each tells."""
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [(line["event"], line.get("lost", 0)) for line in lines]


def test_full_disk_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk is logged once, without a traceback, and the daemon's end is no error."""
    out = SpanFile(Path("/dev/full"))
    for _ in range(3):
        out.write("{}\n")
        out.flush()
    out.close()

    assert events(capsys) == [("spans_lost", 0)]


def test_tracing_over_a_full_disk_stops(capsys: pytest.CaptureFixture[str]) -> None:
    """Tracing over a full disk stops without an error, so that the daemon can end and let go of its stores."""
    spans = Tracing(endpoint="", file=Path("/dev/full"), epoch=1)
    spans.start()
    spans.call("stats", "rest", "").end()
    spans.stop()

    assert events(capsys) == [("spans_lost", 0)]


def test_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe without a reader is refused at once: opening it for writing would wait without a word."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe that no process reads"):
        SpanFile(tmp_path / "pipe")


def test_pipe_that_is_read_again_gets_whole_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow reader loses spans, and the rest of a line that was cut is not joined to the next line."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    out = SpanFile(tmp_path / "pipe")
    num_bytes = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    out.write("x" * 2 * num_bytes + "\n")
    out.flush()
    got = os.read(reader, num_bytes)
    out.write("{}\n")
    out.close()

    assert got + os.read(reader, num_bytes) == b"x" * num_bytes + b"\n{}\n"
    assert events(capsys) == [("spans_lost", 0), ("spans_written_again", 1)]
    os.close(reader)
