"""Own the checks of a gRPC call before its verb: its caller, a place for it, and its message.

All methods are served as if their callers streamed, which looks the same on the wire. So a call begins when its head
has arrived, and a caller that may not call is refused before its message is awaited. A read that grpc has begun must
not be abandoned: a call that ends early is aborted, which also ends the read.
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
from kvleased.calls import checks
from kvleased.counted import are

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[bytes, bytes]]"
"""The handlers of a service's methods, by name."""
PeerOf: TypeAlias = Callable[[Context], tuple[Role, str]]
"""Returns the role of a caller without a token, and its address and port, which are empty unless over TCP."""

CALLS_OF_STRANGERS_MAX: Final = 16
"""Calls at once of all strangers; for one more the oldest gives way."""
UNREAD_SECONDS_MAX: Final = 2.0
"""Seconds after which a stranger that does not read its answer loses its connection, if another needs the place."""

_RETRY_AFTER_MS: Final = 100
_STRANGERS_ADVICE: Final = "wait, or call with a token"
_SENT_ONCE: Final = {
    "authorization": "token",
    "idempotency-key": "Idempotency-Key",
    "kvlease-epoch": "epoch",
    "kvlease-cache": "cache",
}
"""Metadata that are refused if they are there twice, and the resource that the refusal names."""
_EPOCHS: Final = range(-(2**63), 2**63)
"""The epochs that the protocol can carry, as over the other transports; the daemon refuses negative ones."""


class Call:
    """One call, from the arrival of its head on."""

    __slots__ = ("_context", "_deadlines", "_ended", "_ending", "answered_since", "caller", "waits")

    def __init__(self, context: Context, caller: Caller, deadlines: Deadlines) -> None:
        """Take the context, the caller, and the deadlines by which messages must arrive."""
        self.caller = caller
        self.waits = False
        """Whether the call waits for its caller or for news, so that it can end early."""
        self.answered_since = deadlines.now()
        """Seconds on the loop's clock since which the call is being answered, if it does not wait."""
        self._context = context
        self._deadlines = deadlines
        self._ending: asyncio.Task[NoReturn] | None = None
        self._ended: asyncio.Future[None] | None = None
        """A future by which a wait for news learns that the call ends."""

    def end(self, error: KVLeaseError) -> None:
        """End a call that waits."""
        if self.waits and self._ending is None:
            self._ending = asyncio.ensure_future(abort(self._context, error))
            # The waiting handler gets the error; nobody awaits this task, so its own error is retrieved here.
            self._ending.add_done_callback(lambda task: task.cancelled() or task.exception())
            if self._ended is not None:
                self._ended.set_result(None)

    async def read(self) -> bytes:
        """Return the message of the call.

        Raises:
            InvalidError: there is no message.
            AbortError: the message did not arrive in time.
        """
        packed = await self.read_next()
        if packed is None:
            raise InvalidError("the call has no message", resource="message")
        return packed

    async def read_next(self) -> bytes | None:
        """Return the next message, or None after the last; raises AbortError if none arrives in time."""
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

    async def begin(self) -> None:
        """Tell the caller of a stream that its answers will come, though there may be none for long."""
        await self._context.send_initial_metadata(())

    async def write(self, packed: bytes) -> None:
        """Send a message as soon as the caller can take it."""
        await self._context.write(packed)

    async def until(self, news: asyncio.Future[None]) -> None:
        """Wait for news; raises AbortError if the call must end before there is any."""
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
    """The calls of a listener whose message is awaited; one timer serves all of them, as all have the same limit."""

    def __init__(self, seconds_max: float) -> None:
        """Take the seconds that a message may take."""
        loop = asyncio.get_running_loop()
        self.now, self._call_later = loop.time, loop.call_later
        self._seconds_max = seconds_max
        self._began_at: dict[Call, float] = {}
        """When the wait of each call began, in seconds; the call that has waited longest comes first."""
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
        """Stop awaiting a message; the timer runs on and finds out by itself, as most calls wait only for a moment."""
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
            call.end(InvalidError("the message was not received in time", resource="message"))


class Calls:
    """The calls that a listener has at once: a number for each worker and each role, and a few for strangers.

    Nobody can take the places of others.
    """

    def __init__(
        self,
        daemon: Backend,
        settings: Limits,
        peer_of: PeerOf,
        connections: Connections | None = None,
    ) -> None:
        """Take the daemon, which admits callers, the way to tell a caller's role, and the connections if over TCP."""
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
        """Admit a call by its head; `asked` is the verb or service by which the log tells of a refusal.

        Raises:
            UnknownWorkerError, NotYoursError: the caller may not do this.
            InvalidError: the head makes no sense.
            BusyError: there is no place for the call, or for its connection.
        """
        caller = self._admit(asked, roles, _caller(context, *self._peer_of(context)))
        call = Call(context, caller, self._deadlines)
        if caller.role is Role.STRANGER:
            self._enter_stranger(call, context)
            return call
        who = caller.token or caller.role
        num_calls = self._num_of.get(who, 0)
        if num_calls >= self._calls_max:
            raise _too_many(self._calls_max, "wait until some have ended")
        self._num_of[who] = num_calls + 1
        at_end(context, lambda _: self._leave(who))
        return call

    def _admit(self, asked: str, roles: Roles, caller: Caller) -> Caller:
        """Return the caller with its role; a known caller's connection becomes a member's even if it may not call."""
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
        """Give a stranger's call a place, if need be that of the oldest that waits, or of one with an unread answer."""
        if len(self._of_strangers) >= CALLS_OF_STRANGERS_MAX:
            oldest = next((one for one in self._of_strangers if one.waits), None)
            if oldest is not None:
                del self._of_strangers[oldest]
                oldest.end(_too_many(CALLS_OF_STRANGERS_MAX, _STRANGERS_ADVICE))
            elif not self._hang_up_unread():
                raise _too_many(CALLS_OF_STRANGERS_MAX, _STRANGERS_ADVICE)
        self._of_strangers[call] = None
        at_end(context, lambda _: self._of_strangers.pop(call, None))

    def _hang_up_unread(self) -> bool:
        """End the connections of strangers that leave answers unread: grpc would keep their calls without end."""
        too_long = asyncio.get_running_loop().time() - UNREAD_SECONDS_MAX
        unread = {one.caller.address for one in self._of_strangers if one.answered_since < too_long}
        ended = self._connections.hang_up(unread) if self._connections is not None else set()
        for call in [one for one in self._of_strangers if one.caller.address in ended]:
            del self._of_strangers[call]
        return bool(ended)


async def abort(context: Context, error: KVLeaseError) -> NoReturn:
    """End a call with an error; raises AbortError, as grpc expects."""
    await context.abort_with_status(rpc_status.to_status(faults.grpc_status(error)))
    raise AssertionError


def at_end(context: Context, done: Callable[[Context], object]) -> None:
    """Call a function when a call is over: its answer was sent, or its caller has gone."""
    context.add_done_callback(cast(Any, done))  # the stubs' type fits no function


def _too_many(limit: int, advice: str) -> BusyError:
    message = f"{are(limit, 'call')} open already; {advice}"
    return BusyError(message, resource="calls", limit=limit, retry_after_ms=_RETRY_AFTER_MS)


def _caller(context: Context, role: Role, address: str) -> Caller:
    """Return the caller that the metadata of a call describe; they are read in one pass, as every call comes here."""
    told: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if name in told and name in _SENT_ONCE:
            raise checks.repeated(name, resource=_SENT_ONCE[name])
        told[name] = value if isinstance(value, str) else value.decode("latin-1")
    authorization, epoch = told.get("authorization"), told.get("kvlease-epoch")
    return Caller(
        transport="grpc",
        token="" if authorization is None else _token(authorization),
        epoch=0 if epoch is None else _epoch(epoch),
        idempotency_key=told.get("idempotency-key", ""),
        cache=told.get("kvlease-cache", ""),
        role=role,
        traceparent=told.get("traceparent", ""),
        address=address,
    )


def address_of(context: Context) -> str:
    """Return the address and port of a caller over TCP; empty for the Unix socket, where grpc tells no peer."""
    kind, _, address = context.peer().partition(":")
    return unquote(address) if kind in ("ipv4", "ipv6") else ""


def _token(header: str) -> str:
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownWorkerError("the metadata authorization must be Bearer, a space and the token")
    return token.strip()


@lru_cache(maxsize=1)
def _epoch(written: str) -> int:
    """Return the number of an epoch; cached, as nearly every call has the same one."""
    if not re.fullmatch(r"-?[0-9]{1,19}", written) or int(written) not in _EPOCHS:
        message = f"kvlease-epoch must be 0 or the epoch of an earlier answer, not {written[:40]!r}"
        raise InvalidError(message, resource="kvlease-epoch")
    return int(written)
