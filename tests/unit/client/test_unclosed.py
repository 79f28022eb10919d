"""Laws of what is dropped without a close: a warning says so, as for files, and where it was made."""

import asyncio
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from kvlease import AsyncClient, Client, UnavailableError
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import FrameServer, Regions

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Give the address of a daemon."""
    with Regions() as regions:

        def answer(call: pb.Call) -> Message:
            if call.WhichOneof("request") == "attach":
                return regions.attached()
            return pb.StatsResponse() if call.HasField("stats") else pb.DetachResponse()

        with FrameServer(path=tmp_path / "s", answer=answer, fds=regions.fds) as server:
            yield f"unix://{server.path}"


def leaked(caught: list[warnings.WarningMessage], kind: str) -> list[object]:
    """Return the sources of warnings about unclosed objects of one kind."""
    return [one.source for one in caught if str(one.message).startswith(f"unclosed <{kind} ")]


def test_client_that_is_dropped_open_warns(address: str) -> None:
    """A client that has connected and is dropped without a close warns."""
    client = Client(address)
    client.stats()

    with pytest.warns(ResourceWarning, match="unclosed <Client unix:"):
        del client


def test_worker_that_is_dropped_attached_warns(address: str) -> None:
    """A worker that is dropped while attached warns, because nobody else detaches it while this process lives."""
    with Client(address) as client:
        worker = client.attach("demo")

        with pytest.warns(ResourceWarning, match="unclosed <Worker 7 of 'demo'"):
            del worker


def test_async_client_and_worker_that_are_dropped_warn(address: str) -> None:
    """An asynchronous client and worker warn, too."""

    async def drop() -> None:
        client = AsyncClient(address)
        worker = await client.attach("demo")
        beating = worker._task
        await client.stats()

        with pytest.warns(ResourceWarning, match="unclosed <AsyncClient unix:"):
            del client
        with pytest.warns(ResourceWarning, match="unclosed <AsyncWorker 7 of 'demo'"):
            del worker

        assert beating is not None
        beating.cancel()
        await asyncio.wait({beating})

    asyncio.run(drop())
    gc.collect()  # the sockets they left open, or another test hears of those


@pytest.mark.parametrize("kind", ["Client", "Worker"])
def test_what_was_closed_or_never_opened_is_dropped_in_silence(address: str, kind: str) -> None:
    """A client or worker that is closed, or was never opened, is dropped without a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Client(address)
        with Client(address) as client:
            client.stats()
            client.attach("demo").close()
        with pytest.raises(UnavailableError):
            Client("unix:///nowhere").stats()
        del client

    assert leaked(caught, kind) == []


async def test_what_was_closed_is_dropped_in_silence_on_a_loop(address: str) -> None:
    """On an event loop, too, what is closed is dropped without a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with AsyncClient(address) as client:
            await client.stats()
            async with await client.attach("demo"):
                pass
        del client

    assert leaked(caught, "AsyncClient") + leaked(caught, "AsyncWorker") == []
