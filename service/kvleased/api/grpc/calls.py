"""Own what a gRPC call has to pass before it is looked at: who makes it, whether there is a place, and its message.

All methods are served as if their callers streamed, which looks the same on the wire, so that a call is here when its
head is, and whoever may not call is refused before a byte of his message is waited for. grpc must not lose a read that
it has begun: a call that is over early is aborted, which ends the read, too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeAlias, cast
from urllib.parse import unquote

import grpc
from grpc_status import rpc_status

from kvlease.errors import BusyError, InvalidError, KVLeaseError, UnknownWorkerError
from kvleased.access.callers import Caller
from kvleased.access.roles import Role, Roles
from kvleased.api import faults
from kvleased.api.grpc.connections import Connections
from kvleased.api.seam import Backend, Limits
from kvleased.counted import are

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[bytes, bytes]]"
"""What answers the methods of a service, by their names."""
PeerOf: TypeAlias = Callable[[Context], tuple[Role, str]]
"""Tells what the caller of a listener is without a token, and his address and port, which are empty but over TCP."""

CALLS_OF_STRANGERS_MAX: Final = 16
"""Calls at once of all who have no token; of one more the oldest gives way."""
UNREAD_SECONDS_MAX: Final = 2.0
"""Seconds after which a stranger who does not read his answer loses his connection, where another wants his place."""

_RETRY_AFTER_MS: Final = 100
_EPOCH_MAX: Final = 2**63 - 1
"""What the protocol has for an epoch, as the other transports take it."""


class Call:
    """One call, from its head on."""

    __slots__ = ("_context", "_deadlines", "_ended", "_ending", "answered_since", "caller", "waits")

    def __init__(self, context: Context, caller: Caller, deadlines: Deadlines) -> None:
        """Take who calls, and who sees to it that a message comes in time."""
        self.caller = caller
        self.waits = False
        """Whether it waits for its caller or for news, so that it can end early."""
        self.answered_since = deadlines.now()
        """Seconds since which it is being answered, where it does not wait."""
        self._context = context
        self._deadlines = deadlines
        self._ending: asyncio.Task[NoReturn] | None = None
        self._ended: asyncio.Future[None] | None = None
        """What tells who waits for news that the call ends."""

    def end(self, error: KVLeaseError) -> None:
        """End a call that waits."""
        if self.waits and self._ending is None:
            self._ending = asyncio.ensure_future(abort(self._context, error))
            # Who waits for the call is told; nobody waits for this task.
            self._ending.add_done_callback(lambda task: task.cancelled() or task.exception())
            if self._ended is not None:
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
        self.waits = True
        self._deadlines.begin(self)
        try:
            packed = await self._context.read()
        finally:
            self._deadlines.end(self)
            self._waited()
        if self._ending is not None:
            await self._ending
        return packed if isinstance(packed, bytes) else None

    async def write(self, packed: bytes) -> None:
        """Send a message, when its caller takes it."""
        await self._context.write(packed)

    async def until(self, news: asyncio.Future[None]) -> None:
        """Wait for news; raises AbortError where the call must end before there are any."""
        self.waits = True
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({news, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended = None
            self._waited()
        if self._ending is not None:
            await self._ending

    def _waited(self) -> None:
        self.waits = False
        self.answered_since = self._deadlines.now()


class Deadlines:
    """The calls of a listener whose message is awaited; one timer for all of them, for each may take as long."""

    def __init__(self, seconds_max: float) -> None:
        """Take how many seconds a message may take."""
        loop = asyncio.get_running_loop()
        self.now, self._call_later = loop.time, loop.call_later
        self._seconds_max = seconds_max
        self._began_at: dict[Call, float] = {}
        """By call, in seconds; the one that has waited longest comes first."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show life."""
        return f"<Deadlines {len(self._began_at)} awaited>"

    def begin(self, call: Call) -> None:
        """Await a message of a call."""
        self._began_at[call] = self.now()
        if self._timer is None:
            self._timer = self._call_later(self._seconds_max, self._look)

    def end(self, call: Call) -> None:
        """Await it no more; the timer finds out by itself, as most calls wait for a moment only."""
        self._began_at.pop(call, None)

    def _look(self) -> None:
        """End the calls that have waited too long, and look again when the next one may have."""
        self._timer = None
        late_since = self.now() - self._seconds_max
        for call, began_at in list(self._began_at.items()):
            if began_at > late_since:
                self._timer = self._call_later(began_at - late_since, self._look)
                return
            del self._began_at[call]
            call.end(InvalidError("the message did not arrive in time", resource="message"))


class Calls:
    """The calls that a listener has at once: so many of everybody who was let in, and a few of strangers.

    Strangers have places of their own, and each worker has, and each role: nobody takes another's.
    """

    def __init__(
        self,
        daemon: Backend,
        settings: Limits,
        peer_of: PeerOf,
        connections: Connections | None = None,
    ) -> None:
        """Take who admits callers, what is known of one without a token, and the connections of TCP's listener."""
        self._daemon = daemon
        self._peer_of = peer_of
        self._connections = connections
        self._calls_max = settings.max_connections
        self._deadlines = Deadlines(settings.body_seconds_max)
        self._num_of: dict[str | Role, int] = {}
        self._of_strangers: dict[Call, None] = {}

    def __repr__(self) -> str:
        """Show life."""
        return (
            f"<Calls {sum(self._num_of.values())} admitted, {len(self._of_strangers)} of strangers>"
        )

    def enter(self, asked: str, roles: Roles, context: Context) -> Call:
        """Admit a call by its head; `asked` is the verb or service that a refusal is told by in the log.

        Raises:
            UnknownWorkerError, NotYoursError: the caller may not.
            InvalidError: the head makes no sense.
            BusyError: there is no place.
        """
        caller = self._admit(asked, roles, _caller(context, *self._peer_of(context)))
        call = Call(context, caller, self._deadlines)
        if caller.role is Role.STRANGER:
            self._enter_stranger(call, context)
            return call
        who = caller.token or caller.role
        num_calls = self._num_of.get(who, 0)
        if num_calls >= self._calls_max:
            raise _too_many(self._calls_max)
        self._num_of[who] = num_calls + 1
        at_end(context, lambda _: self._leave(who))
        return call

    def _admit(self, asked: str, roles: Roles, caller: Caller) -> Caller:
        """Return a caller as who he is, whose connection is no stranger's where he is somebody, though he may not."""
        try:
            admitted = self._daemon.admit(roles, caller, asked)
        except KVLeaseError:
            if caller.role is not Role.STRANGER or self._daemon.knows(caller.token):
                self._let_in(caller)
            raise
        if admitted.role is not Role.STRANGER:
            self._let_in(caller)
        return admitted

    def _let_in(self, caller: Caller) -> None:
        if self._connections is not None:
            self._connections.let_in(caller.address)

    def _leave(self, who: str | Role) -> None:
        num_left = self._num_of[who] - 1
        if num_left:
            self._num_of[who] = num_left
        else:
            del self._num_of[who]

    def _enter_stranger(self, call: Call, context: Context) -> None:
        """Give a stranger a place, if need be that of who has waited longest, or of those who do not read."""
        if len(self._of_strangers) >= CALLS_OF_STRANGERS_MAX:
            oldest = next((one for one in self._of_strangers if one.waits), None)
            if oldest is not None:
                del self._of_strangers[oldest]
                oldest.end(_too_many(CALLS_OF_STRANGERS_MAX))
            elif not self._hang_up_unread():
                raise _too_many(CALLS_OF_STRANGERS_MAX)
        self._of_strangers[call] = None
        at_end(context, lambda _: self._of_strangers.pop(call, None))

    def _hang_up_unread(self) -> bool:
        """End the connections of strangers who leave answers unread: grpc would keep the calls as long as they like."""
        too_long = asyncio.get_running_loop().time() - UNREAD_SECONDS_MAX
        unread = {one.caller.address for one in self._of_strangers if one.answered_since < too_long}
        ended = self._connections.hang_up(unread) if self._connections is not None else set()
        for call in [one for one in self._of_strangers if one.caller.address in ended]:
            del self._of_strangers[call]
        return bool(ended)


async def abort(context: Context, error: KVLeaseError) -> NoReturn:
    """End a call with an error; raises AbortError, as grpc wants it."""
    await context.abort_with_status(rpc_status.to_status(faults.grpc_status(error)))
    raise AssertionError


def at_end(context: Context, done: Callable[[Context], object]) -> None:
    """Have something done when a call is over: its answer was sent, or its caller has gone."""
    context.add_done_callback(cast(Any, done))  # the stubs take a protocol of no instance


def _too_many(limit: int) -> BusyError:
    message = f"{are(limit, 'call')} open already; wait, or call with a token"
    return BusyError(message, resource="calls", limit=limit, retry_after_ms=_RETRY_AFTER_MS)


def _caller(context: Context, role: Role, address: str) -> Caller:
    """Return who calls, by the metadata of his call; it is read in one go, for every call comes by here."""
    token = key = cache = traceparent = ""
    epoch, has_token = 0, False
    for name, value in context.invocation_metadata() or ():
        text = value if isinstance(value, str) else value.decode("latin-1")
        if name == "authorization":
            if has_token:
                raise InvalidError("authorization is there twice; send it once", resource="token")
            token, has_token = _token(text), True
        elif name == "idempotency-key":
            key = text
        elif name == "kvlease-epoch":
            epoch = _epoch(text)
        elif name == "kvlease-cache":
            cache = text
        elif name == "traceparent":
            traceparent = text
    return Caller(
        transport="grpc",
        token=token,
        epoch=epoch,
        idempotency_key=key,
        cache=cache,
        role=role,
        traceparent=traceparent,
        address=address,
    )


def address_of(context: Context) -> str:
    """Return the address and port of who calls over TCP; empty for the Unix socket, where grpc names nobody."""
    kind, _, address = context.peer().partition(":")
    return unquote(address) if kind in ("ipv4", "ipv6") else ""


def _token(header: str) -> str:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownWorkerError("the metadata authorization must read: Bearer, a space, the token")
    return token.strip()


@lru_cache(maxsize=1)
def _epoch(written: str) -> int:
    """Return the number of an epoch; nearly every call is of the same one."""
    if not re.fullmatch(r"[0-9]{1,19}", written) or int(written) > _EPOCH_MAX:
        message = f"kvlease-epoch must be 0 or the epoch of an answer, not {written[:40]!r}"
        raise InvalidError(message, resource="kvlease-epoch")
    return int(written)
