"""Own the calls over REST and gRPC whose callers were cancelled: what the calls granted, or may have, is undone.

Over the local socket the transport does this itself: each answer there names its call, even if nobody waits for it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from copy import copy
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from kvlease._calling import late
from kvlease._calling.flows import Flow
from kvlease._calling.session import Session
from kvlease.errors import DeadlineError, KVLeaseError, UnavailableError
from kvlease.transports.base import AsyncTransport, Attached, Outgoing
from kvlease.v1 import kvlease_pb2 as pb

A = TypeVar("A", Message, Attached)

GIVEN_UP_MAX: Final = 64
"""Calls of one worker that are undone at once; what further calls leave behind is ended by its heartbeats."""
CLOSE_SECONDS_MAX: Final = 1.0
"""Seconds that a closing worker waits for calls that are being undone."""
_UNDO_SECONDS: Final = 5.0
"""Seconds that the undoing of one call may take."""
_PAUSE_SECONDS: Final = 0.05
"""Seconds after which a daemon has nearly always noticed that a connection was closed, and grants nothing over it."""
_GRANTING: Final = frozenset({"attach", "fork", "pin", "reserve", "step"})
"""The verbs whose answers may grant something."""


class GivenUp:
    """The calls of one worker that go on or are undone although nobody waits for them any more."""

    def __init__(
        self,
        transport: AsyncTransport,
        session: Session,
        run: Callable[[Flow[None]], Awaitable[None]],
    ) -> None:
        """Remember the calls' transport and session, and the function that carries out a flow of several calls."""
        self._transport = transport
        self._session = session
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show life: calls that are being undone."""
        return f"<GivenUp {len(self._tasks)} calls>"

    async def exchange(self, call: Outgoing, exchange: Coroutine[Any, Any, A]) -> A:
        """Return the answer to a call; if its caller is cancelled meanwhile, undo what the call grants."""
        if call.verb not in _GRANTING:
            return await exchange
        task: asyncio.Task[A] = asyncio.ensure_future(exchange)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._give_up(call, task)
            raise

    async def close(self) -> None:
        """Wait a moment for the calls that are being undone, and abandon the rest."""
        if not self._tasks:
            return
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS_MAX)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self) -> None:
        """Leave what an ended event loop was undoing to the heartbeats or the detach."""
        self._tasks.clear()

    def _give_up(self, call: Outgoing, task: "asyncio.Task[A]") -> None:
        # A call that waits in the daemon is cancelled there, too: otherwise others would get less.
        if getattr(call.request, "wait_ms", 0) or len(self._tasks) >= GIVEN_UP_MAX:
            task.cancel()
        if len(self._tasks) < GIVEN_UP_MAX:
            undoing = asyncio.ensure_future(self._undo(call, task))
            self._tasks.add(undoing)
            undoing.add_done_callback(self._tasks.discard)

    async def _undo(self, call: Outgoing, task: "asyncio.Task[A]") -> None:
        """Wait for a call's end, and give back what it granted, or may have granted."""
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        error = None if task.cancelled() else task.exception()
        with suppress(KVLeaseError):
            if task.cancelled() or isinstance(error, DeadlineError | UnavailableError):
                await self._disown(call)
            elif error is None:
                await self._take_back(call, task.result())

    async def _take_back(self, call: Outgoing, answer: Message | Attached) -> None:
        """Undo what an answer grants; an attach that only resumed a worker is left alone."""
        if isinstance(answer, Attached):
            assert isinstance(call.request, pb.AttachRequest), "what is attached was asked for"
            if (token := answer.response.token) and not call.request.resume_token:
                until = time.monotonic() + _UNDO_SECONDS
                await self._transport.send(Outgoing("detach", pb.DetachRequest(), until, token))
            return
        reply = pb.Reply(epoch=call.epoch)
        getattr(reply, call.verb).CopyFrom(answer)
        for ask in late.undoing(self._session, reply):
            await self._insist(ask)

    async def _insist(self, call: Outgoing) -> None:
        """Send a call until it is answered or its deadline has passed, as no heartbeat would end a pin."""
        while True:
            with suppress(UnavailableError):
                await self._transport.send(call)
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _disown(self, call: Outgoing) -> None:
        """Find and undo what an answer that never came granted; a worker without leases ends by itself.

        A reserve or fork is sent again without a wait, so that the daemon answers with the lease that the request has;
        a heartbeat could not cover that lease while other reserves are on their way.
        """
        await asyncio.sleep(_PAUSE_SECONDS)
        if isinstance(call.request, pb.ReserveRequest | pb.ForkRequest):
            request = copy(call.request)
            request.ClearField("wait_ms")
            until = time.monotonic() + _UNDO_SECONDS
            again = call._replace(request=request, deadline_at=until, idempotency_key="")
            await self._take_back(again, await self._transport.send(again))
        elif isinstance(call.request, pb.StepRequest):
            await self._run(late.disowning(self._session))
