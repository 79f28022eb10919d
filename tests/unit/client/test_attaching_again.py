"""Laws of a worker that the daemon has ended while several of its calls were on their way."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease import AsyncClient, Client, UnknownWorkerError
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Regions


class Ending:
    """A daemon that has ended its first worker, and refuses that worker's calls once there are `num_together`."""

    num_together = 1

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.resumed: list[str] = []
        self.num_made = 0
        self._num_waiting = 0
        self._all_there = threading.Event()

    def __call__(self, call: pb.Call) -> Message:
        """Answer a call."""
        verb = call.WhichOneof("request")
        if verb == "attach":
            return self._attach(call.attach)
        if verb == "detach":
            return pb.DetachResponse()
        if call.token == "worker 1":
            self._num_waiting += 1
            if self._num_waiting == self.num_together:
                self._all_there.set()
            self._all_there.wait(10)
            raise UnknownWorkerError
        return pb.LookupResponse()

    def _attach(self, request: pb.AttachRequest) -> Message:
        if request.resume_token:
            self.resumed.append(request.resume_token)
        if request.resume_token == "worker 1":
            raise UnknownWorkerError
        self.num_made += not request.resume_token
        answer = self.regions.attached()
        answer.token = f"worker {self.num_made}"
        return answer


@pytest.fixture
def regions() -> Iterator[Regions]:
    """The memory of the daemon's cache."""
    with Regions() as regions:
        yield regions


@pytest.fixture
def daemon(regions: Regions) -> Ending:
    """Such a daemon."""
    return Ending(regions)


@pytest.fixture
def server(tmp_path: Path, regions: Regions, daemon: Ending) -> Iterator[FrameServer]:
    """Its server."""
    with FrameServer(path=tmp_path / "kvlease.sock", answer=daemon, fds=regions.fds) as server:
        yield server


def test_threads_of_an_ended_worker_attach_once(server: FrameServer, daemon: Ending) -> None:
    """Only one thread makes the next worker; if another resumed it, leases on their way to it would end unheard."""
    # Each thread has a connection of its own.
    daemon.num_together = 2
    with (
        Client(f"unix://{server.path}", on_doubt="raise") as client,
        client.attach("demo") as worker,
    ):
        threads = [threading.Thread(target=worker.lookup, args=(bytes(32),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

        assert (daemon.num_made, daemon.resumed) == (2, ["worker 1"])


async def test_tasks_of_an_ended_worker_attach_once(server: FrameServer, daemon: Ending) -> None:
    """The same holds of tasks on an event loop."""
    async with (
        AsyncClient(f"unix://{server.path}", on_doubt="raise") as client,
        await client.attach("demo") as worker,
    ):
        await asyncio.gather(*(worker.lookup(bytes(32)) for _ in range(2)))

        assert (daemon.num_made, daemon.resumed) == (2, ["worker 1"])
