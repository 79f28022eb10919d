"""Laws of calls that are given up on the local socket's connection for an event loop, over real sockets."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease import AsyncClient, AsyncWorker
from kvlease.errors import DeadlineError
from kvlease.transports.base import Outgoing
from kvlease.transports.local_async import AsyncLocalTransport
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Hang, Regions

LEASE = pb.ReserveResponse(lease_id=9, covered_tokens=16, block_ids=b"\1\0\0\0")


class Held(FrameServer):
    """A daemon that answers an attach and all else in turn, but reserves only when a test says so."""

    def held(self, call: pb.Call) -> Message:
        """Leave a reserve without an answer."""
        if call.HasField("reserve"):
            raise Hang
        if call.HasField("attach"):
            return self.regions.attached()
        responses: dict[str, Message] = {
            "heartbeat": pb.HeartbeatResponse(),
            "release": pb.ReleaseResponse(released=True),
            "detach": pb.DetachResponse(),
        }
        return responses[call.WhichOneof("request") or "heartbeat"]

    def _reply(self, connection: object, call: pb.Call) -> None:
        self.connection = connection
        super()._reply(connection, call)  # type: ignore[arg-type]  # passed on as it came

    regions: Regions
    connection: object

    def reply_late(self, call: pb.Call) -> None:
        """Answer a held reserve after all."""
        self.answer = lambda _: LEASE
        super()._reply(self.connection, call)  # type: ignore[arg-type]  # it is a socket
        self.answer = self.held


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[tuple[Held, AsyncWorker]]:
    """Give a server and a worker that is attached to it."""
    with (
        Regions() as regions,
        Held(path=tmp_path / "s", answer=released, fds=regions.fds) as server,
    ):
        server.regions, server.answer = regions, server.held
        async with (
            AsyncClient(f"unix://{server.path}", on_doubt="raise") as client,
            await client.attach("demo") as worker,
        ):
            yield server, worker


def released(_: pb.Call) -> Message:
    """Answer a release."""
    return pb.ReleaseResponse(released=True)


def num_fds() -> int:
    """Return the number of descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.001)


def calls(server: FrameServer, verb: str) -> list[pb.Call]:
    """Return the calls of a verb so far; a call without a verb cancels another one."""
    return [call for call in server.calls if (call.WhichOneof("request") or "") == verb]


async def given_up(server: FrameServer, worker: AsyncWorker) -> pb.Call:
    """Begin a reserve, cancel its task, and return the call."""
    task = asyncio.create_task(worker.reserve("r", num_tokens=16, wait_ms=20_000))
    await until(lambda: bool(calls(server, "reserve")))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return calls(server, "reserve")[-1]


async def test_cancelled_call_is_cancelled_in_the_daemon(scene: tuple[Held, AsyncWorker]) -> None:
    """A task that is cancelled tells the daemon to forget its call."""
    server, worker = scene

    reserve = await given_up(server, worker)
    await until(lambda: bool(calls(server, "")))

    (cancel,) = calls(server, "")
    assert cancel.cancels == reserve.call_number
    assert cancel.call_number > reserve.call_number


async def test_call_past_its_deadline_is_cancelled_in_the_daemon(tmp_path: Path) -> None:
    """A call whose answer does not come in time is cancelled in the daemon, too."""

    def hang(_: pb.Call) -> Message:
        raise Hang

    with FrameServer(path=tmp_path / "s", answer=hang) as server:
        transport = AsyncLocalTransport(str(server.path))
        with pytest.raises(DeadlineError):
            await transport.send(
                Outgoing("release", pb.ReleaseRequest(lease_id=3), time.monotonic() + 0.05)
            )
        await until(lambda: len(server.calls) == 2)
        await transport.close()

    assert [call.cancels for call in server.calls] == [0, 1]


async def test_lease_granted_to_a_cancelled_task_is_released(
    scene: tuple[Held, AsyncWorker],
) -> None:
    """If the answer to a cancelled reserve comes all the same, its lease is given back at once."""
    server, worker = scene
    reserve = await given_up(server, worker)

    server.reply_late(reserve)
    await until(lambda: bool(calls(server, "release")))

    assert [call.release.lease_id for call in calls(server, "release")] == [9]
    assert worker.num_leases == 0


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
async def test_answer_that_a_cancelled_task_never_read_is_taken_back(
    scene: tuple[Held, AsyncWorker], *, is_first: bool
) -> None:
    """A task may be cancelled just before its answer comes, or just after, before it has run again."""
    server, worker = scene
    stream = worker._port.transport._stream  # type: ignore[attr-defined]  # it is the local transport
    task = asyncio.create_task(worker.reserve("r", num_tokens=16, wait_ms=20_000))
    await until(lambda: bool(calls(server, "reserve")))

    number = calls(server, "reserve")[0].call_number
    steps = [
        task.cancel,
        partial(stream._hand_over, pb.Reply(call_number=number, epoch=1, reserve=LEASE)),
    ]
    for step in steps if is_first else reversed(steps):
        step()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: bool(calls(server, "release")))

    assert calls(server, "release")[0].release.lease_id == 9


async def test_lease_that_is_given_back_is_not_used_by_a_retry(
    scene: tuple[Held, AsyncWorker],
) -> None:
    """A reserve that is answered with a lease that is being released asks again."""
    server, worker = scene
    first = await given_up(server, worker)
    retry = asyncio.create_task(worker.reserve("r", num_tokens=16, wait_ms=20_000))
    await until(lambda: len(calls(server, "reserve")) == 2)

    server.reply_late(first)
    server.reply_late(calls(server, "reserve")[1])
    await until(lambda: len(calls(server, "reserve")) == 3)

    assert {call.release.lease_id for call in calls(server, "release")} == {9}
    assert worker.num_leases == 0
    retry.cancel()


async def test_lease_that_another_task_got_stays(scene: tuple[Held, AsyncWorker]) -> None:
    """Reserves of one request share a lease; the cancelled one does not take it from the others."""
    server, worker = scene
    first = await given_up(server, worker)
    retry = asyncio.create_task(worker.reserve("r", num_tokens=16, wait_ms=20_000))
    await until(lambda: len(calls(server, "reserve")) == 2)

    server.reply_late(calls(server, "reserve")[1])
    lease = await retry
    server.reply_late(first)
    await worker.heartbeat()

    assert (lease.is_live, calls(server, "release")) == (True, [])
    await lease.release()


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "on its way"])
async def test_cancelled_attach_is_undone(tmp_path: Path, *, is_answered: bool) -> None:
    """A task that is cancelled while it attaches leaves no worker, whenever the answer comes."""
    may_answer, before = threading.Event(), num_fds()
    with Regions() as regions:

        def slow(call: pb.Call) -> Message:
            if call.HasField("detach"):
                return pb.DetachResponse()
            may_answer.wait(10)
            return regions.attached()

        with FrameServer(path=tmp_path / "s", answer=slow, fds=regions.fds) as server:
            client = AsyncClient(f"unix://{server.path}")
            task = asyncio.create_task(client.attach("demo"))
            await until(lambda: bool(server.calls))
            if is_answered:
                may_answer.set()
                time.sleep(0.1)  # noqa: ASYNC251 - the answer comes while the loop does not look
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_answer.set()
            await until(lambda: bool(calls(server, "detach")))
            await client.close()

    assert [call.token for call in calls(server, "detach")] == ["token"]
    await until(lambda: num_fds() <= before)
