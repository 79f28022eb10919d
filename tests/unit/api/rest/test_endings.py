"""Law of ended connections: they leave nothing for the garbage collector, which would stop everything else."""

import asyncio
import gc
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kvleased.api.rest.protocol import GuardedProtocol
from tests.unit.api.guarded import guarded

SECONDS = 10
NUM_LINES = 5
HEAD = b"HTTP/1.1\r\nHost: localhost\r\n"
SAID = {
    "nothing": b"",
    "no HTTP": b"\0\1\2\r\n\r\n",
    "a part of a head": b"GET /livez " + HEAD,
    "a request": b"GET /livez " + HEAD + b"\r\n",
    "a refused request": b"GET /v1/stats " + HEAD + b"\r\n",
    "a body that is refused unread": (
        b"POST /v1/plans " + HEAD + b"Content-Length: 4000000\r\n\r\n" + bytes(1 << 16)
    ),
    "a part of a body": b"POST /v1/plans " + HEAD + b"Content-Length: 9\r\n\r\n{",
    "many requests at once": (b"GET /livez " + HEAD + b"\r\n") * 16,
    "a head without end": b"GET /livez " + HEAD + b"X: " + b"x" * (128 << 10),
}


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off, and take what exists already out of its view."""
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def left() -> int:
    """Return the number of connections that are still in memory."""
    # By type: an object of another library may warn when it is asked for its class.
    return sum(issubclass(type(one), GuardedProtocol) for one in gc.get_objects())


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_rude", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("said", SAID)
def test_ended_connection_leaves_no_cycle(said: str, is_rude: bool) -> None:
    """A connection is freed when it has ended, whatever was sent over it, however it ended, answered or not."""
    # The daemon's own loop decides what transports hold of their protocols.
    uvloop.run(_ended(SAID[said], is_rude=is_rude))


async def _ended(said: bytes, *, is_rude: bool) -> None:
    """Send something over some connections, end them, and wait until none is left in memory."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run") as serving:
            before = left()
            for _ in range(NUM_LINES):
                _, writer = await asyncio.open_connection("127.0.0.1", serving.rest.http_port)
                writer.write(said)
                await asyncio.sleep(0.02)
                if is_rude:
                    line = writer.get_extra_info("socket")
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            async with asyncio.timeout(SECONDS):
                while left() > before:  # noqa: ASYNC110 -- nothing tells of it
                    await asyncio.sleep(0.05)
