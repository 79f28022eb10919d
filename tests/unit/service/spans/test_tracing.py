"""Spans of calls and copies: their parents, their ends, and their limit."""

import asyncio
import json
import logging
import socket
import sys
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging.handlers import MemoryHandler
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from google.protobuf.message import Message

from kvlease.errors import PoolFullError
from kvlease.ids import CopyId
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Direction
from kvleased.movers.batches import Moved
from kvleased.spans import tracing
from kvleased.spans.tracing import MissingOtelError, Tracing, traced
from kvleased.supervision.supervisor import STOP_GRACE_SECONDS
from kvleased.telemetry import logs

pytest.importorskip("opentelemetry.sdk")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(BaseHTTPRequestHandler):
    """A collector that answers with a status."""

    status = 200

    def do_POST(self) -> None:
        """Take a batch, and answer."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """Answer who followed a redirect."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def spans(tmp_path: Path) -> Tracing:
    """Tracing into a file of the test."""
    found = Tracing(endpoint="", file=tmp_path / "spans", epoch=5)
    found.start()
    return found


def written(spans: Tracing) -> list[dict[str, Any]]:
    """Return all spans, in the order of their ends."""
    spans.stop()
    assert spans._file is not None
    return [json.loads(line) for line in spans._file.read_text().splitlines()]


def _microseconds(written_time: str) -> int:
    """Return a span's time in microseconds; it passes through a float, so one more or less is equal."""
    return round(datetime.fromisoformat(written_time).timestamp() * 1e6)


def test_file_of_spans_is_this_users_alone(spans: Tracing) -> None:
    """The file is private, whatever the umask; a file that an operator has made keeps its mode."""
    assert spans._file is not None
    assert spans._file.stat().st_mode & 0o777 == 0o600

    spans._file.chmod(0o640)
    again = Tracing(endpoint="", file=spans._file, epoch=6)
    again.start()
    again.stop()

    assert spans._file.stat().st_mode & 0o777 == 0o640


def test_collector_that_does_not_answer_holds_up_no_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spans that a silent collector does not take are lost, and said to be; those for the file are written."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        spans = Tracing(endpoint=endpoint, file=tmp_path / "spans", epoch=5)
        spans.start()
        spans.call("reserve", "local", PARENT).end()
        began = time.monotonic()

        found = written(spans)

        assert time.monotonic() - began < STOP_GRACE_SECONDS - 1
    assert [one["name"] for one in found] == ["kvlease.reserve"]
    assert "spans_lost" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1:9", "127.0.0.1:99999"])
def test_password_of_a_collector_is_not_logged(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """What the log says of a collector has neither its user nor its password."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(logs, "line", lambda *_, **fields: lines.append(fields))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    spans = Tracing(endpoint=f"http://somebody:secret@{host}", file=None, epoch=5)
    spans.start()

    spans.call("reserve", "local", PARENT).end()
    spans.provider.force_flush()
    spans.stop()

    assert lines
    assert lines[0]["endpoint"] == f"http://***@{host}/v1/traces"
    assert "secret" not in str(lines)


def test_collector_that_is_down_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many batches are lost, the log has one line when losses begin, with the reason, and one at their end."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    lines: list[dict[str, Any]] = []

    def write(level: str, event: str, **fields: object) -> None:
        lines.append({"level": level, "event": event, **fields})

    monkeypatch.setattr(logs, "line", write)
    others = MemoryHandler(100)
    monkeypatch.setattr(logging.getLogger(), "handlers", [others])
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        spans = Tracing(endpoint=f"http://127.0.0.1:{collector.server_port}", file=None, epoch=5)
        spans.start()
        for Collector.status in (400, 401, 302, 200, 200):
            spans.call("reserve", "local", PARENT).end()
            spans.provider.force_flush()
        spans.stop()
        collector.shutdown()

    assert [(line["event"], line.get("lost")) for line in lines] == [
        ("spans_lost", None),
        ("spans_sent_again", 3),
    ]
    assert "400" in lines[0]["error"]
    assert [one.getMessage() for one in others.buffer] == []


def a_copy(number: int) -> Copy:
    """Return a copy of two blocks."""
    return Copy(
        copy_id=CopyId(number),
        direction=Direction.RELOAD,
        source_ids=bytes(8),
        target_ids=bytes(8),
        checksums=b"",
    )


def test_copies_of_a_call_hang_below_it_and_tell_how_they_ended(spans: Tracing) -> None:
    """A copy's span is below its call's and tells how the copy ended; a copy without a call has no span."""
    spans.copy_began(1, "main", a_copy(9))
    span = spans.call("reserve", "local", PARENT)
    for number in range(5):
        spans.copy_began(1, "main", a_copy(number))
    spans.leave()
    tracing.finish(span, "OK")
    spans.copy_began(1, "main", a_copy(9))

    for command in (
        c.CopyDone(copy_id=CopyId(0)),
        c.CopyFailed(copy_id=CopyId(1)),
        c.CopyLost(copy_id=CopyId(2)),
        c.CopyDone(copy_id=CopyId(77)),
        c.Tick(),
        c.MoverDied(),
    ):
        spans.copy_ended(1, command)
    found = written(spans)

    call = next(one for one in found if one["name"] == "kvlease.reserve")
    copies = [one for one in found if one["name"] == "kvlease.copy host_to_device"]
    assert call["parent_id"] == "0xb7ad6b7169203331"
    assert {one["parent_id"] for one in copies} == {call["context"]["span_id"]}
    assert [one["attributes"]["kvlease.outcome"] for one in copies] == [
        "done", "failed", "lost", "mover died", "mover died",
    ]  # fmt: skip


def test_copies_of_a_deleted_cache_end_with_it(spans: Tracing) -> None:
    """Nobody tells of their ends any more; the copies of other caches go on."""
    tracing.finish(spans.call("evict", "grpc", ""), "OK")
    for pool, number in ((1, 1), (1, 2), (2, 1)):
        spans.copy_began(pool, "main", a_copy(number))

    spans.cache_ended(1)

    assert repr(spans) == "<Tracing 1 copies>"
    outcomes = [one["attributes"].get("kvlease.outcome") for one in written(spans)]
    assert outcomes == [None, "cache deleted", "cache deleted", None]


def test_what_the_mover_measured_is_a_span_below_the_copy(spans: Tracing) -> None:
    """The mover's span covers a part of the copy's; the rest is transport and queue."""
    span = spans.call("evict", "local", PARENT)
    spans.copy_began(1, "main", a_copy(3))
    spans.leave()
    batch = Moved(
        pool=1,
        copy_id=CopyId(3),
        direction="device_to_host",
        num_bytes=64,
        nanoseconds=7_000_000,
        is_done=True,
    )

    spans.moved(batch)
    spans.moved(batch._replace(copy_id=CopyId(4)))
    spans.copy_ended(1, c.CopyDone(copy_id=CopyId(3)))
    tracing.finish(span, "OK")
    move, copy, _ = written(spans)

    assert move["name"] == "kvlease.move device_to_host"
    assert move["parent_id"] == copy["context"]["span_id"]
    assert move["attributes"] == {"kvlease.bytes": 64, "kvlease.is_done": True}
    took = _microseconds(move["end_time"]) - _microseconds(move["start_time"])
    assert took == pytest.approx(7_000, abs=1)


def test_clock_beyond_what_can_be_told_fails_no_call(
    spans: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock beyond the year 2262, which nanoseconds in 64 bits do not hold, calls are answered and have spans."""

    def overflow() -> int:
        raise OverflowError

    monkeypatch.setattr(time, "time_ns", overflow)
    monkeypatch.setattr("opentelemetry.sdk.trace.time_ns", overflow)

    with spans.request("POST /v1/reserve", "", {}):
        span = spans.call("reserve", "rest", "")
        spans.copy_began(1, "main", a_copy(3))
        spans.copy_began(1, "main", a_copy(4))
        spans.leave()
        spans.copy_ended(1, c.CopyDone(copy_id=CopyId(3)))
        spans.copy_ended(1, c.MoverDied())
        tracing.finish(span, "OK")
    monkeypatch.undo()

    assert [one["start_time"][:4] for one in written(spans)] == ["2262"] * 4


def test_copies_under_way_are_bounded(spans: Tracing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies above the limit have no span; copies that never end are ended with the daemon."""
    monkeypatch.setattr(tracing, "_COPIES_MAX", 2)
    tracing.finish(spans.call("evict", "grpc", ""), "OK")
    for number in range(4):
        spans.copy_began(1, "main", a_copy(number))

    assert repr(spans) == "<Tracing 2 copies>"
    assert len(written(spans)) == 3


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", "\0" * 55])
def test_malformed_parent_is_none(spans: Tracing, traceparent: str) -> None:
    """A parent that cannot be read is ignored, as the standard says, and a trace begins."""
    tracing.finish(spans.call("stats", "rest", traceparent), "INTERNAL")

    (span,) = written(spans)
    assert span["parent_id"] is None
    assert span["status"]["status_code"] == "ERROR"


async def test_calls_that_wait_are_spans_to_their_answers(spans: Tracing) -> None:
    """A span ends with its call's code: answered at once, refused, or, after a wait, answered, refused or given up."""
    futures: list[asyncio.Future[Message]] = [
        asyncio.get_running_loop().create_future() for _ in range(4)
    ]
    answers: list[Any] = [pb.StatsResponse(), PoolFullError(), *futures]

    def answer(verb: str, request: Message, caller: Caller) -> Any:
        del verb, request, caller
        found = answers.pop(0)
        if isinstance(found, PoolFullError):
            raise found
        return found

    ask = traced(spans, answer, lambda: None)
    for verb in "abcdef":
        if verb == "b":
            with pytest.raises(PoolFullError):
                ask(verb, pb.StatsRequest(), Caller("local"))
        else:
            ask(verb, pb.StatsRequest(), Caller("local"))
    futures[0].set_result(pb.StatsResponse())
    futures[1].set_exception(PoolFullError())
    futures[2].set_exception(ValueError())
    futures[3].cancel()
    await asyncio.sleep(0)

    codes = {one["name"][-1]: one["attributes"]["kvlease.code"] for one in written(spans)}
    assert codes == {
        "a": "OK", "b": "POOL_FULL", "c": "OK", "d": "POOL_FULL", "e": "INTERNAL", "f": "CANCELLED",
    }  # fmt: skip


@pytest.mark.parametrize(
    "module",
    ["opentelemetry.sdk.resources", "opentelemetry.exporter.otlp.proto.http.trace_exporter"],
)
def test_missing_opentelemetry_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing without opentelemetry is refused with what to install, as it is an optional extra."""
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(MissingOtelError, match=r"kvlease\[otel\]"):
        Tracing(endpoint="http://127.0.0.1:1", file=None, epoch=1).start()
