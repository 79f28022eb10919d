"""Own how the actions of flows are carried out on an event loop; which actions those are is `flows`' business."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvlease._calling import flows
from kvlease._calling.given_up import GivenUp
from kvlease._calling.pulse import Pulse
from kvlease._calling.session import Session
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.transports.base import AsyncTransport, Outgoing, past_deadline

R = TypeVar("R")

_OTHER_LOOP: Final = (
    "this client or worker belongs to another event loop, in which it made its first call; make one for each loop, or "
    "close it in its own loop first"
)
_ENDED_LOOP: Final = (
    "this worker's event loop has ended, and its heartbeats with it; close the worker, which any loop may do, and "
    "attach another one"
)


class AsyncPort:
    """Carry out the actions that flows yield, over one asynchronous transport."""

    def __init__(
        self,
        transport: AsyncTransport,
        session: Session | None = None,
        open_again: Callable[[], AsyncTransport] | None = None,
    ) -> None:
        """Join a transport to the session whose calls it carries.

        With `open_again`, which makes a new transport, another loop may take the port over once its own has ended.
        """
        self.transport = transport
        self._session = session
        self._open_again = open_again
        self._attaching = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that the connection belongs to, from the first call until a close."""
        self._given_up: GivenUp | None = None
        if session is not None and not transport.undoes:
            self._given_up = GivenUp(transport, session, self.run)

    @property
    def is_orphaned(self) -> bool:
        """Whether the loop that the port belongs to has ended, so that nobody can close the port there any more."""
        return self._loop is not None and self._loop.is_closed()

    async def close(self) -> None:
        """Close the connection once calls that were given up are undone, or after a moment.

        The next call may come from another event loop. So may the close itself, if the port's own loop has ended.

        Raises:
            InvalidError: rule other_loop.
        """
        if self.is_orphaned:
            await self.take_over()
        else:
            self.bind()
        if self._given_up is not None:
            await self._given_up.close()
        await self.transport.close()
        self._loop = None

    def bind(self) -> None:
        """Have the connection belong to the running event loop, if it belongs to none yet.

        Raises:
            InvalidError: rule other_loop; the connection belongs to another event loop, and would never wake this one.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            message = _ENDED_LOOP if self._loop.is_closed() else _OTHER_LOOP
            raise InvalidError(message, resource="event loop", rule="other_loop")

    async def join(self) -> None:
        """Do what `bind` does; a client's port is also taken over from a loop that has ended."""
        if self._open_again is not None and self.is_orphaned:
            await self.take_over()
        else:
            self.bind()

    async def take_over(self) -> None:
        """Have the port of an ended loop belong to the running loop, and close the connection of the ended loop."""
        self._loop = asyncio.get_running_loop()
        self._attaching = asyncio.Lock()
        if self._given_up is not None:
            self._given_up.forget()
        left = self.transport
        if self._open_again is not None:
            # A new transport, as locks of the old one may belong to the ended loop.
            self.transport = self._open_again()
        await left.close()

    async def run(self, flow: flows.Flow[R]) -> R:
        """Carry out a flow and return its result; raises InvalidError in another event loop than the port's own."""
        try:
            if self._loop is not asyncio.get_running_loop():
                await self.join()
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

    async def _perform(self, action: flows.Action) -> Any:
        given_up = self._given_up
        if isinstance(action, Outgoing):
            sent = self.transport.send(action)
            return await (sent if given_up is None else given_up.exchange(action, sent))
        if isinstance(action, flows.Pause):
            return await asyncio.sleep(action.seconds)
        if isinstance(action, flows.Attach):
            attached = self.transport.attach(action.call)
            return await (
                attached if given_up is None else given_up.exchange(action.call, attached)
            )
        return await self._reattach(action)

    async def _reattach(self, action: flows.Reattach) -> None:
        session = self._session
        assert session is not None, "only a worker attaches again"
        deadline_at = action.refused.deadline_at
        try:
            async with (
                asyncio.timeout(max(0, deadline_at - session.link.clock())),
                self._attaching,
            ):
                if action.is_due(session.link):
                    await self.run(flows.reattach(session, deadline_at))
        except TimeoutError as error:
            raise past_deadline("attach") from error


async def beat(session: Session, port: AsyncPort) -> None:
    """Send heartbeats until cancelled."""
    pulse = Pulse()
    while True:
        await asyncio.sleep(session.heartbeat_seconds)
        try:
            await port.run(flows.heartbeat(session))
        except KVLeaseError as error:
            pulse.failed(error)
        else:
            pulse.succeeded()
