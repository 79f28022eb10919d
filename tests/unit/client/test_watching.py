"""Laws of streams over each transport: a daemon that hangs is told from a daemon that has nothing to tell."""

import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease.errors import DeadlineError, UnavailableError
from kvlease.transports import _silence, open_async_transport, open_transport
from kvlease.transports.base import Outgoing, parse_address
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Hang

SCHEMES = ("unix", "http+unix")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """Give the socket of a daemon that accepts connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        yield tmp_path / "s"


def watch(seconds: float) -> Outgoing:
    """Return a watch's call."""
    return Outgoing("watch", pb.WatchRequest(), time.monotonic() + seconds)


def quiet(_: pb.Call) -> Message:
    """Begin a watch without events."""
    raise Hang


@pytest.mark.parametrize("idle_seconds", [0.01, None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_watch_of_a_hung_daemon_ends_at_its_deadline(
    hung: Path, scheme: str, idle_seconds: float | None
) -> None:
    """A watch ends at its deadline if the daemon does not answer, however long it would wait for events."""
    transport = open_transport(parse_address(f"{scheme}://{hung}"))

    with pytest.raises(DeadlineError):
        list(transport.stream(watch(0.1), idle_seconds))


@pytest.mark.parametrize("idle_seconds", [0.01, None])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_async_watch_of_a_hung_daemon_ends_at_its_deadline(
    hung: Path, scheme: str, idle_seconds: float | None
) -> None:
    """On an event loop, too, a watch of a hung daemon ends at its deadline."""
    transport = open_async_transport(parse_address(f"{scheme}://{hung}"))

    with pytest.raises(DeadlineError):
        [event async for event in transport.stream(watch(0.1), idle_seconds)]
    await transport.close()


def test_quiet_watch_goes_on_past_its_deadline(tmp_path: Path) -> None:
    """A watch without events ends only after its longest idle time."""
    with FrameServer(path=tmp_path / "s", answer=quiet) as server:
        transport = open_transport(parse_address(f"unix://{server.path}"))

        assert list(transport.stream(watch(0.2), 0.3)) == []


async def test_quiet_async_watch_goes_on_past_its_deadline(tmp_path: Path) -> None:
    """On an event loop, too, a watch without events ends only after its longest idle time."""
    with FrameServer(path=tmp_path / "s", answer=quiet) as server:
        transport = open_async_transport(parse_address(f"unix://{server.path}"))

        assert [event async for event in transport.stream(watch(0.2), 0.3)] == []


# Once it has begun


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have streams notice missing signs of life early."""
    monkeypatch.setattr(_silence, "PING_SECONDS", 0.05)
    monkeypatch.setattr(_silence, "SILENT_SECONDS_MAX", 0.3)


@contextmanager
def streaming(scheme: str, path: Path, *, num_signs: int) -> Iterator[str]:
    """Give the address of a daemon whose streams have no events, and which hangs after a number of signs of life."""
    if scheme == "unix":
        with FrameServer(path=path, answer=quiet) as server:
            server.hang_after = num_signs
            yield f"unix://{path}"
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        over = threading.Event()
        thread = threading.Thread(target=_comment, args=(listener, num_signs, over))
        thread.start()
        yield f"http+unix://{path}"
        over.set()
        thread.join()


def _comment(listener: socket.socket, num_signs: int, over: threading.Event) -> None:
    """Answer one watch with comments only."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(BrokenPipeError):
        connection.sendall(_HEAD)
        for _ in range(num_signs):
            connection.sendall(b"4\r\n: \n\n\r\n")
            if over.wait(0.05):
                return
        over.wait()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("idle_seconds", [60.0, None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_watch_of_a_daemon_that_hangs_later_fails(
    tmp_path: Path, scheme: str, idle_seconds: float | None
) -> None:
    """A watch fails once the daemon gives no more signs of life."""
    with streaming(scheme, tmp_path / "s", num_signs=3) as address:
        transport = open_transport(parse_address(address))

        with pytest.raises(UnavailableError, match="did not respond for"):
            list(transport.stream(watch(5), idle_seconds))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("idle_seconds", [60.0, None])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_async_watch_of_a_daemon_that_hangs_later_fails(
    tmp_path: Path, scheme: str, idle_seconds: float | None
) -> None:
    """On an event loop, too, a watch fails once the daemon gives no more signs of life."""
    with streaming(scheme, tmp_path / "s", num_signs=3) as address:
        transport = open_async_transport(parse_address(address))

        with pytest.raises(UnavailableError, match="did not respond for"):
            await _all(transport.stream(watch(5), idle_seconds))
        await transport.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_signs_of_life_are_no_events(tmp_path: Path, scheme: str) -> None:
    """Signs of life do not prolong a watch: it ends when no event has come for its idle time."""
    with streaming(scheme, tmp_path / "s", num_signs=1000) as address:
        transport = open_transport(parse_address(address))

        assert list(transport.stream(watch(5), 0.6)) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_signs_of_life_are_no_events_on_a_loop(tmp_path: Path, scheme: str) -> None:
    """On an event loop, too, signs of life do not prolong a watch."""
    with streaming(scheme, tmp_path / "s", num_signs=1000) as address:
        transport = open_async_transport(parse_address(address))

        assert await _all(transport.stream(watch(5), 0.6)) == []
        await transport.close()


@contextmanager
def stopping(path: Path) -> Iterator[str]:
    """Give the address of a daemon that tells one event over REST, and then ends the stream because it stops."""
    event = b'data: {"sequence":1}\n\n'
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http+unix://{path}"
        thread.join()


def test_watch_fails_if_its_daemon_stops(tmp_path: Path) -> None:
    """A daemon that stops ends its streams in order over REST; the watcher is told, as over every other transport."""
    with stopping(tmp_path / "s") as address:
        events = open_transport(parse_address(address)).stream(watch(5), 60.0)

        assert next(events) == pb.WatchResponse(sequence=1)
        with pytest.raises(UnavailableError, match="the connection was closed"):
            next(events)


async def test_async_watch_fails_if_its_daemon_stops(tmp_path: Path) -> None:
    """On an event loop, too."""
    with stopping(tmp_path / "s") as address:
        transport = open_async_transport(parse_address(address))
        events = aiter(transport.stream(watch(5), 60.0))

        assert await anext(events) == pb.WatchResponse(sequence=1)
        with pytest.raises(UnavailableError, match="the connection was closed"):
            await anext(events)
        await transport.close()


async def _all(events: AsyncIterator[Message]) -> list[Message]:
    return [event async for event in events]
