"""Laws of gRPC: every method is its verb, and every refusal carries ErrorInfo."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from kvlease.errors import NeverFitsError, PoolFullError, TooLargeError, UnknownCacheError
from kvlease.transports.base import Outgoing, parse_address
from kvlease.transports.grpc import AsyncGrpcTransport
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc
from tests.unit.api.scripted import Served

TRANSPORTS = ("grpc",)
SERVICE = pb.DESCRIPTOR.services_by_name["KVLeaseService"]
UNARY = [method for method in SERVICE.methods if not method.server_streaming]


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    """A channel over the Unix socket."""
    async with grpc.aio.insecure_channel(f"unix:{served.settings.grpc_socket}") as channel:
        yield channel


def explained(error: grpc.aio.AioRpcError) -> tuple[ErrorInfo, RetryInfo | None]:
    """Return the details of a refusal."""
    status = rpc_status.from_call(error)
    info, retry = ErrorInfo(), RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return info, retry if len(status.details) > 1 and status.details[1].Unpack(retry) else None


async def refused(
    channel: grpc.aio.Channel, packed: bytes, **options: object
) -> grpc.aio.AioRpcError:
    """Send the bytes of a reserve; return the refusal."""
    call = channel.unary_unary("/kvlease.v1.KVLeaseService/Reserve")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(packed, **options)
    return caught.value


@pytest.mark.parametrize("method", UNARY, ids=lambda method: method.name)
async def test_method_is_its_verb(
    served: Served, channel: grpc.aio.Channel, method: object
) -> None:
    """Each method calls the verb whose request it takes."""
    stub = kvlease_pb2_grpc.KVLeaseServiceStub(channel)
    request = getattr(pb, method.input_type.name)()

    response = await getattr(stub, method.name)(request)

    verb, received, caller = served.daemon.calls[0]
    assert type(getattr(pb.Call(), verb)) is type(request) is type(received)
    assert type(response).__name__ == method.output_type.name
    assert caller.transport == "grpc"


async def test_metadata_tells_the_caller(served: Served, channel: grpc.aio.Channel) -> None:
    """Token, epoch, idempotency key and cache reach the daemon, over TCP, too."""
    metadata = (
        ("authorization", "Bearer tok"), ("idempotency-key", "k"), ("kvlease-epoch", "7"), ("kvlease-cache", "c"),
    )  # fmt: skip
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc.grpc_port}") as tcp:
        for one in (channel, tcp):
            await kvlease_pb2_grpc.KVLeaseServiceStub(one).Pin(pb.PinRequest(), metadata=metadata)

    for _, _, caller in served.daemon.calls:
        assert (caller.token, caller.idempotency_key) == ("tok", "k")
        assert (caller.epoch, caller.cache) == (7, "c")


async def test_retry_info_only_when_a_retry_helps(
    served: Served, channel: grpc.aio.Channel
) -> None:
    """ErrorInfo is always there; RetryInfo is only there with a time for a retry."""
    served.daemon.script["reserve"] = PoolFullError("full", need=4, available=1, retry_after_ms=50)
    full, retry = explained(first := await refused(channel, b""))
    served.daemon.script["reserve"] = NeverFitsError(need=9, limit=8)
    never, no_retry = explained(second := await refused(channel, b""))

    assert (first.code(), first.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert (full.reason, full.domain) == ("POOL_FULL", "kvlease")
    assert dict(full.metadata) == {
        "need": "4",
        "available": "1",
        "retry_after_ms": "50",
        "retryable": "true",
    }
    assert retry is not None
    assert retry.retry_delay.ToMilliseconds() == 50
    assert (second.code(), never.metadata["limit"], no_retry) == (
        grpc.StatusCode.OUT_OF_RANGE,
        "8",
        None,
    )


@pytest.mark.parametrize(
    ("packed", "metadata", "code"),
    [
        pytest.param(b"\xff\xff", (), "INVALID", id="no message"),
        pytest.param(b"\x78\1", (), "INVALID", id="unknown field"),
        pytest.param(b"\x08\1", (), "INVALID", id="wrong type"),
        pytest.param(b"\x0a\xff\xff\x03" + b"x" * 65535, (), "TOO_LARGE", id="above the limit"),
        pytest.param(b"", (("kvlease-epoch", "x"),), "INVALID", id="epoch"),
        pytest.param(
            b"", (("kvlease-epoch", "1"), ("kvlease-epoch", "0")), "INVALID", id="two epochs"
        ),
        pytest.param(
            b"", (("kvlease-cache", "a"), ("kvlease-cache", "b")), "INVALID", id="two caches"
        ),
        pytest.param(b"", (("authorization", "tok"),), "UNKNOWN_WORKER", id="authorization"),
        pytest.param(
            b"",
            (("authorization", "Bearer a"), ("authorization", "Bearer b")),
            "INVALID",
            id="two of them",
        ),
        pytest.param(
            b"", (("idempotency-key", "a"), ("idempotency-key", "b")), "INVALID", id="two keys"
        ),
        pytest.param(
            b"", (("idempotency-key", ""), ("idempotency-key", "a")), "INVALID", id="an empty key"
        ),
    ],
)
async def test_bad_input_is_refused(
    served: Served, channel: grpc.aio.Channel, packed: bytes, metadata: object, code: str
) -> None:
    """Whatever is wrong, the answer is one of our errors, and nothing reaches the daemon."""
    info, _ = explained(await refused(channel, packed, metadata=metadata))

    assert info.reason == code
    assert not served.daemon.calls


async def test_message_above_the_limit_is_told_the_limit(
    served: Served, channel: grpc.aio.Channel
) -> None:
    """The refusal names both numbers."""
    info, _ = explained(await refused(channel, b"x" * (1 << 20)))

    assert info.reason == "TOO_LARGE"
    assert (info.metadata["need"], info.metadata["limit"]) == (
        str(1 << 20),
        str(served.settings.max_message_bytes),
    )


async def test_message_far_above_the_limit_is_not_read(channel: grpc.aio.Channel) -> None:
    """A message that is far too large is refused before it takes memory."""
    error = await refused(channel, b"x" * (9 << 20))

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (error.details() or "")


@pytest.mark.parametrize("num_bytes", [6 << 20, 9 << 20], ids=["is read", "is not"])
async def test_client_says_the_same_of_what_is_too_large(served: Served, num_bytes: int) -> None:
    """Whether the daemon or gRPC refuses a message, the client's error names both numbers and what they are."""
    address = parse_address(f"grpc+unix://{served.settings.runtime_dir}/grpc.sock")
    transport = AsyncGrpcTransport(address)
    request = pb.LookupRequest(keys=bytes(num_bytes))

    with pytest.raises(TooLargeError) as caught:
        await transport.send(Outgoing("lookup", request, time.monotonic() + 10))
    await transport.close()

    error = caught.value
    said = f"the message has at least {request.ByteSize()} bytes, but the limit is {served.settings.max_message_bytes}"
    assert (error.message.startswith(said), error.resource) == (True, "message_bytes")
    assert (error.need, error.limit) == (request.ByteSize(), served.settings.max_message_bytes)


async def test_waiting_call_is_answered(served: Served, channel: grpc.aio.Channel) -> None:
    """A call that waits in the daemon is answered when the daemon answers it."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future

    asked = kvlease_pb2_grpc.KVLeaseServiceStub(channel).Reserve(pb.ReserveRequest())
    asyncio.get_running_loop().call_later(0, future.set_result, pb.ReserveResponse(lease_id=5))

    assert (await asked).lease_id == 5


async def test_what_an_answer_leaves_is_done(served: Served, channel: grpc.aio.Channel) -> None:
    """Work that the caller need not wait for is done after the answer or refusal, and before a later call's wait."""
    stub = kvlease_pb2_grpc.KVLeaseServiceStub(channel)
    served.daemon.script["pin"] = UnknownCacheError()
    served.daemon.script["reserve"] = asyncio.get_running_loop().create_future()

    await stub.Map(pb.MapRequest())
    after_answer = served.daemon.num_settled
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Pin(pb.PinRequest())
    after_refusal = served.daemon.num_settled
    await refused(channel, b"", timeout=0.2)

    assert (after_answer, after_refusal, served.daemon.num_settled) == (1, 2, 3)


async def test_caller_that_leaves_is_forgotten(served: Served, channel: grpc.aio.Channel) -> None:
    """The daemon is told to forget a call that was cancelled."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future

    await refused(channel, b"", timeout=0.2)
    await asyncio.wait({future}, timeout=10)

    assert served.daemon.cancelled == [future]


async def test_trace_tells_who_asks(served: Served, channel: grpc.aio.Channel) -> None:
    """A trace is streamed like events, and the daemon knows whose token came with it."""
    served.daemon.events = [pb.TraceResponse(input_tokens=3), UnknownCacheError()]
    stub = kvlease_pb2_grpc.KVLeaseServiceStub(channel)
    told = stub.Trace(pb.TraceRequest(cache="demo"), metadata=[("authorization", "Bearer tok")])

    record = await told.read()
    with pytest.raises(grpc.aio.AioRpcError):
        await told.read()

    assert record.input_tokens == 3
    (verb, request, caller) = served.daemon.calls[0]
    assert (verb, request, caller.token) == ("trace", pb.TraceRequest(cache="demo"), "tok")


async def test_watch_streams_until_it_is_refused(served: Served, channel: grpc.aio.Channel) -> None:
    """Events come one by one, and the status says why the stream ends."""
    served.daemon.events = [pb.WatchResponse(sequence=1, kind="a"), UnknownCacheError()]
    events = kvlease_pb2_grpc.KVLeaseServiceStub(channel).Watch(pb.WatchRequest())

    event = await events.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events.read()

    assert event.kind == "a"
    assert explained(caught.value)[0].reason == "UNKNOWN_CACHE"


async def test_watch_without_events_tells_that_it_has_begun(
    served: Served, channel: grpc.aio.Channel
) -> None:
    """The head of the answer comes before any event, so a caller can tell a quiet daemon from one that hangs."""
    served.daemon.events = []
    events = kvlease_pb2_grpc.KVLeaseServiceStub(channel).Watch(pb.WatchRequest())

    async with asyncio.timeout(5):
        await events.initial_metadata()

    assert not events.done()
    events.cancel()


async def test_health_follows_readiness(served: Served, channel: grpc.aio.Channel) -> None:
    """The standard health service has the same status as readiness."""
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE.full_name))
    serving = await watch.read()
    served.daemon.readiness = (False, "draining")
    not_serving = await watch.read()
    watch.cancel()

    assert serving.status == health_pb2.HealthCheckResponse.SERVING
    assert not_serving.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service(channel: grpc.aio.Channel, version: str) -> None:
    """Tools find all services without their descriptions, in each version of reflection that they speak."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}

    described = {name: await _files_of(ask, name) for name in names}

    assert names >= {SERVICE.full_name, f"grpc.reflection.{version}.ServerReflection"}
    for name, files in described.items():
        package, _, service = name.rpartition(".")
        assert any(
            one.package == package and service in {made.name for made in one.service}
            for one in files
        ), name


async def _files_of(ask: Any, name: str) -> list[FileDescriptorProto]:
    """Return the files in which reflection describes a service."""
    wanted = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
    answer = await ask(iter([wanted])).read()
    packed = answer.file_descriptor_response.file_descriptor_proto
    return [FileDescriptorProto.FromString(one) for one in packed]
