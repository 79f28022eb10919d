"""Own how an answer of HTTP leaves: its head with what follows at once, a large body in pieces; the app says what."""

import asyncio
from typing import Final

from starlette.types import Message, Send

from kvleased.api.turns import Line

_PIECE_BYTES: Final = 32 << 10
"""Bytes of a large body that are sent in one turn: the kernel copies each, over loopback twice."""


def in_pieces(send: Send, line: Line) -> Send:
    """Return what sends a body a piece a turn, so that who asks for large ones holds up nobody else."""

    async def send_on(message: Message) -> None:
        body = memoryview(message.get("body", b""))
        while len(body) > _PIECE_BYTES:
            await send({**message, "body": bytes(body[:_PIECE_BYTES]), "more_body": True})
            body = body[_PIECE_BYTES:]
            await line.breathe()
        await send({**message, "body": bytes(body)} if body else message)

    return send_on


class Whole:
    """A transport that holds the head of an answer until its body is written: each write costs a call of the kernel.

    A head whose body does not follow in the same turn leaves at the turn's end.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Take what it stands for."""
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._has_begun = False

    def __getattr__(self, name: str) -> object:
        """Be the other one in everything else."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold the first of an answer, and write it together with the second; all others go on."""
        if not self._has_begun:
            self._has_begun, self._head = True, data
            self._loop.call_soon(self.flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close it once what is held is written."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Write what is held, if anything is, unless nobody is there any more."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
