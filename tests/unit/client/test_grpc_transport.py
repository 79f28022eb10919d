"""Laws of the gRPC transport, over a real server of the generated service."""
# ruff: noqa: ARG002, N802 - names and parameters are those of the generated service

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from kvlease.errors import (
    DeadlineError,
    InvalidError,
    PoolFullError,
    UnavailableError,
    UnknownCacheError,
)
from kvlease.transports.base import Outgoing, parse_address
from kvlease.transports.grpc import AsyncGrpcTransport, GrpcTransport
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc


class Service(kvlease_pb2_grpc.KVLeaseServiceServicer):
    """A service in which each method has one behaviour."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.release = threading.Event()

    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        """Answer, and keep the metadata."""
        self.metadata = {name: str(value) for name, value in context.invocation_metadata()}
        return pb.ReleaseResponse(released=request.lease_id == 5)

    def Reserve(
        self, request: pb.ReserveRequest, context: grpc.ServicerContext
    ) -> pb.ReserveResponse:
        """Refuse with details."""
        details = [Packed(), Packed()]
        details[0].Pack(
            ErrorInfo(
                reason="POOL_FULL", domain="kvlease", metadata={"resource": "blocks", "need": "5"}
            )
        )
        details[1].Pack(RetryInfo(retry_delay=Duration(nanos=50_000_000)))
        status = Status(
            code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full", details=details
        )
        context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        """Say nothing."""
        self.release.wait(5)
        return pb.LookupResponse()

    def Watch(
        self, request: pb.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchResponse]:
        """Yield three events, then say nothing."""
        yield from (pb.WatchResponse(sequence=number) for number in range(3))
        self.release.wait(5)

    def Trace(
        self, request: pb.TraceRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.TraceResponse]:
        """Begin to answer if the cache is called quiet, and say nothing more."""
        if request.cache == "quiet":
            context.send_initial_metadata(())
        self.release.wait(5)
        yield from ()


@pytest.fixture
def service() -> Service:
    """Give the service."""
    return Service()


@pytest.fixture
def address(service: Service, tmp_path: Path) -> Iterator[str]:
    """Serve it at a Unix socket."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        kvlease_pb2_grpc.add_KVLeaseServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
        server.add_insecure_port(f"unix://{tmp_path}/grpc.sock")
        server.start()
        yield f"grpc+unix://{tmp_path}/grpc.sock"
        service.release.set()
        server.stop(0).wait()


@pytest.fixture(params=["blocking", "async"])
def send(request: pytest.FixtureRequest, address: str) -> Iterator[Callable[[Outgoing], Message]]:
    """Give the send functions of both transports in turn."""
    if request.param == "blocking":
        transport = GrpcTransport(parse_address(address))
        yield transport.send
        transport.close()
    else:
        with asyncio.Runner() as runner:
            other = AsyncGrpcTransport(parse_address(address))
            yield lambda outgoing: runner.run(other.send(outgoing))
            runner.run(other.close())


def call(verb: str, request: Message, *, seconds: float = 5.0, **who: Any) -> Outgoing:
    """Return a call of the transports."""
    return Outgoing(verb, request, time.monotonic() + seconds, **who)


def test_call_carries_who_sends_it(service: Service, send: Callable[[Outgoing], Message]) -> None:
    """Token, key, epoch and an operator's cache travel as metadata."""
    response = send(
        call(
            "release",
            pb.ReleaseRequest(lease_id=5),
            token="t",
            epoch=4,
            idempotency_key="k",
            cache="c",
        )
    )

    assert response == pb.ReleaseResponse(released=True)
    sent = (
        service.metadata[name]
        for name in ("authorization", "kvlease-epoch", "idempotency-key", "kvlease-cache")
    )
    assert tuple(sent) == ("Bearer t", "4", "k", "c")


@pytest.mark.parametrize("cache", ["é", "a\nb", "\x7f"])
def test_cache_that_metadata_cannot_carry_is_unknown(
    send: Callable[[Outgoing], Message], cache: str
) -> None:
    """No cache has such a name; the refusal is the daemon's over other transports, and no retry follows it."""
    with pytest.raises(
        UnknownCacheError, match=re.escape(f"there is no cache {cache!r}; register")
    ):
        send(call("release", pb.ReleaseRequest(lease_id=5), cache=cache))


def test_cache_of_a_long_name_is_unknown(send: Callable[[Outgoing], Message]) -> None:
    """A name that metadata cannot carry is refused as over the local socket, with the most allowed."""
    with pytest.raises(UnknownCacheError, match="65536 characters, at most 63") as refusal:
        send(call("release", pb.ReleaseRequest(lease_id=5), cache="x" * 65536))

    assert (refusal.value.resource, refusal.value.limit) == ("cache", 63)


def test_details_become_the_error(send: Callable[[Outgoing], Message]) -> None:
    """ErrorInfo and RetryInfo arrive as the error with its numbers."""
    with pytest.raises(PoolFullError, match="full") as caught:
        send(call("reserve", pb.ReserveRequest()))

    assert (caught.value.resource, caught.value.need, caught.value.retry_after_ms) == (
        "blocks",
        5,
        50,
    )


def test_silent_service_ends_at_the_deadline(send: Callable[[Outgoing], Message]) -> None:
    """A service that does not answer costs its caller the deadline."""
    with pytest.raises(DeadlineError):
        send(call("lookup", pb.LookupRequest(), seconds=0.1))


def test_method_that_is_not_there_is_invalid(send: Callable[[Outgoing], Message]) -> None:
    """A daemon without the method is told from a daemon that is away."""
    with pytest.raises(InvalidError):
        send(call("pin", pb.PinRequest()))


def test_absent_service_is_unavailable(tmp_path: Path) -> None:
    """Where nothing listens, the call fails at once and says where."""
    transport = GrpcTransport(parse_address(f"grpc+unix://{tmp_path}/none.sock"))

    with pytest.raises(
        UnavailableError,
        match=r"none\.sock cannot be reached .*; check its address, and that it is running",
    ):
        transport.send(call("lookup", pb.LookupRequest()))
    transport.close()


def answer_in_http(listener: socket.socket) -> socket.socket:
    """Answer one connection as a server of HTTP/1.1 answers what it cannot read; return it, still open."""
    connection = listener.accept()[0]
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    return connection


def test_service_of_another_protocol_is_told(tmp_path: Path) -> None:
    """An answer that is no gRPC is explained in our own words, not in gRPC's words of frames."""
    transport = GrpcTransport(parse_address(f"grpc+unix://{tmp_path}/http.sock"))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "http.sock"))
        listener.listen()
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer_in_http, listener)
            with pytest.raises(UnavailableError, match=r"does not speak gRPC\); check its address"):
                transport.send(call("lookup", pb.LookupRequest()))
    answered.result().close()
    transport.close()


def test_watch_ends_when_nothing_more_comes(address: str) -> None:
    """Events come one by one; a stream that falls silent ends after its idle time."""
    transport = GrpcTransport(parse_address(address))

    events = list(transport.stream(call("watch", pb.WatchRequest()), 0.2))

    transport.close()
    assert [event.sequence for event in events] == [0, 1, 2]


async def test_async_watch_ends_when_nothing_more_comes(address: str) -> None:
    """The same holds on an event loop."""
    transport = AsyncGrpcTransport(parse_address(address))

    events = [event async for event in transport.stream(call("watch", pb.WatchRequest()), 0.2)]

    await transport.close()
    assert [event.sequence for event in events] == [0, 1, 2]


@pytest.mark.parametrize("idle_seconds", [0.01, None])
def test_stream_of_a_hung_service_ends_at_its_deadline(
    address: str, idle_seconds: float | None
) -> None:
    """A stream ends at its deadline if the daemon does not begin to answer, however long it would wait for events."""
    transport = GrpcTransport(parse_address(address))

    with pytest.raises(DeadlineError):
        list(transport.stream(call("trace", pb.TraceRequest(), seconds=0.2), idle_seconds))
    transport.close()


@pytest.mark.parametrize("idle_seconds", [0.01, None])
async def test_async_stream_of_a_hung_service_ends_at_its_deadline(
    address: str, idle_seconds: float | None
) -> None:
    """The same holds on an event loop."""
    transport = AsyncGrpcTransport(parse_address(address))
    events = transport.stream(call("trace", pb.TraceRequest(), seconds=0.2), idle_seconds)

    with pytest.raises(DeadlineError):
        [event async for event in events]
    await transport.close()


async def test_quiet_stream_goes_on_past_its_deadline(address: str) -> None:
    """A stream that has begun ends only after its longest idle time."""
    transport = GrpcTransport(parse_address(address))
    other = AsyncGrpcTransport(parse_address(address))
    request = pb.TraceRequest(cache="quiet")

    began = time.monotonic()
    assert list(transport.stream(call("trace", request, seconds=0.2), 0.3)) == []
    assert [one async for one in other.stream(call("trace", request, seconds=0.2), 0.3)] == []
    assert time.monotonic() - began >= 0.6
    transport.close()
    await other.close()


def test_close_amid_calls_of_other_threads_is_unavailable(address: str) -> None:
    """What gRPC says to a caller whose channel another thread has closed is no KVLeaseError; a retry needs one."""
    transport = GrpcTransport(parse_address(address))
    failures: list[BaseException] = []
    ends_at = time.monotonic() + 0.5

    def calls() -> None:
        while time.monotonic() < ends_at:
            until = time.monotonic() + 5
            try:
                transport.send(Outgoing("release", pb.ReleaseRequest(lease_id=5), until))
            except Exception as error:  # noqa: BLE001 - whatever it is
                failures.append(error)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    while time.monotonic() < ends_at:
        transport.close()
    for thread in threads:
        thread.join()
    transport.close()

    assert {type(failure) for failure in failures} == {UnavailableError}


async def test_close_amid_calls_of_other_tasks_cancels_none_of_them(address: str) -> None:
    """A task that nobody cancelled is not told that it was; one that was cancelled is."""
    transport = AsyncGrpcTransport(parse_address(address))
    until = time.monotonic() + 5

    async def watched() -> None:
        async for _ in transport.stream(Outgoing("trace", pb.TraceRequest(), until), None):
            pass

    lookup = transport.send(Outgoing("lookup", pb.LookupRequest(), until))
    tasks = [asyncio.ensure_future(lookup), asyncio.ensure_future(watched())]
    await asyncio.sleep(0.2)
    await transport.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = asyncio.create_task(watched())
    await asyncio.sleep(0.1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await transport.close()

    assert [type(one) for one in ended] == [UnavailableError] * 2
