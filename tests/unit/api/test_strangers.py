"""Laws of what strangers send over any transport: it is answered, logged seldom, and logged with its sender."""

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.roles import Role
from kvleased.api.rest.probes import ProbeServer
from tests.unit.api.guarded import Guarded, guarded

SERVICE = pb.DESCRIPTOR.services_by_name["KVLeaseService"]
UPGRADE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"


@pytest.fixture
async def serving() -> AsyncIterator[Guarded]:
    """A daemon on all transports, with a cache."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run") as found:
            yield found


async def _send(connect: Any, sent: bytes) -> bytes:
    reader, writer = await connect
    writer.write(sent)
    async with asyncio.timeout(10):
        answer: bytes = await reader.readline()
    writer.close()
    return answer


@pytest.mark.parametrize("sent", [b"\0\r\n\r\n", UPGRADE], ids=["no http", "upgrade"])
async def test_flood_over_http_is_a_line_a_listener(
    serving: Guarded, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """However many bad requests come, each listener logs them once, with their origin."""
    probes = ProbeServer(serving.rest.probes)
    await probes.start("127.0.0.1", 0)
    ports = (serving.rest.http_port, probes.port)

    with capture_logs() as lines, caplog.at_level(logging.DEBUG):
        for _ in range(20):
            for port in ports:
                await _send(asyncio.open_connection("127.0.0.1", port), sent)
            await _send(asyncio.open_unix_connection(serving.settings.http_socket), sent)
    await probes.stop()

    bad = [line for line in lines if line["event"] == "bad_http"]
    assert sorted(line["port"] for line in bad) == sorted((0, *ports))
    assert all(line["peer"].startswith("127.0.0.1:") for line in bad if line["port"])
    assert [line["peer_pid"] > 0 for line in bad if not line["port"]] == [True]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_refused_operator_is_told_over_each_transport(serving: Guarded) -> None:
    """An operator's verb with a wrong token leaves a warning that names verb, transport and peer, never the token."""
    wrong = "CANARY" + "0" * 26
    drain = SERVICE.methods_by_name["Drain"]

    with capture_logs() as over_rest:
        await serving.over_rest("POST", "/v1/drain", wrong)
    # Each verb is logged once in ten seconds, over whatever transport.
    serving.node.daemon.guard._strangers._refused.clear()
    with capture_logs() as over_grpc:
        await serving.over_grpc(drain, pb.DrainRequest(), wrong)
    serving.node.daemon.guard._strangers._refused.clear()
    with capture_logs() as over_local:
        await serving.over_local(pb.Call(call_number=1, token=wrong, drain=pb.DrainRequest()))

    told = [
        [line for line in lines if line["event"] == "caller_refused"]
        for lines in (over_rest, over_grpc, over_local)
    ]
    assert [(line["verb"], line["transport"]) for (line,) in told] == [
        ("drain", "rest"),
        ("drain", "grpc"),
        ("drain", "local"),
    ]
    assert all(line["peer"].startswith("127.0.0.1:") for (line,) in told[:2])
    assert told[2][0]["peer_pid"] > 0
    assert "CANARY" not in str(told)


@pytest.mark.parametrize(
    ("path", "role", "told"),
    [
        ("/v1/drain", Role.READER, ("drain", "NOT_YOURS", "reader", True)),
        ("/v1/drain", Role.STRANGER, ("drain", "UNKNOWN_WORKER", "stranger", False)),
        ("/v1/leases", Role.READER, ("reserve", "UNKNOWN_WORKER", "reader", True)),
        ("/v1/leases", Role.STRANGER, ("reserve", "UNKNOWN_WORKER", "stranger", False)),
    ],
)
async def test_refused_caller_is_logged_with_role_and_token(
    serving: Guarded, path: str, role: Role, told: tuple[str, str, str, bool]
) -> None:
    """A refusal is logged of workers' own calls, too, and says whether a token was there, known ones included."""
    token = serving.tokens[role]
    with capture_logs() as lines:
        await serving.over_rest("POST", path, token)

    fields = ("verb", "code", "role", "has_token")
    refused = [line for line in lines if line["event"] == "caller_refused"]
    assert [tuple(line[name] for name in fields) for line in refused] == [told]


async def test_lost_token_of_a_worker_is_not_logged(serving: Guarded) -> None:
    """An unknown token in a worker's own call is no stranger's, as far as one can tell: it ended with a daemon."""
    with capture_logs() as lines:
        await serving.over_rest("POST", "/v1/leases", "0" * 32)

    assert not [line for line in lines if line["event"] == "caller_refused"]


@pytest.mark.parametrize(
    ("token", "says"),
    [("", "no token was sent"), ("0" * 32, "this daemon does not know the token")],
)
async def test_operator_is_told_of_his_token_over_each_transport(
    serving: Guarded, token: str, says: str
) -> None:
    """An operator whose token is missing or wrong is told where to name it; a worker is told nothing of the kind."""
    _, problem = await serving.over_rest("GET", "/v1/caches", token)
    _, refused = await serving.over_rest("POST", "/v1/drain", token)
    request = pb.ListCachesRequest()
    code, resource = await serving.over_grpc(SERVICE.methods_by_name["ListCaches"], request, token)

    for told in (problem, refused):
        assert told["detail"].startswith(says)
        assert "KVLEASE_TOKEN_FILE" in told["detail"]
        assert told["code"] == "UNKNOWN_WORKER"
    assert (code, resource) == ("UNKNOWN_WORKER", "token")
    if token:
        call = pb.Call(call_number=1, token=token, list_caches=request)
        local = await serving.over_local(call)
        assert local.error.message == problem["detail"]


async def test_head_above_the_limit_is_told_so_although_more_of_it_comes(serving: Guarded) -> None:
    """A caller who is still sending a head reads the refusal, and not a reset connection."""

    def send() -> bytes:
        with socket.create_connection(("127.0.0.1", serving.rest.http_port), timeout=10) as line:
            line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nx: ")
            received = b""
            for _ in range(12):
                line.sendall(b"y" * 65_536)
            while data := line.recv(65_536):
                received += data
        return received

    received = await asyncio.to_thread(send)

    assert received.startswith(b"HTTP/1.1 431 ")
    assert b'"limit":65536' in received


async def test_head_without_end_ends(serving: Guarded) -> None:
    """The part of a head that is thrown away is bounded, too."""
    assert serving.tokens[Role.STRANGER] == ""

    def send() -> bool:
        with socket.create_connection(("127.0.0.1", serving.rest.http_port), timeout=10) as line:
            line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nx: ")
            try:
                while True:
                    line.sendall(b"y" * 65_536)
            except OSError:
                return True

    async with asyncio.timeout(20):
        assert await asyncio.to_thread(send)
