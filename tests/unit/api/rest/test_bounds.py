"""Laws of REST's bounds: bodies, heads, answers and connections have limits of size, time and number."""

import asyncio
import re
import socket
import threading

import pytest

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.rest import endpoints as rest_endpoints
from kvleased.api.rest import http_server
from kvleased.api.rest import protocol as rest_protocol
from tests.unit.api.scripted import HttpAnswer, Served, http

TRANSPORTS = ("rest",)


async def raw(served: Served, sent: bytes) -> HttpAnswer:
    """Send raw bytes; return what comes until the connection closes."""
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return HttpAnswer(int(first.split()[1]) if head else 0, headers, body)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"nonsense\r\n\r\n", 400, id="no http"),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 431, id="endless head"),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431, id="long head"),
    ],
)
async def test_what_is_no_request_is_a_problem_document(
    served: Served, sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Even a refusal by HTTP itself is a problem document, and nobody can fill the log with such refusals."""
    answer = await raw(served, sent)

    assert (answer.status, answer.json["status"]) == (status, status)
    assert caplog.records == []
    assert re.search(rb"HTTP/1\.1 \d", answer.body) is None, "there is one answer"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"nonsense\r\n\r\n", "Invalid method encountered"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "it begins HTTP/2"),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", "Invalid header token"),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", "Invalid character in Content-Length"),
        (b"GET http://[::1 HTTP/1.1\r\nHost:\r\n\r\n", "its address cannot be parsed"),
        (b"GET /livez HTTP/1.1\r\n\r\n", "it has no Host header"),
        (b"GET http://localhost/livez HTTP/1.1\r\n\r\n", "it has no Host header"),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", "it has 2 Host headers, not one"),
        (b"GET /livez HTTP/1.0\r\nHost: a\r\nhost: a\r\n\r\n", "it has 2 Host headers, not one"),
    ],
)
async def test_what_is_no_http_is_told_why(served: Served, sent: bytes, reason: str) -> None:
    """The answer to what cannot be read says what is wrong with it and what to do."""
    answer = await raw(served, sent)

    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["connection"] == "close"
    assert (answer.json["code"], answer.json["resource"]) == ("INVALID", "request")
    assert f"this is not an HTTP/1.1 request ({reason}); send one" in answer.json["detail"]


@pytest.mark.parametrize("head", [b"HTTP/1.1\r\nHost:\r\nConnection: close", b"HTTP/1.0"])
async def test_empty_host_and_none_of_an_old_caller_are_accepted(
    served: Served, head: bytes
) -> None:
    """Over a Unix socket a Host header may be empty, and HTTP/1.0 needs none."""
    answer = await raw(served, b"GET /livez " + head + b"\r\n\r\n")

    assert answer.status == 200


async def test_chunked_body_is_bounded_while_it_is_read(served: Served) -> None:
    """A body without a length is refused when it passes the limit, not when it ends."""
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    head = b"POST /v1/leases HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"

    answer = await raw(served, head + 4 * chunk)

    assert (answer.status, answer.json["code"]) == (413, "TOO_LARGE")
    assert "the limit is 65536 (max_message_bytes)" in answer.json["detail"]


async def test_refused_body_is_told_its_length(served: Served) -> None:
    """A body that gives its length is refused with that length, however little of it was read."""
    answer = await http(served, "POST", "/v1/leases", b" " * 1_000_000)

    assert (answer.status, answer.json["need"], answer.json["limit"]) == (413, 1_000_000, 65_536)


def hurry(served: Served, monkeypatch: pytest.MonkeyPatch, deadline: str) -> None:
    """Have one deadline of REST pass at once."""
    for server in served.rest._servers:
        monkeypatch.setattr(server._protocol, deadline, 0.01)


async def test_body_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who stops in the middle of a body gets an answer."""
    hurry(served, monkeypatch, "body_seconds_max")
    head = b"POST /v1/leases HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{"

    assert (await raw(served, head)).status == 422


async def test_head_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection on which no request begins is closed."""
    hurry(served, monkeypatch, "head_seconds_max")

    assert (await raw(served, b"GET / HT")).status == 0


async def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection too many is refused with the reason."""
    monkeypatch.setattr(served.rest._servers[0].places, "members_max", 0)

    answer = await raw(served, b"")

    assert (answer.status, answer.json["code"]) == (429, "BUSY")


@pytest.mark.parametrize("num_bytes", [65537, 1 << 20, 1 << 40])
@pytest.mark.parametrize("asks", [b"", b"Expect: 100-continue\r\n"], ids=["sends", "asks first"])
async def test_body_above_the_limit_is_refused_unread(
    served: Served, num_bytes: int, asks: bytes
) -> None:
    """A body whose head gives a length above the limit is refused by the head, and its connection ends."""
    head = (
        b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + asks
    )

    answer = await raw(served, head + b"Content-Length: %d\r\n\r\n" % num_bytes)

    assert (answer.status, answer.json["need"], answer.json["limit"]) == (413, num_bytes, 65536)
    assert answer.headers["connection"] == "close"


async def test_body_as_long_as_may_be_is_invited(served: Served) -> None:
    """A caller who asks before sending a body of exactly the limit is told to send it."""
    body = b"{}" + b" " * 65534
    head = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)

    writer.write(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert b"HTTP/1.1 200 OK" in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("path", "status"), [(b"/v1/nowhere", 404), (b"/v1/stats", 405), (b"/v1/leases", 401)]
)
async def test_who_is_not_invited_to_send_a_body_is_hung_up_on(
    served: Served, path: bytes, status: int
) -> None:
    """A caller who asks before sending a body, and is refused, need not send it; the connection ends, and says so."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asking = head + b"Authorization: none\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"

    for num_bytes, sent in ((9, b""), (1 << 15, bytes(1 << 14))):
        async with asyncio.timeout(5):
            answer = await raw(served, asking % num_bytes + sent)

        assert (answer.status, answer.headers["connection"]) == (status, "close")


async def test_who_sends_a_boundless_body_sees_its_refusal(served: Served) -> None:
    """A large body is skipped for a while, so that a caller who sends all of it first still reads the refusal."""
    head = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b" " * (8 << 20)

    answer = await raw(served, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    assert (answer.status, answer.json["need"], answer.json["limit"]) == (413, 8 << 20, 65536)


async def test_kernel_keeps_little_for_who_does_not_read(served: Served) -> None:
    """The bytes written to a peer that does not read are bounded, in the kernel, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.rest.http_port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    (connection,) = served.rest._servers[1]._server.server_state.connections
    kept = connection.transport.get_extra_info("socket")

    # Linux doubles the number that it is given.
    assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * http_server.UNSENT_BYTES_MAX
    writer.close()


async def test_no_answer_is_written_to_a_connection_that_has_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a connection ends with several answers unread, the one under way is told of the end, not the last one."""
    over_tcp = served.rest._servers[1]
    monkeypatch.setattr(over_tcp._protocol, "idle_seconds_max", 0.1)
    await http(served, "GET", "/openapi.json")
    _, writer = await asyncio.open_connection("127.0.0.1", served.rest.http_port)

    writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
    connections = over_tcp._server.server_state.connections
    async with asyncio.timeout(20):
        while not connections:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)
        (connection,) = connections
        while connections:
            # When it has ended it holds none of them any more.
            unanswered, last = list(connection._unanswered), connection.cycle
            await asyncio.sleep(0)
    writer.close()

    under_way = next(one for one in unanswered if not one.response_complete)
    assert under_way is not last
    assert under_way.disconnected


async def test_doors_are_bounded_one_by_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who uses up the connections of TCP leaves those of the Unix socket free."""
    _, over_tcp = served.rest._servers
    monkeypatch.setattr(over_tcp.places, "members_max", 0)
    headers = {"Authorization": "Bearer known"}

    assert (await http(served, "GET", "/v1/stats", over_tcp=True, headers=headers)).status == 429
    assert (await http(served, "GET", "/v1/stats")).status == 200


async def test_body_that_nobody_reads_has_a_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a call is refused at its head, its unread body does not hold the connection."""
    hurry(served, monkeypatch, "body_seconds_max")
    monkeypatch.setattr(rest_protocol, "_GRACE_SECONDS", 0.01)
    head = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nAuthorization: none\r\nContent-Length: 9\r\n\r\n{"

    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(head)
    async with asyncio.timeout(10):
        said = await reader.read()

    writer.close()
    assert b" 401 " in said


async def test_answer_that_is_not_read_has_a_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who asks and does not read is disconnected."""
    hurry(served, monkeypatch, "idle_seconds_max")
    served.daemon.script["stats"] = pb.StatsResponse(caches=[pb.CacheStats(cache="c" * (4 << 20))])
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)

    writer.write(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
    async with asyncio.timeout(10):
        while served.rest._servers[0].num_connections:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)

    writer.close()
    assert reader is not None


async def test_little_that_is_not_read_has_a_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who leaves but a few bytes unread, beside what the kernel keeps, is disconnected, too."""
    hurry(served, monkeypatch, "idle_seconds_max")
    state = served.rest._servers[0]._server.server_state
    connections = state.connections
    _, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    async with asyncio.timeout(10):
        while not connections:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)
        (connection,) = connections
        while not connection.transport.get_write_buffer_size():
            num_answered = state.total_requests
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while state.total_requests == num_answered:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
        while connections:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)

    writer.close()


async def test_first_refusal_of_a_body_holds_up_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first refusal of a body is made beside the loop, which serves others until it is ready."""
    is_heard = threading.Event()

    def schema_of(_: object) -> None:
        assert is_heard.wait(10), "the loop stood still"

    monkeypatch.setattr(rest_endpoints, "schema_of", schema_of)
    refused = asyncio.ensure_future(http(served, "POST", "/v1/leases", b"[]"))
    assert (await http(served, "GET", "/livez")).status == 200
    is_heard.set()

    assert (await refused).status == 422
