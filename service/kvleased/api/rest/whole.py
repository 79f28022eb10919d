"""Own how an answer of HTTP leaves: its head together with what follows at once; what it says is the app's."""

import asyncio


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
