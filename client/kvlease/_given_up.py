"""Own the calls over REST and gRPC whose callers were cancelled: what they were granted, or may have been, is undone.

Over the local socket the transport does so itself: there an answer tells of its call whoever waits for it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from copy import copy
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from kvlease import _late
from kvlease._flows import Flow
from kvlease._session import Session
from kvlease.errors import DeadlineError, KVLeaseError, UnavailableError
from kvlease.transports.base import AsyncTransport, Attached, Outgoing
from kvlease.v1 import kvlease_pb2 as pb

A = TypeVar("A", Message, Attached)

GIVEN_UP_MAX: Final = 64
"""Calls of one worker that are being undone at once; what more leave is ended by its heartbeats."""
CLOSE_SECONDS_MAX: Final = 1.0
"""Seconds that a worker waits at its end for what is being undone."""
_UNDO_SECONDS: Final = 5.0
"""Seconds that the undoing of one call may take."""
_PAUSE_SECONDS: Final = 0.05
"""Seconds after which a daemon has nearly always seen that a connection was closed, and grants nothing over it."""
_GRANTING: Final = frozenset({"attach", "fork", "pin", "reserve", "step"})
"""The verbs whose answers may grant something."""


class GivenUp:
    """The calls of one worker that go on, or are undone, though nobody waits for them any more."""

    def __init__(
        self,
        transport: AsyncTransport,
        session: Session,
        run: Callable[[Flow[None]], Awaitable[None]],
    ) -> None:
        """Remember over what the calls go, whose they are, and how a flow of several is carried out."""
        self._transport = transport
        self._session = session
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show life: calls that are being undone."""
        return f"<GivenUp {len(self._tasks)} calls>"

    async def exchange(self, call: Outgoing, exchange: Coroutine[Any, Any, A]) -> A:
        """Return what a call is answered with; where its caller is cancelled meanwhile, undo what it grants."""
        if call.verb not in _GRANTING:
            return await exchange
        task: asyncio.Task[A] = asyncio.ensure_future(exchange)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._give_up(call, task)
            raise

    async def close(self) -> None:
        """Wait a moment for what is being undone, and leave the rest."""
        if not self._tasks:
            return
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS_MAX)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self) -> None:
        """Leave to the heartbeats, or to the detach, what an event loop that has ended was undoing."""
        self._tasks.clear()

    def _give_up(self, call: Outgoing, task: "asyncio.Task[A]") -> None:
        # One that waits in the daemon ends there: others would be granted the less.
        if getattr(call.request, "wait_ms", 0) or len(self._tasks) >= GIVEN_UP_MAX:
            task.cancel()
        if len(self._tasks) < GIVEN_UP_MAX:
            undoing = asyncio.ensure_future(self._undo(call, task))
            self._tasks.add(undoing)
            undoing.add_done_callback(self._tasks.discard)

    async def _undo(self, call: Outgoing, task: "asyncio.Task[A]") -> None:
        """Wait for a call's end, and give back what it was granted, or may have been."""
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
        """Undo what an answer grants; an attach that only went on as it was is left alone."""
        if isinstance(answer, Attached):
            assert isinstance(call.request, pb.AttachRequest), "what is attached was asked for"
            if (token := answer.response.token) and not call.request.resume_token:
                until = time.monotonic() + _UNDO_SECONDS
                await self._transport.send(Outgoing("detach", pb.DetachRequest(), until, token))
            return
        reply = pb.Reply(epoch=call.epoch)
        getattr(reply, call.verb).CopyFrom(answer)
        for ask in _late.undoing(self._session, reply):
            await self._transport.send(ask)

    async def _disown(self, call: Outgoing) -> None:
        """Find and undo what an answer that never came granted; a worker without leases ends by itself.

        Asked again without waiting, the daemon answers with the lease that the request has: a heartbeat could not speak
        of that while other reserves are on their way.
        """
        await asyncio.sleep(_PAUSE_SECONDS)
        if isinstance(call.request, pb.ReserveRequest | pb.ForkRequest):
            request = copy(call.request)
            request.ClearField("wait_ms")
            until = time.monotonic() + _UNDO_SECONDS
            again = call._replace(request=request, deadline_at=until, idempotency_key="")
            await self._take_back(again, await self._transport.send(again))
        elif isinstance(call.request, pb.StepRequest):
            await self._run(_late.disowning(self._session))
