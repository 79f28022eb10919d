"""Laws of REST: how calls are written, and both transports over real sockets."""

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import (
    BusyError,
    DeadlineError,
    InternalError,
    KVLeaseError,
    NeverFitsError,
    TooLargeError,
    UnavailableError,
    UnknownCacheError,
)
from kvlease.transports._rest import (
    ROUTES,
    SseReader,
    fill,
    request_of,
    response_of,
    to_json,
    unreachable,
)
from kvlease.transports.base import Outgoing, parse_address
from kvlease.transports.http import HttpTransport
from kvlease.transports.http_async import AsyncHttpTransport
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import small_plan

LONG = "x" * 65536


def call(verb: str, request: Message, *, seconds: float = 5.0, **who: Any) -> Outgoing:
    """Return a call of the transports."""
    return Outgoing(verb, request, time.monotonic() + seconds, **who)


# How calls read


@given(
    request_id=st.text(max_size=20),
    keys=st.binary(max_size=64),
    num_tokens=st.integers(0, 2**32 - 1),
    wait_ms=st.integers(0, 2**32 - 1),
)
def test_message_survives_json(request_id: str, keys: bytes, num_tokens: int, wait_ms: int) -> None:
    """A message written as JSON and read back is the same message."""
    message = pb.ReserveRequest(
        request_id=request_id, keys=keys, num_tokens=num_tokens, wait_ms=wait_ms
    )
    again = pb.ReserveRequest()

    fill(again, json.loads(json.dumps(to_json(message))))

    assert again == message


def test_nested_messages_survive_json() -> None:
    """Messages, lists of messages, maps and large integers come back as they went."""
    pools = [pb.PoolStats(tier="device", num_blocks=2**40), pb.PoolStats(tier="host")]
    stats = pb.StatsResponse(
        epoch=2**50, caches=[pb.CacheStats(cache="a", pools=pools, counters={"grants": 3})]
    )
    info = pb.AttachResponse(info=pb.CacheInfo(plan=small_plan().to_proto()), heartbeat_seconds=0.5)
    step = pb.StepResponse(
        reserves=[
            pb.StepReserve(granted=pb.ReserveResponse()),
            pb.StepReserve(error=pb.Error(need=0)),
        ]
    )

    for message in (stats, info, step):
        again = type(message)()
        fill(again, json.loads(json.dumps(to_json(message))))
        assert again == message


def test_unknown_fields_are_a_newer_daemons() -> None:
    """An unknown field comes from a newer daemon and is ignored; null means not set."""
    assert response_of(
        "release", 200, b'{"released": true, "novel": [1], "other": null}'
    ) == pb.ReleaseResponse(released=True)


def test_every_verb_has_a_path() -> None:
    """Each request of the protocol can go over REST."""
    assert set(ROUTES) == {
        field.name for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields
    }


@pytest.mark.parametrize(
    ("verb", "request_message", "method", "path", "body"),
    [
        (
            "extend",
            pb.ExtendRequest(lease_id=5, num_tokens=9),
            "POST",
            "/v1/leases/5/extend",
            {"num_tokens": 9},
        ),
        (
            "fork",
            pb.ForkRequest(lease_id=5, request_id="s", num_tokens=9),
            "POST",
            "/v1/leases/5/fork",
            {"request_id": "s", "num_tokens": 9},
        ),
        (
            "trim",
            pb.TrimRequest(lease_id=5, num_tokens=9),
            "POST",
            "/v1/leases/5/trim",
            {"num_tokens": 9},
        ),
        ("release", pb.ReleaseRequest(lease_id=5), "DELETE", "/v1/leases/5", None),
        (
            "evict",
            pb.EvictRequest(num_blocks=2),
            "POST",
            "/v1/evict?cache=c%201",
            {"num_blocks": 2},
        ),
        ("evict", pb.EvictRequest(lease_id=5), "POST", "/v1/leases/5/evict?cache=c%201", {}),
        ("stats", pb.StatsRequest(cache="a"), "GET", "/v1/stats?cache=a", None),
        ("get_tenant", pb.GetTenantRequest(tenant="a/b"), "GET", "/v1/tenants/a%2Fb", None),
        (
            "inspect",
            pb.InspectRequest(cache="a", what="leases", limit=5, after_id=7),
            "GET",
            "/v1/caches/a/leases?limit=5&after_id=7",
            None,
        ),
        (
            "explain",
            pb.ExplainRequest(lease_id=5, cache="a"),
            "GET",
            "/v1/leases/5/explanation?cache=a",
            None,
        ),
        ("watch", pb.WatchRequest(after_sequence=7), "GET", "/v1/events?after_sequence=7", None),
    ],
)
def test_call_reads_as_a_path_and_a_body(
    verb: str, request_message: Message, method: str, path: str, body: dict[str, int] | None
) -> None:
    """The body does not repeat what the path says."""
    request = request_of(call(verb, request_message, cache="c 1" if verb == "evict" else ""))

    assert (request.method, request.path) == (method, path)
    assert (json.loads(request.body) if request.body else None) == body


@pytest.mark.parametrize(
    ("verb", "request_message", "code", "named"),
    [
        ("inspect", pb.InspectRequest(cache="m", what="foo"), "INVALID", "what is 'foo'; .* pins"),
        ("attach", pb.AttachRequest(), "INVALID", "cache is ''; it must be 1 to 63"),
        (
            "clear",
            pb.ClearRequest(),
            "UNKNOWN_CACHE",
            "there is no cache ''; say which one is meant",
        ),
        ("get_tenant", pb.GetTenantRequest(), "INVALID", "tenant has 0 characters; it must have"),
        ("get_tenant", pb.GetTenantRequest(tenant=LONG), "INVALID", "tenant has 65536 .* to 128"),
        ("clear", pb.ClearRequest(cache=LONG), "UNKNOWN_CACHE", "has 65536 .* at most 63"),
        ("attach", pb.AttachRequest(cache=LONG), "INVALID", "it must be 1 to 63"),
    ],
)
def test_argument_that_would_be_another_path_is_refused_by_its_name(
    verb: str, request_message: Message, code: str, named: str
) -> None:
    """An argument that no path can carry is refused by its own name, as over the other transports."""
    with pytest.raises(KVLeaseError, match=named) as refusal:
        request_of(Outgoing(verb, request_message, 0.0))

    assert refusal.value.code == code


def test_cache_of_a_long_name_is_unknown() -> None:
    """A name in the query is refused before a daemon refuses the head that it is in."""
    with pytest.raises(UnknownCacheError, match="at most 63"):
        request_of(call("stats", pb.StatsRequest(), cache=LONG))


def test_identity_travels_in_headers() -> None:
    """Token, key and epoch have headers of their own."""
    request = request_of(
        call("detach", pb.DetachRequest(), token="t", epoch=4, idempotency_key="k")
    )

    assert request.headers["Authorization"] == "Bearer t"
    assert (request.headers["Idempotency-Key"], request.headers["KVLease-Epoch"]) == ("k", "4")


def test_problem_becomes_its_error() -> None:
    """A problem document arrives as the error that it describes, with all its numbers."""
    problem = {
        "code": "NEVER_FITS",
        "detail": "too big",
        "resource": "blocks",
        "need": 9,
        "available": None,
        "limit": 8,
    }

    with pytest.raises(NeverFitsError, match="too big") as caught:
        response_of("reserve", 409, json.dumps(problem).encode())

    assert (caught.value.need, caught.value.available, caught.value.limit) == (9, None, 8)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (502, b"<html>", UnavailableError),
        (404, b'{"detail": "Not Found"}', InternalError),
        (404, b"[]", InternalError),
        (200, b"[]", InternalError),
        (200, b'{"block_ids": 3}', InternalError),
    ],
)
def test_answer_that_is_not_ours_is_an_error_of_ours(
    status: int, body: bytes, error: type[KVLeaseError]
) -> None:
    """An answer from something between client and daemon is never taken for the daemon's."""
    with pytest.raises(error):
        response_of("extend", status, body)


@given(st.data())
def test_events_come_whole_from_any_pieces(data: st.DataObject) -> None:
    """However a stream is cut, the same events come out; comments are no events."""
    stream = b": hello\n\n" + b"".join(
        b'id: %d\ndata: {"sequence": %d}\r\n\r\n' % (n, n) for n in range(4)
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader = SseReader("watch")

    pieces = [
        stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    events = [event for piece in pieces for event in reader.feed(piece)]

    assert [event.sequence for event in events] == [0, 1, 2, 3]


def test_stream_that_is_ended_says_why() -> None:
    """Events before the end are told, and then the daemon's own error, which is no event."""
    reader = SseReader("watch")
    problem = b'event: problem\ndata: {"code": "BUSY", "detail": "too slow"}\n\n'
    events = reader.feed(b'event: a\ndata: {"sequence": 1}\n\n' + problem)

    assert next(events).sequence == 1  # type: ignore[attr-defined]
    with pytest.raises(BusyError, match="too slow"):
        next(events)


def test_endless_event_is_refused() -> None:
    """A stream that never ends an event does not fill the client's memory."""
    with pytest.raises(UnavailableError):
        list(SseReader("watch").feed(bytes(2**21)))


# Over sockets


class Handler(BaseHTTPRequestHandler):
    """A handler that answers every request alike, unless the test changes it."""

    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        server: Any = self.server
        server.seen.append((self.command, self.path, self.headers))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if server.ways:
            server.ways.pop(0)(self)
        self.reply(200, b'{"released": true}')

    def reply(self, status: int, body: bytes) -> None:
        """Send an answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        """Return a name, for a Unix socket has none."""
        return "test"

    do_DELETE = _answer  # noqa: N815 - the base class looks for this name


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(ConnectionResetError("reset by peer"), id="before the answer"),
        pytest.param(ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), id="in writing"),
        pytest.param(ssl.SSLError(1, "tlsv13 alert certificate required"), id="with an alert"),
    ],
)
def test_hang_up_after_the_handshake_names_the_certificate(end: Exception) -> None:
    """However a daemon that wants a certificate ends the connection, the client is told how to show one."""
    assert "KVLEASE_CERT_FILE" in unreachable(parse_address("https://127.0.0.1:7070"), end).message


class QuietHttpServer(ThreadingHTTPServer):
    """A server that logs nothing about callers who hung up."""

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


class UnixHttpServer(QuietHttpServer):
    """The same server, at a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind to a path."""
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "test", 0


@pytest.fixture(params=["tcp", "unix"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """Give a server and its address, over TCP and a Unix socket in turn."""
    server: Any
    if request.param == "unix":
        server = UnixHttpServer(str(tmp_path / "http.sock"), Handler)  # type: ignore[arg-type]  # a path is an address here
        address = f"http+unix://{tmp_path}/http.sock"
    else:
        server = QuietHttpServer(("127.0.0.1", 0), Handler)
        address = f"http://127.0.0.1:{server.server_port}"
    server.daemon_threads, server.seen, server.ways = True, [], []
    server.release = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server, address
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["blocking", "async"])
def send(
    request: pytest.FixtureRequest, served: tuple[Any, str]
) -> Iterator[Callable[[Outgoing], Message]]:
    """Give the send functions of both transports in turn."""
    address = parse_address(served[1])
    if request.param == "blocking":
        transport = HttpTransport(address)
        yield transport.send
        transport.close()
    else:
        with asyncio.Runner() as runner:
            other = AsyncHttpTransport(address)
            yield lambda outgoing: runner.run(other.send(outgoing))
            runner.run(other.close())


RELEASE = pb.ReleaseRequest(lease_id=5)


def test_answer_is_read_though_the_request_was_not(tmp_path: Path) -> None:
    """A daemon that refuses a body by its head and closes is read, and not reported as out of reach."""
    problem = json.dumps({"code": "TOO_LARGE", "need": 9, "limit": 5}).encode()
    head = b"HTTP/1.1 413 Refused\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(problem)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def refuse() -> None:
            with listener.accept()[0] as peer:
                peer.recv(1000)
                peer.sendall(head + problem)

        pool.submit(refuse)
        transport = HttpTransport(parse_address(f"http+unix://{tmp_path}/s"))
        with pytest.raises(TooLargeError) as caught:
            transport.send(call("reserve", pb.ReserveRequest(keys=bytes(8 << 20))))
        transport.close()

    assert (caught.value.need, caught.value.limit) == (9, 5)


def test_calls_share_a_kept_alive_connection(
    served: tuple[Any, str], send: Callable[[Outgoing], Message]
) -> None:
    """Calls are answered one after another on one connection, with the caller's identity in the headers."""
    for _ in range(3):
        assert send(call("release", RELEASE, token="t")) == pb.ReleaseResponse(released=True)

    assert [(method, path) for method, path, _ in served[0].seen] == [
        ("DELETE", "/v1/leases/5")
    ] * 3
    assert served[0].seen[0][2]["Authorization"] == "Bearer t"


def test_silent_server_ends_at_the_deadline(
    served: tuple[Any, str], send: Callable[[Outgoing], Message]
) -> None:
    """A server that does not answer costs the deadline."""
    served[0].ways = [lambda handler: handler.server.release.wait(5)]

    with pytest.raises(DeadlineError):
        send(call("release", RELEASE, seconds=0.05))


def test_broken_http_connection_is_unavailable(
    served: tuple[Any, str], send: Callable[[Outgoing], Message]
) -> None:
    """A call whose connection breaks is told so; the next call goes through."""

    def hang_up(handler: Handler) -> None:
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True

    served[0].ways = [hang_up, hang_up]
    for _ in range(1):
        with pytest.raises(UnavailableError):
            send(call("release", RELEASE))
    served[0].ways = []
    assert send(call("release", RELEASE)) == pb.ReleaseResponse(released=True)


def test_server_of_another_protocol_is_not_quoted(
    served: tuple[Any, str], send: Callable[[Outgoing], Message]
) -> None:
    """A caller with the wrong address reads that it is wrong, and not the bytes of whatever listens there."""

    def speak_frames(handler: Handler) -> None:
        handler.wfile.write(b"\x01\x00\x00\x00\x08\x1b[2J\n\r\n\r\n")
        handler.close_connection = True

    served[0].ways = [speak_frames] * 2
    with pytest.raises(UnavailableError, match="does not speak HTTP") as refusal:
        send(call("release", RELEASE))

    assert refusal.value.message.isprintable()


def test_absent_server_is_unavailable(tmp_path: Path) -> None:
    """Where nothing listens, the error names the address."""
    address = parse_address(f"http+unix://{tmp_path}/none.sock")

    with pytest.raises(UnavailableError, match=r"none\.sock"):
        HttpTransport(address).send(call("release", RELEASE))


def test_waiting_http_call_does_not_hold_back_another_thread(served: tuple[Any, str]) -> None:
    """A call goes through while another one waits for its answer."""
    server, address = served
    is_asked = threading.Event()

    def wait(handler: Handler) -> None:
        is_asked.set()
        assert handler.server.release.wait(5)  # type: ignore[attr-defined]  # the fixture's

    server.ways = [wait]
    transport = HttpTransport(parse_address(address))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(transport.send, call("release", RELEASE))
        assert is_asked.wait(5)

        assert transport.send(call("release", RELEASE)) == pb.ReleaseResponse(released=True)

        assert not waiting.done()
        server.release.set()
        assert waiting.result(5) == pb.ReleaseResponse(released=True)
    transport.close()
