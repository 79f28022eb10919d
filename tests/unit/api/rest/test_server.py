"""Laws of REST: every refusal is a problem document, bodies are strict, and streams and waiting calls end well."""

import asyncio
import os

import pytest
from google.protobuf.message import Message

from kvlease.errors import PoolFullError, UnknownCacheError
from kvlease.ids import SEQUENCE_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.rest.endpoints import Endpoint
from tests.unit.api.scripted import INPUTS, LAYER, Served, http

TRANSPORTS = ("rest",)


@pytest.mark.parametrize(
    ("path", "there_are"),
    [
        pytest.param(
            "/v1/events?after=1", "there are after_sequence, cache, with_snapshot", id="some"
        ),
        pytest.param("/v1/stats?limit=1", "there is cache", id="one"),
        pytest.param("/v1/caches?limit=1", "there is none", id="none"),
        pytest.param("/v1/stats?cache=a&cache=b", "cache was sent twice; send it once", id="twice"),
    ],
)
async def test_senseless_query_is_told_what_to_send(
    served: Served, path: str, there_are: str
) -> None:
    """A caller who guessed a parameter's name reads the right one; of two values for one name, neither is taken."""
    answer = await http(served, "GET", path)

    assert (answer.status, answer.json["resource"]) == (422, "query")
    assert answer.json["detail"].endswith(there_are)


async def test_response_is_the_message_with_defaults(served: Served) -> None:
    """Every field is in the answer, zeros included; bytes are base64, and ids are plain numbers."""
    served.daemon.script["reserve"] = pb.ReserveResponse(lease_id=2**52, block_ids=b"\0\1")

    answer = await http(served, "POST", "/v1/leases", {"request_id": "r"})

    assert answer.json == {
        "lease_id": 2**52, "block_ids": "AAE=", "device_hit_tokens": 0, "host_hit_tokens": 0, "row": 0,
        "num_blocks": "", "covered_tokens": 0, "joined_id": 0, "disk_hit_tokens": 0, "remote_hit_tokens": 0,
        "misses": [],
    }  # fmt: skip
    assert (answer.headers["content-type"], answer.headers["kvlease-epoch"]) == (
        "application/json",
        "7",
    )


async def test_created_cache_is_201(served: Served) -> None:
    """The status says whether a registration created anything."""
    served.daemon.script["register_cache"] = pb.RegisterCacheResponse(created=True)

    assert (await http(served, "PUT", "/v1/caches/a", {"inputs": INPUTS})).status == 201


async def test_headers_tell_the_caller(served: Served) -> None:
    """Token, epoch, idempotency key, cache and peer reach the daemon."""
    headers = {"Authorization": "Bearer tok", "Idempotency-Key": "k", "KVLease-Epoch": "7"}
    await http(served, "POST", "/v1/pins?cache=demo", {"keys": ""}, headers=headers)
    await http(served, "GET", "/v1/stats", over_tcp=True)

    caller = served.daemon.calls[0][2]
    assert (caller.transport, caller.token, caller.idempotency_key) == ("rest", "tok", "k")
    assert (caller.epoch, caller.cache) == (7, "demo")
    assert (caller.peer_pid, served.daemon.calls[1][2].peer_uid) == (os.getpid(), -1)


async def test_unforeseen_failure_is_a_problem_document(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unforeseen failure is reported as ours without details, and is logged; the next call is served."""

    def fail(*_: object) -> None:
        raise ArithmeticError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr(Endpoint, "_write", fail)
        answer = await http(served, "GET", "/v1/stats")

    assert (answer.status, answer.json["code"]) == (500, "INTERNAL")
    assert b"secret" not in answer.body
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ArithmeticError]
    assert (await http(served, "GET", "/v1/stats")).status == 200


async def test_refusal_is_a_problem_document(served: Served) -> None:
    """A refusal has every number, and the time of a retry in whole seconds, rounded up."""
    served.daemon.script["reserve"] = PoolFullError(
        "full", resource="device_blocks", need=4, available=1, limit=8, retry_after_ms=1050
    )

    answer = await http(served, "POST", "/v1/leases", {"request_id": "r"})

    assert answer.json == {
        "type": "urn:kvlease:error:POOL_FULL", "status": 429, "code": "POOL_FULL", "detail": "full",
        "title": "More is asked for than is free now; try again after retry_after_ms, or wait longer.",
        "retryable": True, "resource": "device_blocks", "need": 4, "available": 1, "limit": 8, "retry_after_ms": 1050,
    }  # fmt: skip
    assert answer.headers["retry-after"] == "2"


BAD: list[tuple[str, str, object, dict[str, str], int, str]] = [
    ("GET", "/nowhere", None, {}, 404, "INVALID"),
    ("PATCH", "/v1/caches", None, {}, 405, "INVALID"),
    ("GET", "/v1/caches/", None, {}, 404, "INVALID"),
    ("POST", "/v1/leases", b"{", {}, 422, "INVALID"),
    ("POST", "/v1/leases", b"[]", {}, 422, "INVALID"),
    ("POST", "/v1/leases", b"\xff", {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"unknown": 1}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"num_tokens": -1}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"num_tokens": 2**32}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"retain_priority": -1}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"retain_priority": "high"}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"num_tokens": "1"}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"num_tokens": 1.5}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"num_tokens": True}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"keys": "not base64!"}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"request_id": None}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"token_ids": [2**31]}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {"request_id": "\ud800"}, {}, 422, "INVALID"),
    ("POST", "/v1/leases", {}, {"Content-Type": "text/plain"}, 422, "INVALID"),
    ("POST", "/v1/leases", {}, {"KVLease-Epoch": "x"}, 422, "INVALID"),
    ("POST", "/v1/leases", b'{"request_id":"r","num_tokens":1,"num_tokens":2}', {}, 422, "INVALID"),
    ("POST", "/v1/leases", {}, {"Authorization": "Basic abc"}, 401, "UNKNOWN_WORKER"),
    ("POST", "/v1/leases?cache=c", {}, {}, 422, "INVALID"),
    ("POST", "/v1/plans", {"inputs": {"layers": [{**LAYER, "x": 1}]}}, {}, 422, "INVALID"),
    ("DELETE", "/v1/leases/one", None, {}, 422, "INVALID"),
    ("DELETE", "/v1/leases/99999999999999999999", None, {}, 422, "INVALID"),
    ("GET", "/v1/events?after_sequence=x", None, {}, 422, "INVALID"),
    ("GET", "/v1/events?with_snapshot=yes", None, {}, 422, "INVALID"),
    ("POST", "/v1/leases", b" " * 65537, {}, 413, "TOO_LARGE"),
]


async def test_path_that_is_none_leads_to_those_that_are(served: Served) -> None:
    """A caller who opens the root in a browser is told where the page is and where the paths are listed."""
    answer = await http(served, "GET", "/")

    assert (
        answer.json["detail"] == "GET /: Not Found; /docs lists all paths, and /ui is the web page"
    )


async def test_path_without_a_slash_is_told_as_it_was_sent(served: Served) -> None:
    """The daemon's own socket is no part of what a caller asked for."""
    answer = await http(served, "OPTIONS", "*")

    assert answer.json["detail"].startswith("OPTIONS *: Not Found; ")


async def test_method_that_a_path_does_not_take_is_told_with_those_that_it_takes(
    served: Served,
) -> None:
    """The body of the answer lists the allowed methods, as its header does."""
    answer = await http(served, "PUT", "/v1/stats")

    assert answer.json["detail"] == "PUT /v1/stats: Method Not Allowed; use GET"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [pytest.param(*bad, id=f"{bad[1]} {str(bad[2])[:20]} {bad[3]}") for bad in BAD],
)
async def test_bad_input_is_a_problem_document(  # noqa: PLR0913 - one column each
    served: Served,
    method: str,
    path: str,
    body: object,
    headers: dict[str, str],
    *,
    status: int,
    code: str,
) -> None:
    """Whatever is wrong, the answer is a problem document, and nothing reaches the daemon."""
    answer = await http(served, method, path, body, headers=headers)

    assert (answer.status, answer.json["code"], answer.json["status"]) == (status, code, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["kvlease-epoch"] == "7"
    assert not served.daemon.calls


async def test_number_out_of_range_is_refused_by_its_name(served: Served) -> None:
    """Where several parameters are numbers, the refusal names the wrong one."""
    answer = await http(served, "GET", "/v1/caches/main/leases?after_id=3&limit=-1")

    assert (answer.status, answer.json["code"], answer.json["resource"]) == (
        422,
        "INVALID",
        "limit",
    )
    assert answer.json["detail"].startswith("limit is ")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7070",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "::1",
        "[",
        ":1",
        "127.1",
    ],
)
async def test_page_of_another_host_is_refused(served: Served, host: str) -> None:
    """A host name that a web page made resolve to loopback does not reach the daemon over TCP."""
    answer = await http(served, "GET", "/v1/stats", headers={"Host": host}, over_tcp=True)

    assert (answer.status, answer.json["resource"]) == (422, "host")


async def test_tcp_is_loopback(served: Served) -> None:
    """Over TCP, REST answers under each name and address of loopback, as --tcp-host may be any of these."""
    for host in ("127.0.0.1", "localhost:1", "[::1]:7070", "LocalHost", "127.0.0.2:7070", "[0::1]"):
        assert (
            await http(served, "GET", "/v1/stats", headers={"Host": host}, over_tcp=True)
        ).status == 200


async def test_waiting_call_is_answered(served: Served) -> None:
    """A call that waits in the daemon is answered when the daemon answers it."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future

    asked = asyncio.create_task(http(served, "POST", "/v1/leases", {"request_id": "r"}))
    while not served.daemon.calls:  # noqa: ASYNC110 - the daemon has no event for it
        await asyncio.sleep(0)
    future.set_exception(UnknownCacheError())

    assert (await asked).json["code"] == "UNKNOWN_CACHE"


async def test_caller_that_leaves_is_forgotten(served: Served) -> None:
    """The daemon is told to forget a call whose caller closed the connection."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future
    _, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(
        b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    while not served.daemon.calls:  # noqa: ASYNC110 - the daemon has no event for it
        await asyncio.sleep(0)

    writer.close()
    await asyncio.wait({future}, timeout=10)

    assert served.daemon.cancelled == [future]


async def test_caller_that_leaves_work_behind_is_no_fault(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that cannot stop at once, such as a plan, is given up without an alarm."""
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    async def plan() -> Message:
        try:
            await may_end.wait()
        finally:
            await asyncio.sleep(0)
            has_ended.set()
        return pb.PlanResponse()

    served.daemon.script["plan"] = asyncio.ensure_future(plan())
    served.daemon.cancel = served.daemon.cancelled.append  # type: ignore[method-assign]
    _, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(
        b"POST /v1/plans HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )
    while not served.daemon.calls:  # noqa: ASYNC110 - the daemon has no event for it
        await asyncio.sleep(0)

    writer.close()
    async with asyncio.timeout(10):
        await has_ended.wait()

    assert "call_failed" not in capsys.readouterr().out
    assert 'code="UNAVAILABLE"' in (await served.metrics.scrape()).decode()


async def test_events_are_server_sent(served: Served) -> None:
    """Each event has its number and kind; a browser that reconnects goes on where it was."""
    served.daemon.events = [
        pb.WatchResponse(sequence=n, kind=f"k{n}", lease_id=n) for n in (1, 2, 3)
    ]
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(b"GET /v1/events HTTP/1.1\r\nhost: x\r\nlast-event-id: 1\r\n\r\n")

    head = await reader.readuntil(b"\r\n\r\n")
    received = await reader.readuntil(b'"lease_id":3') + await reader.readuntil(b"\n\n")
    writer.close()

    assert b"200 OK" in head
    assert b"text/event-stream" in head
    assert b"x-accel-buffering: no" in head
    assert b"id: 2\nevent: k2\ndata: {" in received
    assert b"event: k1" not in received


@pytest.mark.parametrize("num_digits", [16, 19, 5000])
async def test_id_that_no_event_has_yet_is_of_another_life(served: Served, num_digits: int) -> None:
    """A number is an id, however many digits it has: the daemon learns that the caller has seen more than there is."""
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    seen = b"9" * num_digits
    writer.write(b"GET /v1/events HTTP/1.1\r\nhost: x\r\nlast-event-id: %b\r\n\r\n" % seen)

    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    ((_, request, _),) = served.daemon.calls
    assert request == pb.WatchRequest(after_sequence=SEQUENCE_MAX)


@pytest.mark.parametrize("seen", ["abc", "-1", "1.5", "\u0661"])
async def test_what_is_no_id_of_an_event_is_refused(served: Served, seen: str) -> None:
    """A caller whose last event never existed is told so, and does not hear everything again."""
    headers = {"Last-Event-ID": seen.encode().decode("latin-1")}

    answer = await http(served, "GET", "/v1/events", headers=headers)

    assert answer.status == 422
    assert answer.json["resource"] == "Last-Event-ID"


async def test_traces_are_server_sent(served: Served) -> None:
    """Each request of a trace is an event without a number, as a trace cannot be resumed; its caller is known."""
    served.daemon.events = [
        pb.TraceResponse(input_tokens=3, key_digests=bytes(8)),
        UnknownCacheError(),
    ]

    headers = {"Authorization": "Bearer tok"}
    answer = await http(served, "GET", "/v1/caches/demo/trace", headers=headers)

    first, second = answer.body.removesuffix(b"\n\n").split(b"\n\n")
    assert first.startswith(b'event: request\ndata: {"timestamp_ms":0,"input_tokens":3,')
    assert second.startswith(b"event: problem\ndata: {")
    (verb, request, caller) = served.daemon.calls[0]
    assert (verb, request, caller.token) == ("trace", pb.TraceRequest(cache="demo"), "tok")


async def test_events_are_refused_before_they_begin(served: Served) -> None:
    """A stream that cannot begin is a problem document."""
    served.daemon.events = [UnknownCacheError()]

    answer = await http(served, "GET", "/v1/events?cache=nope")

    assert (answer.status, answer.json["code"]) == (404, "UNKNOWN_CACHE")


async def test_stream_that_ends_says_why(served: Served) -> None:
    """The last event of a stream says why it ends."""
    served.daemon.events = [pb.WatchResponse(sequence=1, kind="a"), UnknownCacheError()]

    answer = await http(served, "GET", "/v1/events")

    assert b"event: problem\ndata: {" in answer.body
    assert b"UNKNOWN_CACHE" in answer.body


async def test_stop_ends_streams(served: Served) -> None:
    """An endless stream does not hold up the daemon's stop."""
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")

    await asyncio.wait_for(served.rest.stop(), 1)

    assert await reader.read() == b"0\r\n\r\n"
    writer.close()


@pytest.mark.parametrize(
    ("path", "is_ready", "status"),
    [
        pytest.param("/livez", False, 200, id="live although not ready"),
        pytest.param("/readyz", False, 503, id="not ready"),
        pytest.param("/readyz?verbose", True, 200, id="ready"),
        pytest.param("/startupz", False, 503, id="not started"),
    ],
)
async def test_probes(served: Served, path: str, *, is_ready: bool, status: int) -> None:
    """A probe's status is for machines, and its text for people."""
    served.daemon.readiness = (is_ready, "draining")

    answer = await http(served, "GET", path)

    assert answer.status == status
    assert (b"draining" in answer.body) == (path != "/livez")


async def test_started_is_for_good(served: Served) -> None:
    """A daemon that was ready once stays started while it drains."""
    await http(served, "GET", "/startupz")
    served.daemon.readiness = (False, "draining")

    assert (await http(served, "GET", "/startupz")).status == 200


async def test_start_is_over_even_when_the_first_probe_meets_a_drain(served: Served) -> None:
    """A first probe during a drain is not told that the daemon has never started."""
    served.rest.note_start()
    served.daemon.readiness = (False, "draining")

    assert (await http(served, "GET", "/startupz")).status == 200
    assert (await http(served, "GET", "/readyz")).status == 503


async def test_refused_method_names_those_that_there_are(served: Served) -> None:
    """Where several routes share a path, the refusal allows the methods of all of them."""
    answer = await http(served, "OPTIONS", "/v1/caches/demo")

    assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET, PUT")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/caches HTTP/1.1\r\nHost:\r\n", 422),
        (b"GET http://evil.example/v1/caches HTTP/1.1\r\nHost: localhost\r\n", 422),
        (b"GET http://localhost@evil.example:80/v1/caches HTTP/1.1\r\nHost: localhost\r\n", 422),
        (b"GET http://[::2]:7070/v1/caches HTTP/1.1\r\nHost: localhost\r\n", 422),
        (b"GET http://localhost:7070/v1/caches HTTP/1.1\r\nHost: evil.example\r\n", 200),
        (b"GET http://[::1]:7070/v1/caches HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /v1/caches HTTP/1.1\r\nHost: 127.0.0.1:7070\r\n", 200),
        (b"GET /v1/caches HTTP/1.0\r\n", 200),
    ],
)
async def test_host_that_is_meant_is_looked_at(served: Served, head: bytes, status: int) -> None:
    """Over loopback, a call names loopback once: in its Host, or in its whole address, which replaces the Host."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.rest.http_port)
    writer.write(head + b"Authorization: Bearer a\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        said = await reader.read()

    writer.close()
    assert said.split()[1] == b"%d" % status
    assert (b'"resource":"host"' in said) is (status != 200)


@pytest.mark.parametrize(
    ("twice", "says"),
    [
        pytest.param(
            b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
            b"two Authorization headers",
            id="authorization",
        ),
        pytest.param(
            b"Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
            b"Idempotency-Key was sent twice; send it once",
            id="key",
        ),
        pytest.param(
            b"Idempotency-Key:\r\nidempotency-key: a\r\n",
            b"Idempotency-Key was sent twice; send it once",
            id="empty key",
        ),
        pytest.param(
            b"KVLease-Epoch: 1\r\nKVLease-Epoch: 0\r\n",
            b"KVLease-Epoch was sent twice; send it once",
            id="epoch",
        ),
    ],
)
async def test_header_that_is_there_twice_is_refused(
    served: Served, twice: bytes, says: bytes
) -> None:
    """Two tokens, keys or epochs are refused, so that it is not by chance which of them counts."""
    head = b"GET /v1/caches HTTP/1.1\r\nHost: localhost\r\n" + twice
    head += b"Connection: close\r\n\r\n"

    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(head)
    async with asyncio.timeout(10):
        said = await reader.read()

    writer.close()
    assert b" 422 " in said
    assert says in said
    assert not served.daemon.calls
