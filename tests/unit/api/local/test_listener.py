"""Laws of the local socket: frames, descriptors and limits."""

import asyncio
import os
import socket

import pytest

from kvlease.errors import PoolFullError
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.api.scripted import Served, framed

TRANSPORTS = ("local",)
STATS = pb.Call(call_number=1, stats=pb.StatsRequest())


def attach_over(
    served: Served, fds: list[int], regions: int
) -> tuple[socket.socket, pb.Reply, list[int]]:
    """Attach with descriptors beside the first byte; return the answer and the descriptors beside it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(served.settings.local_socket))
    socket.send_fds(sock, [framed(pb.Call(call_number=9, attach=pb.AttachRequest(cache="c")))], fds)
    data, received, _, _ = socket.recv_fds(sock, 65536, regions)
    return sock, pb.Reply.FromString(data[4:]), received


async def test_attach_carries_descriptors_both_ways(served: Served) -> None:
    """The daemon gets the caller's pidfd, the caller gets the regions, and the connection is the worker's."""
    read_end, write_end = os.pipe()
    served.daemon.descriptors = [write_end]
    served.daemon.script["attach"] = pb.AttachResponse(worker_id=3, token="secret")
    pidfd = os.pidfd_open(os.getpid())

    sock, reply, received = await asyncio.to_thread(attach_over, served, [pidfd], 1)
    os.write(received[0], b"x")
    await asyncio.to_thread(sock.sendall, framed(STATS))
    await asyncio.to_thread(sock.recv, 65536)

    assert (reply.call_number, reply.attach.worker_id) == (9, 3)
    assert os.read(read_end, 1) == b"x"
    assert served.daemon.pidfd_inode == os.fstat(pidfd).st_ino
    assert served.daemon.calls[-1][2].token == "secret"
    assert served.daemon.calls[0][2].peer_uid == os.getuid()
    sock.close()
    for fd in (read_end, write_end, pidfd, *received):
        os.close(fd)


async def test_attach_closes_what_it_received(served: Served) -> None:
    """No descriptor from a caller stays open in the daemon, however many come."""
    served.daemon.script["attach"] = pb.AttachResponse(worker_id=3)
    read_end, write_end = os.pipe()

    sock, _, _ = await asyncio.to_thread(attach_over, served, [write_end] * 3, 1)
    os.close(write_end)

    assert await asyncio.to_thread(os.read, read_end, 1) == b""
    sock.close()
    os.close(read_end)


@pytest.mark.parametrize("is_first", [True, False], ids=["first frame", "later frame"])
@pytest.mark.parametrize("frame", [framed(STATS), b"\5\0\0\0abcde"], ids=["call", "nonsense"])
async def test_frame_that_is_no_attach_leaves_no_descriptor_behind(
    served: Served, frame: bytes, *, is_first: bool
) -> None:
    """Descriptors that come with any other frame, which has no use for them, do not stay open in the daemon either."""
    read_end, write_end = os.pipe()
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(served.settings.local_socket))
    if not is_first:
        await asyncio.to_thread(sock.sendall, framed(STATS))
        await asyncio.to_thread(sock.recv, 65536)

    await asyncio.to_thread(socket.send_fds, sock, [frame], [write_end] * 3)
    os.close(write_end)
    assert await asyncio.to_thread(sock.recv, 65536)

    os.set_blocking(read_end, False)
    assert os.read(read_end, 1) == b"", "somebody still has the other end"
    sock.close()
    os.close(read_end)


async def test_attach_must_come_first(served: Served) -> None:
    """A later attach could not carry descriptors, so it is refused, and the connection stays open."""
    line = await served.line()
    await line.ask(STATS)

    refused = await line.ask(pb.Call(call_number=2, attach=pb.AttachRequest()))

    assert refused.error.code == "INVALID"
    assert (await line.ask(STATS)).HasField("stats")


async def test_pipelined_calls_are_answered_in_order(served: Served) -> None:
    """Any number of calls may be sent before the first answer is read."""
    line = await served.line()
    numbers = list(range(1, 101))

    line.send(*(pb.Call(call_number=number, stats=pb.StatsRequest()) for number in numbers))

    assert [(await line.receive()).call_number for _ in numbers] == numbers


async def test_frames_may_come_in_pieces(served: Served) -> None:
    """It does not matter where the bytes of a stream are cut."""
    line = await served.line()
    stream = framed(STATS) * 3

    for position in range(len(stream)):
        line.send(stream[position : position + 1])
        await line.writer.drain()
        await asyncio.sleep(0)

    assert [(await line.receive()).call_number for _ in range(3)] == [1, 1, 1]


async def test_caller_is_told_by_the_frame(served: Served) -> None:
    """Token, epoch, idempotency key and cache reach the daemon as they were sent."""
    line = await served.line()

    await line.ask(
        pb.Call(
            call_number=1, epoch=7, token="t", idempotency_key="k", cache="c", pin=pb.PinRequest()
        )
    )

    caller = served.daemon.calls[0][2]
    assert (caller.transport, caller.epoch, caller.token) == ("local", 7, "t")
    assert (caller.idempotency_key, caller.cache, caller.pidfd) == ("k", "c", None)


@pytest.mark.parametrize(
    ("frame", "number"),
    [
        pytest.param(framed(pb.Call(call_number=5)), 5, id="no request"),
        pytest.param(b"\7\0\0\0" + framed(STATS)[4:] + b"\x78\1", 1, id="unknown field"),
        pytest.param(b"\3\0\0\0\xff\xff\xff", 0, id="no message"),
    ],
)
async def test_nonsense_is_refused(served: Served, frame: bytes, number: int) -> None:
    """Bytes that are no call of the protocol get a clear answer, and never reach the daemon."""
    line = await served.line()
    line.send(frame)

    reply = await line.receive()

    assert (reply.call_number, reply.error.code) == (number, "INVALID")
    assert not served.daemon.calls


async def test_refusal_explains_itself(served: Served) -> None:
    """Every number of an error arrives."""
    served.daemon.script["reserve"] = PoolFullError(
        resource="device_blocks", need=4, available=1, limit=8, retry_after_ms=50
    )
    line = await served.line()

    error = (await line.ask(pb.Call(call_number=1, reserve=pb.ReserveRequest()))).error

    assert (error.code, error.resource, error.retryable) == ("POOL_FULL", "device_blocks", True)
    assert (error.need, error.available, error.limit, error.retry_after_ms) == (4, 1, 8, 50)


async def test_waiting_call_lets_others_pass(served: Served) -> None:
    """A call that waits for its answer holds nobody else up."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future
    line = await served.line()

    line.send(
        pb.Call(call_number=1, reserve=pb.ReserveRequest()),
        pb.Call(call_number=2, stats=pb.StatsRequest()),
    )
    first = await line.receive()
    future.set_result(pb.ReserveResponse(lease_id=5))

    assert first.call_number == 2
    assert (await line.receive()).reserve.lease_id == 5


async def test_caller_that_leaves_is_forgotten(served: Served) -> None:
    """The daemon is told to forget a call whose caller closed the connection."""
    future = asyncio.get_running_loop().create_future()
    served.daemon.script["reserve"] = future
    line = await served.line()
    line.send(pb.Call(call_number=1, reserve=pb.ReserveRequest()), STATS)
    await line.receive()

    line.writer.close()
    await asyncio.wait({future}, timeout=10)

    assert served.daemon.cancelled == [future]


async def test_watch_is_answered_many_times(served: Served) -> None:
    """Events carry their call's number, among other answers, and the last frame says why the stream ends."""
    served.daemon.events = [
        pb.WatchResponse(sequence=1, kind="a"), pb.WatchResponse(sequence=2, kind="b"), PoolFullError(),
    ]  # fmt: skip
    line = await served.line()
    line.send(pb.Call(call_number=8, watch=pb.WatchRequest(after_sequence=1)))

    event, end = await line.receive(), await line.receive()

    assert (event.call_number, event.watch.kind) == (8, "b")
    assert (end.call_number, end.error.code) == (8, "POOL_FULL")
    assert (await line.ask(STATS)).HasField("stats")


async def test_unforeseen_failure_is_answered(served: Served) -> None:
    """The daemon's own mistake gives an answer without details, and does not break the connection."""
    served.daemon.script["stats"] = ZeroDivisionError("secret detail")
    line = await served.line()

    error = (await line.ask(STATS)).error

    assert error.code == "INTERNAL"
    assert "secret" not in error.message


async def test_stop_ends_connections(served: Served) -> None:
    """No caller is left waiting when the server stops."""
    line = await served.line()
    await line.ask(STATS)

    await served.local.stop()

    assert await line.reader.read() == b""
    with pytest.raises(FileNotFoundError):
        await served.line()


async def test_cancelled_call_ends_at_once(served: Served) -> None:
    """A call that its caller cancels is forgotten by the daemon and answered; the cancelling frame is not answered."""
    loop = asyncio.get_running_loop()
    line = await served.line()
    for number in (1, 2):
        served.daemon.script["reserve"] = loop.create_future()
        line.send(pb.Call(call_number=number, reserve=pb.ReserveRequest()), STATS)
        await line.receive()

    line.send(pb.Call(call_number=3, cancels=2), pb.Call(call_number=4, cancels=7))
    cancelled = await line.receive()
    served.daemon.script.clear()

    assert (cancelled.call_number, cancelled.error.code) == (2, "UNAVAILABLE")
    assert len(served.daemon.cancelled) == 1
    assert (await line.ask(STATS)).call_number == STATS.call_number


@pytest.mark.parametrize("resume_token", ["", "before"], ids=["new worker", "resumed worker"])
async def test_attach_that_nobody_waits_for_is_undone(served: Served, resume_token: str) -> None:
    """A worker whose process is gone before the answer is ended; a worker that only goes on keeps its leases."""
    read_end, write_end = os.pipe()
    served.daemon.descriptors = [write_end]
    served.daemon.script["attach"] = pb.AttachResponse(worker_id=3, token="secret")
    request = pb.AttachRequest(cache="c", resume_token=resume_token)

    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(served.settings.local_socket))
        sock.send(framed(pb.Call(call_number=9, attach=request)))
    async with asyncio.timeout(10):
        while not served.daemon.calls:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)

    ended = [call.token for verb, _, call in served.daemon.calls if verb == "detach"]
    assert ended == ([] if resume_token else ["secret"])
    for fd in (read_end, write_end):
        os.close(fd)
