"""Own the doing of what flows ask for on an event loop; what they ask for is `_flows`' business."""

import asyncio
from typing import Any, TypeVar

from kvlease import _flows
from kvlease._session import Session
from kvlease.errors import KVLeaseError
from kvlease.transports.base import AsyncTransport, Outgoing, past_deadline
from kvlease.worker import logger

R = TypeVar("R")


class AsyncPort:
    """Carry out what flows ask for, over one asynchronous transport."""

    def __init__(self, transport: AsyncTransport, session: Session | None = None) -> None:
        """Join a transport to the session whose calls go over it."""
        self.transport = transport
        self._session = session
        self._attaching = asyncio.Lock()

    async def run(self, flow: _flows.Flow[R]) -> R:
        """Carry out a flow and return its result."""
        try:
            action = next(flow)
            while True:
                try:
                    answer = await self._perform(action)
                except KVLeaseError as error:
                    action = flow.throw(error)
                else:
                    action = flow.send(answer)
        except StopIteration as stop:
            result: R = stop.value
            return result
        finally:
            flow.close()

    async def _perform(self, action: _flows.Action) -> Any:
        if isinstance(action, Outgoing):
            return await self.transport.send(action)
        if isinstance(action, _flows.Pause):
            return await asyncio.sleep(action.seconds)
        if isinstance(action, _flows.Attach):
            return await self.transport.attach(action.call)
        return await self._reattach(action)

    async def _reattach(self, action: _flows.Reattach) -> None:
        session = self._session
        assert session is not None, "only a worker attaches again"
        try:
            async with (
                asyncio.timeout(max(0, action.deadline_at - session.link.clock())),
                self._attaching,
            ):
                if session.link.epoch == action.stale_epoch:
                    await self.run(_flows.reattach(session, action.deadline_at))
        except TimeoutError as error:
            raise past_deadline("attach") from error


async def beat(session: Session, port: AsyncPort) -> None:
    """Send heartbeats until cancelled; says once that they fail, and once that they succeed again."""
    is_failing = False
    while True:
        await asyncio.sleep(session.heartbeat_seconds)
        try:
            await port.run(_flows.heartbeat(session))
        except KVLeaseError as error:
            if not is_failing:
                logger.warning("heartbeats fail", extra={"action": "heartbeat", "code": error.code})
            is_failing = True
        else:
            if is_failing:
                logger.warning("heartbeats succeed again", extra={"action": "heartbeat"})
            is_failing = False
