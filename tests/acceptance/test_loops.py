"""A client used in a second event loop is refused while the first loop lives, else goes on, over all transports."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest

from kvlease import AsyncClient, AsyncWorker, Client, InvalidError
from tests.acceptance.serving import Serving, served
from tests.acceptance.test_client import INPUTS

SCHEMES = ("unix", "http+unix", "grpc+unix")

pytestmark = [
    pytest.mark.acceptance,
    # A connection whose loop was closed warns when it is collected, and nothing can prevent that.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Act = Callable[[AsyncClient], Awaitable[object]]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Give the daemon of these tests, with a cache."""
    with served(tmp_path_factory.mktemp("loops") / "run") as serving:
        with Client(serving.address("unix")) as client:
            client.register("demo", INPUTS)
        yield serving


@pytest.fixture(autouse=True)
def ended_loops() -> Iterator[None]:
    """Collect what ended loops left before the next test, which would fail by the warning."""
    yield
    gc.collect()


async def stats(client: AsyncClient) -> object:
    """Make one call."""
    return await client.stats()


async def watch(client: AsyncClient) -> object:
    """Take the first event of a stream."""
    async for event in client.watch(with_snapshot=True, idle_seconds=5):
        return event
    return None


async def trace(client: AsyncClient) -> object:
    """Take the first record of a trace, which says that the recording has begun."""
    async for record in client.trace("demo", idle_seconds=5):
        return record
    return None


async def attach(client: AsyncClient) -> object:
    """Attach a worker, and end it."""
    async with await client.attach("demo") as worker:
        return worker.worker_id


ACTS = [
    pytest.param(stats, id="stats"),
    pytest.param(watch, id="watch"),
    pytest.param(trace, id="trace"),
    pytest.param(attach, id="attach"),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("act", ACTS)
def test_whatever_is_first_says_whose_loop_it_is(daemon: Serving, scheme: str, act: Act) -> None:
    """After any first act, all acts and a close are refused in another loop; the own loop goes on, and closes."""
    client = AsyncClient(daemon.address(scheme), on_doubt="raise")
    with asyncio.Runner() as own, asyncio.Runner() as other:
        assert own.run(act(client))
        for wrong in (stats, watch, trace, attach, AsyncClient.close):
            with pytest.raises(InvalidError, match="another event loop") as caught:
                other.run(wrong(client))
            assert caught.value.rule == "other_loop"
        assert own.run(stats(client))
        own.run(client.close())
        assert other.run(stats(client))
        other.run(client.close())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("act", ACTS)
def test_client_outlives_its_loop(daemon: Serving, scheme: str, act: Act) -> None:
    """Once its loop has ended, the client works in the next one: several calls at once are answered, and it closes."""
    client = AsyncClient(daemon.address(scheme), on_doubt="raise")

    async def several() -> list[object]:
        return await asyncio.gather(*(act(client) for _ in range(4)), stats(client))

    asyncio.run(stats(client))
    assert all(asyncio.run(several()))
    asyncio.run(client.close())
    assert not client._port.transport.is_open


@pytest.mark.parametrize("scheme", SCHEMES)
def test_worker_whose_loop_has_ended_is_closed_in_any(daemon: Serving, scheme: str) -> None:
    """Its heartbeats have ended, so its calls say what to do; a close in any loop ends it and its leases."""
    client = AsyncClient(daemon.address(scheme), on_doubt="raise")

    async def begin() -> AsyncWorker:
        worker = await client.attach("demo")
        await worker.reserve("r", num_tokens=16)
        return worker

    worker = asyncio.run(begin())

    with pytest.raises(InvalidError, match="close the worker") as caught:
        asyncio.run(worker.reserve("s", num_tokens=16))
    assert caught.value.rule == "other_loop"
    asyncio.run(worker.close())
    asyncio.run(client.close())

    with Client(daemon.address("unix")) as other:
        assert [(one.num_workers, one.num_leases) for one in other.stats().caches] == [(0, 0)]
