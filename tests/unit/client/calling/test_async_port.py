"""Laws of what belongs to one event loop: used in another loop, where it would never wake, it says so."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvlease import AsyncClient
from kvlease._calling.async_port import AsyncPort
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.transports.base import AsyncTransport


class Nowhere:
    """A transport that sends nothing."""

    num_closes = 0

    async def close(self) -> None:
        """Count the close."""
        self.num_closes += 1


def flow() -> Iterator[Any]:
    """Send nothing."""
    return
    yield


def test_call_in_another_loop_is_refused() -> None:
    """The first call binds the client to its loop; after a close in that loop another loop may come."""
    port = AsyncPort(cast(AsyncTransport, Nowhere()))

    async def call() -> None:
        await port.run(cast(Any, flow()))

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(call())
        first.run(call())
        for wrong in (call, port.close):
            with pytest.raises(InvalidError, match="another event loop") as caught:
                second.run(wrong())
            assert caught.value.rule == "other_loop"
        first.run(port.close())
        second.run(call())


def test_client_of_another_loop_says_so(tmp_path: Any) -> None:
    """A client of another loop says so, even where its call could be answered with a miss, before anything is sent."""
    client = AsyncClient(f"unix://{tmp_path}/none.sock")

    async def ask() -> None:
        with pytest.raises(KVLeaseError) as caught:
            await client.list_caches()
        rules.append(caught.value.rule)

    rules: list[str | None] = []
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(ask())
        second.run(ask())
    asyncio.run(ask())

    assert rules == [None, "other_loop", None], "a loop that has ended is no other one"
