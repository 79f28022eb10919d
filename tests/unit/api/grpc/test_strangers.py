"""Laws of who gets a place over gRPC: the head of a call decides, and nobody takes another's place."""

import asyncio
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1.kvlease_pb2_grpc import KVLeaseServiceStub
from kvleased.access.roles import Role
from kvleased.api.grpc.calls import CALLS_OF_STRANGERS_MAX
from tests.unit.api.guarded import Guarded, explained, guarded

CALLS_MAX = 4
SECONDS = 10


@pytest.fixture
async def serving() -> AsyncIterator[Guarded]:
    """A daemon with few places that waits long for messages."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        limits = {"max_connections": CALLS_MAX, "body_seconds_max": 300.0}
        async with guarded(Path(directory) / "run", **limits) as found:
            yield found


@pytest.fixture
async def tcp(serving: Guarded) -> AsyncIterator[grpc.aio.Channel]:
    """A channel over TCP."""
    async with grpc.aio.insecure_channel(_tcp_address(serving)) as channel:
        yield channel


@pytest.fixture
async def others_tcp(serving: Guarded) -> AsyncIterator[grpc.aio.Channel]:
    """A channel over TCP on a connection of its own, since a connection has only so many streams."""
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(_tcp_address(serving), options=alone) as channel:
        yield channel


def _tcp_address(serving: Guarded) -> str:
    return f"127.0.0.1:{serving.grpc.grpc_port}"


@pytest.fixture
async def local(serving: Guarded) -> AsyncIterator[grpc.aio.Channel]:
    """A channel over the Unix socket."""
    async with grpc.aio.insecure_channel(f"unix:{serving.settings.grpc_socket}") as channel:
        yield channel


def headless(channel: grpc.aio.Channel, token: str = "") -> grpc.aio.StreamUnaryCall[bytes, bytes]:
    """Send the head of a call without a message."""
    metadata = _shown(token) if token else ()
    return channel.stream_unary("/kvlease.v1.KVLeaseService/ListCaches")(metadata=metadata)


def _shown(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


async def refusal_of(call: grpc.aio.Call) -> tuple[str, str]:
    """Return the code and the resource with which a call ends."""
    async with asyncio.timeout(SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    return explained(caught.value)


async def ending_of(stream: grpc.aio.Call) -> tuple[str, str]:
    """Return the code and the resource with which a stream ends, whatever it sends before."""
    async with asyncio.timeout(SECONDS):
        try:
            while await stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return explained(error)
    return "OK", ""


async def lists(channel: grpc.aio.Channel, token: str = "") -> int:
    """Return the number of caches."""
    metadata = _shown(token) if token else ()
    request = pb.ListCachesRequest()
    answer = await KVLeaseServiceStub(channel).ListCaches(
        request, metadata=metadata, timeout=SECONDS
    )
    return len(answer.caches)


async def test_stranger_is_refused_before_the_message(tcp: grpc.aio.Channel) -> None:
    """A caller without permission is refused when the head is here, and no message is waited for."""
    assert await refusal_of(headless(tcp)) == ("UNKNOWN_WORKER", "token")


async def test_watches_of_strangers_take_nobodys_place(
    serving: Guarded,
    tcp: grpc.aio.Channel,
    others_tcp: grpc.aio.Channel,
    local: grpc.aio.Channel,
) -> None:
    """However many strangers watch, a caller with a token or on the Unix socket is served."""
    watches = [HealthStub(tcp).Watch(HealthCheckRequest(service=str(n))) for n in range(64)]
    for watch in watches[-CALLS_OF_STRANGERS_MAX:]:
        with suppress(grpc.aio.AioRpcError):  # A stranger is refused at once if none waits yet.
            await watch.read()

    assert await lists(local) == 1
    assert await lists(others_tcp, serving.tokens[Role.OPERATOR]) == 1


async def test_newest_stranger_takes_the_place_of_the_oldest(tcp: grpc.aio.Channel) -> None:
    """Strangers have few places, and one who holds a place for long gives way, so a probe is always answered."""
    watches = []
    for _ in range(CALLS_OF_STRANGERS_MAX):
        watches.append(HealthStub(tcp).Watch(HealthCheckRequest()))
        await watches[-1].read()

    checked = await HealthStub(tcp).Check(HealthCheckRequest(), timeout=SECONDS)

    assert checked.status in HealthCheckResponse.ServingStatus.values()
    assert await ending_of(watches[0]) == ("BUSY", "calls")
    assert not any(watch.done() for watch in watches[1:])


async def test_reflection_of_strangers_gives_way(tcp: grpc.aio.Channel) -> None:
    """A reflection call holds a place while its caller is silent, and gives way, too."""
    stub = reflection_pb2_grpc.ServerReflectionStub(tcp)
    asked = stub.ServerReflectionInfo()
    await asked.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await asked.read()
    for _ in range(CALLS_OF_STRANGERS_MAX):
        await HealthStub(tcp).Watch(HealthCheckRequest()).read()

    assert await ending_of(asked) == ("BUSY", "calls")


async def test_strangers_who_do_not_read_shut_out_strangers_alone(
    serving: Guarded, tcp: grpc.aio.Channel
) -> None:
    """When strangers who do not read hold all places, one more stranger is refused, and nobody with a token is."""
    with unread(serving) as stuck:
        code = ""
        async with asyncio.timeout(SECONDS):
            while code != "BUSY":
                code = await checks(tcp)
        assert await lists(tcp, serving.tokens[Role.OPERATOR]) == 1

        stuck.close()
        async with asyncio.timeout(SECONDS):
            while code == "BUSY":
                code = await checks(tcp)


async def test_strangers_who_do_not_read_lose_their_connections(
    serving: Guarded, tcp: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who does not read loses the place after too long, and so do all calls on that connection."""
    # However slow a busy machine answers, no call is too old before the test says so.
    monkeypatch.setattr("kvleased.api.grpc.calls.UNREAD_SECONDS_MAX", 300.0)
    with unread(serving) as stuck:
        async with asyncio.timeout(SECONDS):
            while await checks(tcp) != "BUSY":
                pass

        monkeypatch.setattr("kvleased.api.grpc.calls.UNREAD_SECONDS_MAX", 0.0)

        async with asyncio.timeout(SECONDS):
            # Not before a look has found the connection.
            while await checks(tcp) != "OK":
                pass
        await asyncio.to_thread(read_to_end, stuck)


async def test_token_makes_a_connection_a_members(
    serving: Guarded, tcp: grpc.aio.Channel, others_tcp: grpc.aio.Channel
) -> None:
    """A caller who shows a token has a member's place, even if the call is refused; without one, a stranger's."""
    places = serving.grpc.places["grpc_tcp"]
    await checks(others_tcp)
    with pytest.raises(grpc.aio.AioRpcError):
        await KVLeaseServiceStub(tcp).Drain(
            pb.DrainRequest(), metadata=_shown(serving.tokens[Role.READER]), timeout=SECONDS
        )
    async with asyncio.timeout(SECONDS):
        while places.num_strangers == 0:
            await checks(others_tcp)

    assert (places.num_members, places.num_strangers) == (1, 1)


async def test_one_member_too_many_is_told(serving: Guarded) -> None:
    """When members hold all places, one more token is refused with the reason; those with a place keep it."""
    token = serving.tokens[Role.READER]
    alone = [("grpc.use_local_subchannel_pool", 1)]
    address = _tcp_address(serving)
    channels = [grpc.aio.insecure_channel(address, options=alone) for _ in range(CALLS_MAX + 1)]
    for channel in channels[:CALLS_MAX]:
        await lists(channel, token)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lists(channels[-1], token)

    assert explained(refused.value) == ("BUSY", "connections")
    assert f"{CALLS_MAX} connections are open" in str(refused.value.details())
    assert "max_connections" in str(refused.value.details())
    assert await lists(channels[0], token) == 1
    for channel in channels:
        await channel.close()


async def test_no_role_takes_the_places_of_another(serving: Guarded, tcp: grpc.aio.Channel) -> None:
    """A caller whose role has no place left is refused, and nobody else is; a place is free when its call ends."""
    reader = serving.tokens[Role.READER]
    calls = [headless(tcp, reader) for _ in range(CALLS_MAX + 1)]
    codes = [asyncio.ensure_future(call.code()) for call in calls]

    async with asyncio.timeout(SECONDS):
        await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = [call for call in calls if call.done()]

    assert await refusal_of(refused) == ("BUSY", "calls")
    assert await lists(tcp, serving.tokens[Role.OPERATOR]) == 1
    for call in calls:
        call.cancel()
    async with asyncio.timeout(SECONDS):
        while not await _succeeds(tcp, reader):
            pass


async def test_message_must_come_in_time() -> None:
    """A caller who never sends a message loses the place, on the Unix socket, too."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run", body_seconds_max=0.2) as serving:
            path = f"unix:{serving.settings.grpc_socket}"
            async with grpc.aio.insecure_channel(path) as local:
                assert await refusal_of(headless(local)) == ("INVALID", "message")
                assert await lists(local) == 1


async def test_each_message_has_as_long() -> None:
    """One timer serves all calls, and each call ends after its own time, whichever came before it."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run", body_seconds_max=0.2) as serving:
            address = f"unix:{serving.settings.grpc_socket}"
            async with grpc.aio.insecure_channel(address) as channel:
                first = headless(channel)
                await asyncio.sleep(0.1)
                second = headless(channel)

                assert await refusal_of(first) == ("INVALID", "message")
                assert await refusal_of(second) == ("INVALID", "message")
                assert await refusal_of(headless(channel)) == ("INVALID", "message")


async def test_call_without_a_message_is_refused(local: grpc.aio.Channel) -> None:
    """A caller who closes the sending side without a message is told that one is missing."""
    call = headless(local)
    await call.done_writing()

    assert await refusal_of(call) == ("INVALID", "message")


@contextmanager
def unread(serving: Guarded) -> Iterator[socket.socket]:
    """A connection whose peer reads no answer, with calls that take all places of strangers.

    It makes more calls than there are places: one may come while a probe has a place, and be refused for it.
    """
    num_calls = 2 * CALLS_OF_STRANGERS_MAX
    head = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in {
            b":method": b"POST", b":scheme": b"http", b":path": b"/grpc.health.v1.Health/Check",
            b":authority": b"x", b"content-type": b"application/grpc", b"te": b"trailers",
        }.items()
    )  # fmt: skip
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, struct.pack(">HI", 4, 0))
    for number in range(num_calls):
        sent += _frame(1, 4, 2 * number + 1, head) + _frame(0, 1, 2 * number + 1, bytes(5))
    with socket.create_connection(("127.0.0.1", serving.grpc.grpc_port), timeout=SECONDS) as stuck:
        stuck.sendall(sent)
        yield stuck


def read_to_end(sock: socket.socket) -> None:
    """Read until the other end has closed."""
    with suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass


async def checks(channel: grpc.aio.Channel) -> str:
    """Return the code of the answer to a probe."""
    try:
        await HealthStub(channel).Check(HealthCheckRequest(), timeout=SECONDS)
    except grpc.aio.AioRpcError as error:
        return explained(error)[0]
    return "OK"


async def _succeeds(channel: grpc.aio.Channel, token: str) -> bool:
    try:
        await lists(channel, token)
    except grpc.aio.AioRpcError:
        return False
    return True


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )
