"""A real daemon that hangs while it is watched, over every transport."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from kvlease import AsyncClient, Client, Event, FullAttention, PlanInputs, UnavailableError
from kvlease.transports import _silence
from kvlease.transports import grpc as grpc_transport
from tests.acceptance.serving import Serving
from tests.acceptance.standing import Standing

pytestmark = pytest.mark.acceptance

SCHEMES = ("unix", "http+unix", "grpc+unix")
LAYERS = (FullAttention(name="layer", num_kv_heads=1, head_size=16, dtype="float32"),)
INPUTS = PlanInputs(layers=LAYERS, tokens_per_block=16, device_blocks=8)
KEEPALIVE = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


@pytest.fixture
def daemon(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Give a daemon with a cache, and clients that soon notice missing signs of life."""
    others = [(name, value) for name, value in grpc_transport.OPTIONS if name not in KEEPALIVE]
    options = (*others, *((name, 1000) for name in KEEPALIVE))
    monkeypatch.setattr(grpc_transport, "OPTIONS", options)
    monkeypatch.setattr(_silence, "PING_SECONDS", 1.0)
    monkeypatch.setattr(_silence, "SILENT_SECONDS_MAX", 2.0)
    with standing.lent() as serving:
        with Client(serving.address("unix")) as client:
            client.register("demo", INPUTS)
        yield serving


@contextmanager
def hanging(serving: Serving) -> Iterator[None]:
    """Have the control process stand still meanwhile."""
    os.kill(control := serving.control(), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(control, signal.SIGCONT)


def test_watch_is_told_of_a_daemon_that_hangs(daemon: Serving) -> None:
    """A blocking watch is told, over every transport, when the daemon gives no sign of life any more."""
    clients = [Client(daemon.address(scheme)) for scheme in SCHEMES]
    watches = [client.watch(with_snapshot=True) for client in clients]
    for watch in watches:
        next(watch)

    with hanging(daemon):
        for watch in watches:
            with pytest.raises(UnavailableError, match="did not respond"):
                list(watch)

    for client in clients:
        client.close()


@pytest.mark.thorough
async def test_async_watch_is_told_of_a_daemon_that_hangs(daemon: Serving) -> None:
    """An asynchronous watch is told when the daemon gives no sign of life any more."""
    clients = [AsyncClient(daemon.address(scheme)) for scheme in SCHEMES]
    watches = [client.watch(with_snapshot=True) for client in clients]
    for watch in watches:
        await anext(watch)

    with hanging(daemon):
        for watch in watches:
            with pytest.raises(UnavailableError, match="did not respond"):
                await _all(watch)

    for client in clients:
        await client.close()


async def _all(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]
