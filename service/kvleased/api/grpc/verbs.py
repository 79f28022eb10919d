"""Own the handlers of KVLeaseService's methods, built from their names; `calls` has the checks before them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final

import grpc
from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, TooLargeError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.roles import of_verb
from kvleased.api import faults
from kvleased.api.grpc.calls import Calls, Context, Handlers, abort
from kvleased.api.messages import M, parse
from kvleased.api.seam import Backend, Observer

SERVICE: Final = pb.DESCRIPTOR.services_by_name["KVLeaseService"]


class Verbs:
    """The handlers of all methods, for the calls of one listener."""

    def __init__(
        self, daemon: Backend, metrics: Observer, calls: Calls, message_bytes_max: int
    ) -> None:
        """Take the daemon, the object that counts calls, the calls of the listener, and the limit of a message."""
        self._daemon = daemon
        self._observe = metrics.observe
        self._calls = calls
        self._message_bytes_max = message_bytes_max

    def handlers(self) -> Handlers:
        """Return the handler of every method; messages stay bytes, so that we parse and refuse them ourselves."""
        found: Handlers = {}
        for method in SERVICE.methods:
            verb, kind = verb_of(method.name), getattr(pb, method.input_type.name)
            found[method.name] = (
                grpc.stream_stream_rpc_method_handler(self._stream(verb, kind))
                if method.server_streaming
                else grpc.stream_unary_rpc_method_handler(self._unary(verb, kind))
            )
        return found

    def _unary(
        self, verb: str, kind: type[Message]
    ) -> Callable[[object, Context], Awaitable[bytes]]:
        roles, call_soon = of_verb(verb), asyncio.get_running_loop().call_soon

        async def answer(_: object, context: Context) -> bytes:
            started = perf_counter()
            try:
                call = self._calls.enter(verb, roles, context)
                request = self._parse(kind, await call.read())
            except KVLeaseError as error:
                result: Message | KVLeaseError = faults.without_frames(error)
            else:
                asked = faults.ask(self._daemon.answer, verb, request, call.caller)
                result = (
                    await self._wait(verb, asked) if isinstance(asked, asyncio.Future) else asked
                )
            # Work that the caller need not wait for comes after grpc has sent the answer, which it does in this turn.
            call_soon(self._answered, verb, started, faults.code_of(result))
            if isinstance(result, KVLeaseError):
                await abort(context, result)
            return result.SerializeToString()

        return answer

    def _stream(
        self, verb: str, kind: type[Message]
    ) -> Callable[[object, Context], Awaitable[None]]:
        roles = of_verb(verb)

        async def answers(_: object, context: Context) -> None:
            try:
                call = self._calls.enter(verb, roles, context)
                request = self._parse(kind, await call.read())
            except KVLeaseError as error:
                await abort(context, error)
            await call.begin()
            async for answer in faults.stream(self._daemon, verb, request, call.caller):
                if isinstance(answer, KVLeaseError):
                    await abort(context, answer)
                await call.write(answer.SerializeToString())

        return answers

    def _parse(self, kind: type[M], packed: bytes) -> M:
        limit = self._message_bytes_max
        if len(packed) > limit:
            raise TooLargeError.of_message(len(packed), limit)
        return parse(kind, packed)

    def _answered(self, verb: str, started: float, code: str) -> None:
        """Do what an answer has left to be done, and count the call."""
        self._daemon.settle()
        self._observe(verb, "grpc", code, perf_counter() - started)

    async def _wait(self, verb: str, future: asyncio.Future[Message]) -> Message | KVLeaseError:
        """Wait for the daemon's answer; if the caller goes away meanwhile, have the daemon cancel the call."""
        self._daemon.settle()
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            self._daemon.cancel(future)
            raise
        return faults.outcome(verb, future)


def verb_of(method_name: str) -> str:
    """Return the verb of a method: its name in snake case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method_name).lower()
