"""Laws of streams over each transport: a daemon that hangs is told from one that has nothing to tell."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease.errors import DeadlineError
from kvlease.transports import open_async_transport, open_transport
from kvlease.transports.base import Outgoing, parse_address
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Hang

SCHEMES = ("unix", "http+unix")


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """Give the socket of a daemon that takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        yield tmp_path / "s"


def watch(seconds: float) -> Outgoing:
    """Return the call of a watch."""
    return Outgoing("watch", pb.WatchRequest(), time.monotonic() + seconds)


def quiet(_: pb.Call) -> Message:
    """Begin a watch that tells of nothing."""
    raise Hang


@pytest.mark.parametrize("idle_seconds", [0.01, None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_watch_of_a_hung_daemon_ends_at_its_deadline(
    hung: Path, scheme: str, idle_seconds: float | None
) -> None:
    """Who watches is told where the daemon does not answer, however long he would wait for events."""
    transport = open_transport(parse_address(f"{scheme}://{hung}"))

    with pytest.raises(DeadlineError):
        list(transport.stream(watch(0.1), idle_seconds))


@pytest.mark.parametrize("idle_seconds", [0.01, None])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_async_watch_of_a_hung_daemon_ends_at_its_deadline(
    hung: Path, scheme: str, idle_seconds: float | None
) -> None:
    """So is who watches on an event loop."""
    transport = open_async_transport(parse_address(f"{scheme}://{hung}"))

    with pytest.raises(DeadlineError):
        [event async for event in transport.stream(watch(0.1), idle_seconds)]
    await transport.close()


def test_quiet_watch_goes_on_past_its_deadline(tmp_path: Path) -> None:
    """Where there is nothing to tell, a watch ends only when it was idle for as long as it may be."""
    with FrameServer(path=tmp_path / "s", answer=quiet) as server:
        transport = open_transport(parse_address(f"unix://{server.path}"))

        assert list(transport.stream(watch(0.2), 0.3)) == []


async def test_quiet_async_watch_goes_on_past_its_deadline(tmp_path: Path) -> None:
    """So does one on an event loop."""
    with FrameServer(path=tmp_path / "s", answer=quiet) as server:
        transport = open_async_transport(parse_address(f"unix://{server.path}"))

        assert [event async for event in transport.stream(watch(0.2), 0.3)] == []
