"""Laws of REST: every route is its verb, every refusal is a problem document, bodies are strict and bounded."""

import asyncio
import base64
import os
import socket
from urllib.parse import quote

import pytest
from google.protobuf.message import Message

from kvlease.errors import PoolFullError, UnknownCacheError
from kvlease.transports._rest import LISTED
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api import http_server, rest_protocol
from kvleased.api.rest_routes import ROUTES
from tests.unit.api.scripted import HttpAnswer, Served, http

TRANSPORTS = ("rest",)
KEY = bytes(range(32))
KEY_TEXT = base64.b64encode(KEY).decode()
PACKED = base64.b64encode((5).to_bytes(8, "little")).decode()
LAYER = {
    "name": "l",
    "kind": "full_attention",
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": "float16",
}
INPUTS = {"layers": [LAYER], "tokens_per_block": 16, "device_blocks": 8}

WORDS: list[tuple[str, str, object, str, Message]] = [
    ("POST", "/v1/drain", None, "drain", pb.DrainRequest()),
    ("DELETE", "/v1/drain", None, "undrain", pb.UndrainRequest()),
    ("POST", "/v1/caches/demo/drain", None, "drain", pb.DrainRequest(cache="demo")),
    ("DELETE", "/v1/caches/demo/drain", None, "undrain", pb.UndrainRequest(cache="demo")),
    ("POST", "/v1/caches/demo/clear", {"tenant": "chat"}, "clear", pb.ClearRequest(cache="demo", tenant="chat")),
    ("POST", "/v1/caches/demo/resize", {"tier": "host", "num_blocks": 7}, "resize",
     pb.ResizeRequest(cache="demo", tier="host", num_blocks=7)),
    ("PUT", "/v1/tenants/chat%20room", {"limits": {"min_percent": 40, "leases_max": 2}, "revision": 3}, "set_tenant",
     pb.SetTenantRequest(tenant="chat room", revision=3, limits=pb.TenantLimits(
         min_percent=40, leases_max=2, max_percent=100, weight=1, pinned_percent_max=25))),
    ("GET", "/v1/tenants/chat", None, "get_tenant", pb.GetTenantRequest(tenant="chat")),
    ("POST", "/v1/plans", {"inputs": {"model_config": "{}"}}, "plan",
     pb.PlanRequest(inputs=pb.PlanInputs(model_config="{}"))),
    ("PUT", "/v1/caches/demo", {"inputs": INPUTS, "options": {"integrity": "none"}}, "register_cache",
     pb.RegisterCacheRequest(cache="demo", options=pb.CacheOptions(integrity="none"), inputs=pb.PlanInputs(
         layers=[pb.LayerSpec(**LAYER)], tokens_per_block=16, device_blocks=8))),
    ("GET", "/v1/caches/demo", None, "get_cache", pb.GetCacheRequest(cache="demo")),
    ("GET", "/v1/caches", None, "list_caches", pb.ListCachesRequest()),
    ("DELETE", "/v1/caches/demo", None, "delete_cache", pb.DeleteCacheRequest(cache="demo")),
    ("DELETE", "/v1/caches/demo?purge=1", None, "delete_cache", pb.DeleteCacheRequest(cache="demo", purge=True)),
    ("POST", "/v1/caches/demo/workers", {"worker_name": "w", "rank": 1, "engine": "e", "lease_ids": PACKED,
      "magazine": "m"}, "attach",
     pb.AttachRequest(cache="demo", worker_name="w", rank=1, engine="e", magazine="m",
                      lease_ids=(5).to_bytes(8, "little"))),
    ("DELETE", "/v1/workers/self", None, "detach", pb.DetachRequest()),
    ("DELETE", "/v1/workers/7?force=1", None, "detach", pb.DetachRequest(worker_id=7, force=True)),
    ("DELETE", "/v1/workers/7?force=true", None, "detach", pb.DetachRequest(worker_id=7, force=True)),
    ("DELETE", "/v1/workers/7?force=false", None, "detach", pb.DetachRequest(worker_id=7)),
    ("POST", "/v1/workers/self/heartbeat", {"lease_ids": PACKED, "newest_lease_id": 5}, "heartbeat",
     pb.HeartbeatRequest(lease_ids=(5).to_bytes(8, "little"), newest_lease_id=5)),
    ("POST", "/v1/leases", {"request_id": "r", "keys": KEY_TEXT, "num_tokens": 64, "wait_ms": 5}, "reserve",
     pb.ReserveRequest(request_id="r", keys=KEY, num_tokens=64, wait_ms=5)),
    ("POST", "/v1/leases", {"request_id": "r", "token_ids": [1, 258]}, "reserve",
     pb.ReserveRequest(request_id="r", token_ids=b"\1\0\0\0\2\1\0\0")),
    ("POST", "/v1/leases/5/map", None, "map", pb.MapRequest(lease_id=5)),
    ("POST", "/v1/leases/5/map", {}, "map", pb.MapRequest(lease_id=5)),
    ("POST", "/v1/leases/5/extend", {"num_tokens": 9}, "extend", pb.ExtendRequest(lease_id=5, num_tokens=9)),
    ("POST", "/v1/leases", {"request_id": "r", "num_tokens": 4, "priority": "high", "retain_seconds": 60}, "reserve",
     pb.ReserveRequest(request_id="r", num_tokens=4, priority="high", retain_seconds=60)),
    ("POST", "/v1/leases", {"request_id": "r", "num_tokens": 4, "retain_priority": 0}, "reserve",
     pb.ReserveRequest(request_id="r", num_tokens=4, retain_priority=0)),
    ("POST", "/v1/leases/5/fork", {"request_id": "s", "num_tokens": 9, "wait_ms": 3}, "fork",
     pb.ForkRequest(lease_id=5, request_id="s", num_tokens=9, wait_ms=3)),
    ("POST", "/v1/leases/5/trim", {"num_tokens": 9}, "trim", pb.TrimRequest(lease_id=5, num_tokens=9)),
    ("POST", "/v1/leases/5/commit", {"num_tokens": 16, "first_block": 1, "keys": KEY_TEXT}, "commit",
     pb.CommitRequest(lease_id=5, num_tokens=16, first_block=1, keys=KEY)),
    ("POST", "/v1/leases/5/evict", {"wait_ms": 3}, "evict", pb.EvictRequest(lease_id=5, wait_ms=3)),
    ("POST", "/v1/leases/5/reload", {}, "reload", pb.ReloadRequest(lease_id=5)),
    ("DELETE", "/v1/leases/5", None, "release", pb.ReleaseRequest(lease_id=5)),
    ("GET", "/v1/leases/5/explanation?cache=demo", None, "explain", pb.ExplainRequest(lease_id=5, cache="demo")),
    ("POST", "/v1/leases", {"request_id": "r", "explain": True}, "reserve",
     pb.ReserveRequest(request_id="r", explain=True)),
    ("POST", "/v1/lookup", {"keys": KEY_TEXT}, "lookup", pb.LookupRequest(keys=KEY)),
    ("POST", "/v1/pins", {"keys": KEY_TEXT}, "pin", pb.PinRequest(keys=KEY)),
    ("DELETE", "/v1/pins/9", None, "unpin", pb.UnpinRequest(pin_id=9)),
    ("POST", "/v1/evict", {"num_blocks": 3}, "evict", pb.EvictRequest(num_blocks=3)),
    ("POST", "/v1/reload", {"keys": KEY_TEXT}, "reload", pb.ReloadRequest(keys=KEY)),
    ("POST", "/v1/magazine/exchange", {"hold_keys": KEY_TEXT, "take_new": 3, "brings": True, "sequence": 5}, "exchange",
     pb.ExchangeRequest(hold_keys=KEY, take_new=3, brings=True, sequence=5)),
    ("GET", "/v1/magazine", None, "inventory", pb.InventoryRequest()),
    ("POST", "/v1/step", {"verbs": "AQ==", "lease_ids": PACKED, "reserves": [{"request_id": "r"}]}, "step",
     pb.StepRequest(verbs=b"\1", lease_ids=(5).to_bytes(8, "little"),
                    reserves=[pb.ReserveRequest(request_id="r")])),
    *(("GET", f"/v1/caches/demo/{what}?limit=5&after_id=7", None, "inspect",
       pb.InspectRequest(cache="demo", what=what, limit=5, after_id=7))
      for what in ("workers", "leases", "pins", "waiting", "tenants", "magazines")),
    ("GET", "/v1/stats?cache=demo", None, "stats", pb.StatsRequest(cache="demo")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "verb", "request_"),
    [
        pytest.param(*words, id=f"{words[0]} {words[1]} {number}")
        for number, words in enumerate(WORDS)
    ],
)
async def test_route_is_its_verb(
    served: Served, method: str, path: str, body: object, verb: str, request_: Message
) -> None:
    """A route calls its verb with the message that the same words make in the protocol."""
    answer = await http(served, method, path, body)

    assert answer.status == 200, answer.body
    assert served.daemon.calls[0][:2] == (verb, request_)


def test_every_verb_has_a_route() -> None:
    """REST offers all that the protocol offers."""
    verbs = {field.name for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields}

    assert {route.verb for route in ROUTES} == verbs
    assert {words[3] for words in WORDS} == verbs - {"watch", "trace"}


async def test_response_is_the_message_with_defaults(served: Served) -> None:
    """Every field is there, also those that are zero; bytes are base64, ids are plain numbers."""
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
    """HTTP says whether a registration created anything."""
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


async def test_refusal_is_a_problem_document(served: Served) -> None:
    """A refusal carries every number, and when to come back in whole seconds that are not too few."""
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
    ("POST", "/v1/leases", {}, {"KVLease-Epoch": "-1"}, 422, "INVALID"),
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


@pytest.mark.parametrize("written", ["yes", "2", "", "True"])
async def test_flag_says_how_it_is_written(served: Served, written: str) -> None:
    """What is neither true nor false is refused with the words that are."""
    answer = await http(served, "GET", f"/v1/events?with_snapshot={written}")

    assert answer.json["detail"] == (
        f"with_snapshot must be true or false, or 1 or 0, not {written!r}"
    )


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
    """Where several parameters are numbers, the refusal says which of them is wrong."""
    answer = await http(served, "GET", "/v1/caches/main/leases?after_id=3&limit=-1")

    assert (answer.status, answer.json["code"], answer.json["resource"]) == (
        422,
        "INVALID",
        "limit",
    )
    assert answer.json["detail"].startswith("limit is ")


async def raw(served: Served, sent: bytes) -> HttpAnswer:
    """Send bytes as they are; returns what came until the connection was closed."""
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    return HttpAnswer(int(head.split()[1]) if head else 0, {}, body)


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
    """Even what HTTP itself refuses is explained the same way, and nobody can fill the log with it."""
    answer = await raw(served, sent)

    assert (answer.status, answer.json["status"]) == (status, status)
    assert caplog.records == []
    assert answer.body.count(b"HTTP/1.1") == 0


async def test_chunked_body_is_bounded_while_it_is_read(served: Served) -> None:
    """A body that does not say its length is refused when it passes the limit, not when it ends."""
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    head = b"POST /v1/leases HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"

    answer = await raw(served, head + 4 * chunk)

    assert (answer.status, answer.json["code"]) == (413, "TOO_LARGE")


async def test_refused_body_is_told_its_length(served: Served) -> None:
    """A body that says its length is refused with that length, however little of it was read."""
    answer = await http(served, "POST", "/v1/leases", b" " * 1_000_000)

    assert (answer.status, answer.json["need"], answer.json["limit"]) == (413, 1_000_000, 65_536)


def hurry(served: Served, monkeypatch: pytest.MonkeyPatch, deadline: str) -> None:
    """Have one deadline of REST be over at once."""
    for server in served.rest._servers:
        monkeypatch.setattr(server._protocol, deadline, 0.01)


async def test_body_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that stops in the middle of a body gets an answer."""
    hurry(served, monkeypatch, "body_seconds_max")
    head = b"POST /v1/leases HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{"

    assert (await raw(served, head)).status == 422


async def test_head_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection on which no request begins is closed."""
    hurry(served, monkeypatch, "head_seconds_max")

    assert (await raw(served, b"GET / HT")).status == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7070"])
async def test_page_of_another_host_is_refused(served: Served, host: str) -> None:
    """A name that a web page had resolved to loopback does not reach the daemon over TCP."""
    answer = await http(served, "GET", "/v1/stats", headers={"Host": host}, over_tcp=True)

    assert (answer.status, answer.json["resource"]) == (422, "host")


async def test_tcp_is_loopback(served: Served) -> None:
    """REST on TCP answers on 127.0.0.1 under each of its names."""
    for host in ("127.0.0.1", "localhost:1", "[::1]:7070"):
        assert (
            await http(served, "GET", "/v1/stats", headers={"Host": host}, over_tcp=True)
        ).status == 200


async def test_waiting_call_is_answered(served: Served) -> None:
    """A call that the daemon makes wait is answered when the daemon does."""
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
    """A call that cannot stop at once, as the making of a plan, is given up, and nobody is alarmed."""
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

    assert "nobody foresaw" not in capsys.readouterr().out
    assert 'code="UNAVAILABLE"' in (await served.metrics.scrape()).decode()


async def test_events_are_server_sent(served: Served) -> None:
    """Each event carries its number and kind; a browser that reconnects goes on where it was."""
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
    assert b"id: 2\nevent: k2\ndata: {" in received
    assert b"event: k1" not in received


async def test_traces_are_server_sent(served: Served) -> None:
    """Each request is an event without a number, for a trace does not go on where it was; the caller is known."""
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
    """What ends a stream later is its last event."""
    served.daemon.events = [pb.WatchResponse(sequence=1, kind="a"), UnknownCacheError()]

    answer = await http(served, "GET", "/v1/events")

    assert b"event: problem\ndata: {" in answer.body
    assert b"UNKNOWN_CACHE" in answer.body


async def test_stop_ends_streams(served: Served) -> None:
    """A stream that nobody ends does not hold the daemon up when it stops."""
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
    """A probe's status says it to machines, its text to people."""
    served.daemon.readiness = (is_ready, "draining")

    answer = await http(served, "GET", path)

    assert answer.status == status
    assert (b"draining" in answer.body) == (path != "/livez")


@pytest.mark.parametrize("written", ["9" * 20, "9" * 5_000, "one"])
async def test_number_of_a_path_is_refused_with_its_bounds(served: Served, written: str) -> None:
    """A number too long to be an id is told as that, and not that it is none; only its beginning is repeated."""
    answer = await http(served, "DELETE", f"/v1/leases/{written}")

    assert answer.status == 422
    assert b"lease_id must be an integer from -9999999999999999 to 9999999999999999" in answer.body
    assert len(answer.body) < 1_000


async def test_started_is_for_good(served: Served) -> None:
    """A daemon that was ready once does not start again when it drains."""
    await http(served, "GET", "/startupz")
    served.daemon.readiness = (False, "draining")

    assert (await http(served, "GET", "/startupz")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "argument"),
    [
        pytest.param("PUT", "/v1/caches/", "cache", id="no name"),
        pytest.param("POST", "/v1/caches//workers", "cache", id="no name amid a path"),
        pytest.param("GET", "/v1/caches/main/foo", "what", id="no such list"),
        pytest.param("GET", "/v1/tenants/", "tenant", id="no tenant"),
        pytest.param("DELETE", "/v1/pins/", "pin_id", id="no pin"),
        pytest.param("POST", "/v1/nothing/", "path", id="no route"),
    ],
)
async def test_argument_that_no_path_can_carry_is_named(
    served: Served, method: str, path: str, argument: str
) -> None:
    """The caller passed an argument, not a path, and learns which one is wrong."""
    answer = await http(served, method, path)

    assert (answer.json["code"], answer.json["resource"]) == ("INVALID", argument)


def test_client_knows_the_lists_that_have_paths() -> None:
    """It refuses the others before a path is made of them."""
    listed = [what for route in ROUTES for name, what in route.settled if name == "what"]

    assert listed == list(LISTED)


@pytest.mark.parametrize("tenant", ["team/a b", "team/a/", "/", "a" + 30 * "/b"])
async def test_tenant_may_have_a_slash_in_its_name(served: Served, tenant: str) -> None:
    """Whoever may attach under a name may be given limits under it."""
    answer = await http(served, "GET", f"/v1/tenants/{quote(tenant, safe='')}")

    assert (answer.status, served.daemon.calls[0][1]) == (200, pb.GetTenantRequest(tenant=tenant))


async def test_start_is_over_even_when_the_first_probe_meets_a_drain(served: Served) -> None:
    """Who asks late is not told that a daemon which ends has never started."""
    served.rest.note_start()
    served.daemon.readiness = (False, "draining")

    assert (await http(served, "GET", "/startupz")).status == 200
    assert (await http(served, "GET", "/readyz")).status == 503


async def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection too many is told so."""
    monkeypatch.setattr(served.rest._servers[0].places, "members_max", 0)

    answer = await raw(served, b"")

    assert (answer.status, answer.json["code"]) == (429, "BUSY")


async def test_refused_method_names_those_that_there_are(served: Served) -> None:
    """A path that several routes have allows the methods of all of them."""
    answer = await http(served, "OPTIONS", "/v1/caches/demo")

    assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET, PUT")


async def test_boundless_body_is_refused_unread(served: Served) -> None:
    """A body far above the limit is refused by its head, and its connection ends: not even to pass it over is free."""
    head = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    answer = await raw(served, head + b"Content-Length: 1099511627776\r\n\r\n")

    assert (answer.status, answer.json["need"], answer.json["limit"]) == (413, 1 << 40, 65536)


async def test_who_sends_a_boundless_body_sees_its_refusal(served: Served) -> None:
    """A body is passed over for a while, so that a caller who sends all of it before he reads has his answer."""
    head = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b" " * (8 << 20)

    answer = await raw(served, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    assert (answer.status, answer.json["need"], answer.json["limit"]) == (413, 8 << 20, 65536)


async def test_kernel_keeps_little_for_who_does_not_read(served: Served) -> None:
    """What is written to a peer before it reads is bounded, in the kernel, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.rest.http_port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    (connection,) = served.rest._servers[1]._server.server_state.connections
    kept = connection.transport.get_extra_info("socket")

    # Linux doubles what it is asked for.
    assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * http_server.UNSENT_BYTES_MAX
    writer.close()


async def test_no_answer_is_written_to_a_connection_that_has_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a peer leaves several answers unread until its connection ends, the one under way is told, not the last."""
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
    """Who uses up the connections of TCP leaves those of the Unix socket."""
    _, over_tcp = served.rest._servers
    monkeypatch.setattr(over_tcp.places, "members_max", 0)
    headers = {"Authorization": "Bearer known"}

    assert (await http(served, "GET", "/v1/stats", over_tcp=True, headers=headers)).status == 429
    assert (await http(served, "GET", "/v1/stats")).status == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/caches HTTP/1.1\r\n", 422),
        (b"GET /v1/caches HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 422),
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
    """Over loopback a call names loopback, once: in its Host, or in its whole address, beside which no Host counts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.rest.http_port)
    writer.write(head + b"Authorization: Bearer a\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        said = await reader.read()

    writer.close()
    assert said.split()[1] == b"%d" % status
    assert (b'"resource":"host"' in said) is (status != 200)


async def test_two_authorizations_are_refused(served: Served) -> None:
    """Whose word counts is not left to which of two headers is looked at last."""
    head = b"GET /v1/caches HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\nConnection: close\r\n\r\n"

    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    writer.write(head)
    async with asyncio.timeout(10):
        said = await reader.read()

    writer.close()
    assert b" 422 " in said
    assert b"two Authorization headers" in said


async def test_body_that_nobody_reads_has_a_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a call is refused at its head, its body does not hold the connection."""
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
    """Who asks and does not read is disconnected."""
    hurry(served, monkeypatch, "idle_seconds_max")
    served.daemon.script["stats"] = pb.StatsResponse(caches=[pb.CacheStats(cache="c" * (4 << 20))])
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)

    writer.write(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
    async with asyncio.timeout(10):
        while served.rest._servers[0].num_connections:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)

    writer.close()
    assert reader is not None
