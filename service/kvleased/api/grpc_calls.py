"""Own what a gRPC call has to pass before it is looked at: who makes it, whether there is a place, and its message.

All methods are served as if their callers streamed, which looks the same on the wire, so that a call is here when its
head is, and whoever may not call is refused before a byte of his message is waited for. grpc must not lose a read that
it has begun: a call that is over early is aborted, which ends the read, too.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeAlias, cast

import grpc
from grpc_status import rpc_status

from kvlease.errors import BusyError, InvalidError, KVLeaseError, UnknownWorkerError
from kvleased.api import faults
from kvleased.api.seam import Backend, Limits
from kvleased.callers import Caller
from kvleased.roles import Role, Roles

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[bytes, bytes]]"
"""What answers the methods of a service, by their names."""

CALLS_OF_STRANGERS_MAX: Final = 16
"""Calls at once of all who have no token; of one more the oldest gives way."""

_RETRY_AFTER_MS: Final = 100


class Call:
    """One call, from its head on."""

    def __init__(self, context: Context, caller: Caller, seconds_max: float) -> None:
        """Take who calls, and how many seconds a message may take."""
        self.caller = caller
        self.waits = False
        """Whether it waits for its caller or for news, so that it can end early."""
        self._context = context
        self._seconds_max = seconds_max
        self._ending: asyncio.Task[NoReturn] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: KVLeaseError) -> None:
        """End a call that waits."""
        if self.waits and self._ending is None:
            self._ending = asyncio.ensure_future(abort(self._context, error))
            # Who waits for the call is told; nobody waits for this task.
            self._ending.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._ended.set_result(None)

    async def read(self) -> bytes:
        """Return its message.

        Raises:
            InvalidError: there is none.
            AbortError: it did not arrive in time.
        """
        packed = await self.read_next()
        if packed is None:
            raise InvalidError("the call came without a message", resource="message")
        return packed

    async def read_next(self) -> bytes | None:
        """Return its next message, or None after the last; raises AbortError where none arrives in time."""
        late = InvalidError("the message did not arrive in time", resource="message")
        timer = asyncio.get_running_loop().call_later(self._seconds_max, self.end, late)
        self.waits = True
        try:
            packed = await self._context.read()
        finally:
            self.waits = False
            timer.cancel()
        if self._ending is not None:
            await self._ending
        return packed if isinstance(packed, bytes) else None

    async def write(self, packed: bytes) -> None:
        """Send a message, when its caller takes it."""
        await self._context.write(packed)

    async def until(self, news: asyncio.Future[None]) -> None:
        """Wait for news; raises AbortError where the call must end before there are any."""
        self.waits = True
        try:
            await asyncio.wait({news, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.waits = False
        if self._ending is not None:
            await self._ending


class Calls:
    """The calls that a listener has at once: so many of everybody who was let in, and a few of strangers.

    Strangers have places of their own, and each worker has, and each role: nobody takes another's.
    """

    def __init__(
        self, daemon: Backend, settings: Limits, role_of: Callable[[Context], Role]
    ) -> None:
        """Take who admits callers, and what a caller is without a token."""
        self._daemon = daemon
        self._role_of = role_of
        self._calls_max = settings.max_connections
        self._seconds_max = settings.body_seconds_max
        self._num_of: Counter[str | Role] = Counter()
        self._of_strangers: dict[Call, None] = {}

    def __repr__(self) -> str:
        """Show life."""
        return f"<Calls {self._num_of.total()} admitted, {len(self._of_strangers)} of strangers>"

    def enter(self, roles: Roles, context: Context) -> Call:
        """Admit a call by its head.

        Raises:
            UnknownWorkerError, NotYoursError: the caller may not.
            InvalidError: the head makes no sense.
            BusyError: there is no place.
        """
        caller = self._daemon.admit(roles, _caller(context, self._role_of(context)))
        call = Call(context, caller, self._seconds_max)
        if caller.role is Role.STRANGER:
            self._enter_stranger(call, context)
            return call
        who = caller.token or caller.role
        if self._num_of[who] >= self._calls_max:
            raise _too_many(self._calls_max)
        self._num_of[who] += 1
        _at_end(context, lambda: self._leave(who))
        return call

    def _leave(self, who: str | Role) -> None:
        self._num_of[who] -= 1
        if not self._num_of[who]:
            del self._num_of[who]

    def _enter_stranger(self, call: Call, context: Context) -> None:
        """Give a stranger a place, if need be that of who has waited longest."""
        if len(self._of_strangers) >= CALLS_OF_STRANGERS_MAX:
            oldest = next((one for one in self._of_strangers if one.waits), None)
            if oldest is None:
                # They are being answered, but do not read.
                raise _too_many(CALLS_OF_STRANGERS_MAX)
            del self._of_strangers[oldest]
            oldest.end(_too_many(CALLS_OF_STRANGERS_MAX))
        self._of_strangers[call] = None
        _at_end(context, lambda: self._of_strangers.pop(call, None))


async def abort(context: Context, error: KVLeaseError) -> NoReturn:
    """End a call with an error; raises AbortError, as grpc wants it."""
    await context.abort_with_status(rpc_status.to_status(faults.grpc_status(error)))
    raise AssertionError


def _at_end(context: Context, leave: Callable[[], object]) -> None:
    """Have a place left when a call is over."""

    def done(ctx: Context) -> None:  # noqa: ARG001 - grpc's signature
        leave()

    context.add_done_callback(cast(Any, done))  # the stubs take a protocol of no instance


def _too_many(limit: int) -> BusyError:
    message = f"{limit} calls are open already; wait, or call with a token"
    return BusyError(message, resource="calls", limit=limit, retry_after_ms=_RETRY_AFTER_MS)


def _caller(context: Context, role: Role) -> Caller:
    fields: dict[str, Any] = {"transport": "grpc", "role": role}
    for name, value in context.invocation_metadata() or ():
        text = value if isinstance(value, str) else value.decode("latin-1")
        if name == "authorization":
            if "token" in fields:
                raise InvalidError("authorization is there twice; send it once", resource="token")
            fields["token"] = _token(text)
        elif name == "idempotency-key":
            fields["idempotency_key"] = text
        elif name == "kvlease-cache":
            fields["cache"] = text
        elif name == "traceparent":
            fields["traceparent"] = text
        elif name == "kvlease-epoch":
            fields["epoch"] = _epoch(text)
    return Caller(**fields)


def _token(header: str) -> str:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownWorkerError("the metadata authorization must read: Bearer, a space, the token")
    return token.strip()


def _epoch(written: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,16}", written):
        raise InvalidError(
            f"kvlease-epoch must be an integer, not {written[:40]!r}", resource="kvlease-epoch"
        )
    return int(written)
