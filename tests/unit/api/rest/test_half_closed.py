"""Laws of callers who close their sending side after a request: they are answered; those who leave are forgotten."""

import asyncio
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.rest import half_closed
from tests.unit.api.guarded import Guarded, guarded
from tests.unit.api.scripted import Served

TRANSPORTS = ("rest",)
SECONDS = 10
HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /v1/stats" + HEAD + b"\r\n"
RESERVE = (
    b"POST /v1/leases" + HEAD + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)
BOTH = pytest.mark.parametrize("over_tcp", [False, True], ids=["unix", "tcp"])


async def connect(served: Served | Guarded, *, over_tcp: bool) -> tuple[asyncio.StreamReader, Any]:
    """Connect with permission for everything."""
    if over_tcp:
        return await asyncio.open_connection("127.0.0.1", served.rest.http_port)
    return await asyncio.open_unix_connection(served.settings.http_socket)


async def until(is_so: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)


async def said(served: Served | Guarded, request: bytes, *, over_tcp: bool) -> bytes:
    """Send something and close the sending side at once; return all that comes then."""
    reader, writer = await connect(served, over_tcp=over_tcp)
    writer.write(request)
    writer.write_eof()
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    return answer


@BOTH
@pytest.mark.parametrize("num_requests", [1, 3, 60])
async def test_whatever_was_asked_is_answered(
    served: Served, num_requests: int, *, over_tcp: bool
) -> None:
    """One or several requests are answered although their sender is done, and then the connection ends."""
    answer = await said(served, GET * num_requests, over_tcp=over_tcp)

    assert answer.count(b"HTTP/1.1 200 OK") == num_requests
    assert len(served.daemon.calls) == num_requests
    assert answer.endswith(b"}")


@BOTH
async def test_answer_without_a_body_arrives(served: Served, *, over_tcp: bool) -> None:
    """An answer that is only a head arrives before the end."""
    answer = await said(served, GET.replace(b"GET", b"HEAD"), over_tcp=over_tcp)

    assert answer.startswith(b"HTTP/1.1 405")


@BOTH
@pytest.mark.parametrize(
    "rest", [b"\r\n", b"GET /v1/st", RESERVE[:-1]], ids=["end of a line", "head", "body"]
)
async def test_part_of_a_request_ends_behind_the_answers(
    served: Served, rest: bytes, *, over_tcp: bool
) -> None:
    """Whole requests are answered, and nobody waits for the rest of a partial one."""
    answer = await said(served, GET + rest, over_tcp=over_tcp)

    assert (answer.count(b"HTTP/1.1 "), answer.count(b" 200 OK")) == (1, 1)
    assert await said(served, rest, over_tcp=over_tcp) == b""


@BOTH
async def test_call_that_waits_is_answered_later(served: Served, *, over_tcp: bool) -> None:
    """A call that waits in the daemon is answered when it ends, however long after the caller's last byte."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future
    reader, writer = await connect(served, over_tcp=over_tcp)
    writer.write(RESERVE)
    writer.write_eof()
    await until(lambda: served.daemon.calls)
    if over_tcp:
        async with asyncio.timeout(SECONDS):
            assert await reader.readuntil(b"\r\n\r\n") == half_closed._CONTINUE

    future.set_result(pb.ReserveResponse(lease_id=5))
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()

    assert answer.removeprefix(half_closed._CONTINUE).startswith(b"HTTP/1.1 200 OK")
    assert b'"lease_id":5' in answer
    assert served.daemon.cancelled == []


@pytest.mark.parametrize(
    ("over_tcp", "version"), [(False, b"1.0"), (False, b"1.1"), (True, b"1.1")]
)
async def test_who_has_left_is_forgotten(served: Served, version: bytes, *, over_tcp: bool) -> None:
    """A call whose caller closed the connection waits no more; a caller of HTTP/1.0 over TCP cannot be asked."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future
    _, writer = await connect(served, over_tcp=over_tcp)
    writer.write(RESERVE.replace(b"HTTP/1.1", b"HTTP/" + version))
    await until(lambda: served.daemon.calls)

    writer.close()
    await asyncio.wait({future}, timeout=SECONDS)

    assert served.daemon.cancelled == [future]


async def test_who_leaves_after_his_last_word_is_forgotten(served: Served) -> None:
    """Where a caller closes one side after the other, the kernel reports it on a Unix socket: the call is forgotten."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(served.settings.http_socket))
    line.sendall(RESERVE)
    line.shutdown(socket.SHUT_WR)
    await until(lambda: served.daemon.calls)

    line.close()
    await asyncio.wait({future}, timeout=SECONDS)

    assert served.daemon.cancelled == [future]


@BOTH
async def test_stream_ends_with_the_last_word_of_its_reader(
    served: Served, *, over_tcp: bool
) -> None:
    """A stream would go on for ever, so it ends with its reader's last byte, and its place is free."""
    answer = await said(served, GET.replace(b"/v1/stats", b"/v1/events"), over_tcp=over_tcp)

    assert b"text/event-stream" in answer
    await until(lambda: not any(one.num_connections for one in served.rest._servers))


def test_loop_of_the_daemon_lets_answers_leave() -> None:
    """The same holds under the daemon's own loop, which decides what a transport does at its reader's end."""
    heads = uvloop.run(_answers_of_a_daemon())

    assert heads == [b"HTTP/1.1 200 OK"] * 2


async def _answers_of_a_daemon() -> list[bytes]:
    """Return how a daemon answers a caller who has closed the sending side, over its Unix socket and TCP."""
    request = GET.replace(b"/v1/stats", b"/livez")
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run") as found:
            answers = [await said(found, request, over_tcp=one) for one in (False, True)]
    return [one.partition(b"\r\n")[0] for one in answers]
