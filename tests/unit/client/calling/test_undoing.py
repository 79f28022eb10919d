"""Laws of calls whose callers were cancelled over REST or gRPC: what undoes them is sent until it arrives."""

import asyncio
import time
from typing import Any

from google.protobuf.message import Message

from kvlease._calling.given_up import GivenUp
from kvlease._calling.link import Link
from kvlease._calling.session import Session
from kvlease.errors import UnavailableError
from kvlease.transports.base import Outgoing
from kvlease.v1 import kvlease_pb2 as pb


class Broken:
    """A transport whose first calls fail, as if a connection broke under them."""

    def __init__(self, num_failures: int) -> None:
        self._left = num_failures
        self.unpinned: list[int] = []

    async def send(self, call: Outgoing) -> Message:
        """Fail, or note the pin that is ended."""
        assert isinstance(call.request, pb.UnpinRequest)
        if self._left:
            self._left -= 1
            raise UnavailableError
        self.unpinned.append(call.request.pin_id)
        return pb.UnpinResponse(released=True)


async def test_pin_whose_caller_has_gone_is_ended_although_a_connection_breaks() -> None:
    """No heartbeat would end it, so one failure of its unpin must not keep it for good."""
    session = Session(Link(deadline_seconds=5), pb.AttachRequest(cache="demo"), raises=True)
    transport: Any = Broken(2)
    given_up = GivenUp(transport, session, lambda _: asyncio.sleep(0))
    is_pinned = asyncio.Event()

    async def pinned() -> pb.PinResponse:
        await is_pinned.wait()
        return pb.PinResponse(pin_id=7, num_blocks=1)

    call = Outgoing("pin", pb.PinRequest(), time.monotonic() + 5)
    caller = asyncio.create_task(given_up.exchange(call, pinned()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    is_pinned.set()
    await given_up.close()

    assert transport.unpinned == [7]
