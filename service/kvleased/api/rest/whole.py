"""Own how an answer of HTTP is sent: its head together with the body, and a large body in pieces."""

import asyncio
from typing import Final

from starlette.types import Message, Send

from kvleased.api.turns import Line

_PIECE_BYTES: Final = 32 << 10
"""Bytes of a large body that are sent in one turn: the kernel copies each of them, over loopback twice."""


def in_pieces(send: Send, line: Line) -> Send:
    """Return a `send` that sends one piece of a body in each turn, so that large bodies hold up nobody else."""

    async def send_on(message: Message) -> None:
        body = memoryview(message.get("body", b""))
        while len(body) > _PIECE_BYTES:
            await send({**message, "body": bytes(body[:_PIECE_BYTES]), "more_body": True})
            body = body[_PIECE_BYTES:]
            await line.breathe()
        await send({**message, "body": bytes(body)} if body else message)

    return send_on


class Whole:
    """A transport that holds the head of an answer until its body is written, to save a system call.

    If the body does not follow in the same turn, the head is sent at the end of the turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Take the transport that it wraps, and the loop."""
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._has_begun = False

    def __getattr__(self, name: str) -> object:
        """Return everything else from the wrapped transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold the first part of an answer, and write it together with the second; write all later parts at once."""
        if not self._has_begun:
            self._has_begun, self._head = True, data
            self._loop.call_soon(self.flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close the transport once the held part is written."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Write the held part, if there is one, unless the transport is closing."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
