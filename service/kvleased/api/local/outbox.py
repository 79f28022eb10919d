"""Own the output of one connection of the local socket, and what its peer has not read yet; frames come from others."""

import asyncio
import socket
from typing import Final

UNSENT_BYTES_MAX: Final = 4 << 20
"""Bytes that a peer may leave unread before it is disconnected."""


class Outbox:
    """The output of one connection, from `begin` to `lose`."""

    def __init__(self, sock: socket.socket) -> None:
        """Take the socket, which the transport owns."""
        self._sock = sock
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        self._kept = bytearray()

    def __repr__(self) -> str:
        """Show life."""
        return f"<Outbox {self.unsent_bytes} bytes unsent>"

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size() + len(self._kept)

    def begin(self, transport: asyncio.Transport) -> None:
        """Send over a transport from now on; when it pauses or resumes writing, `fill` or `drain` must be called."""
        self._transport = transport
        transport.set_write_buffer_limits(high=0)

    def lose(self) -> None:
        """Forget the transport, which has ended, and the output that nobody will read."""
        self._transport = None
        self._kept.clear()

    def fill(self) -> None:
        """Keep the output here from now on: the transport needs nearly a kilobyte for each write, however short."""
        self._is_full = True
        self._heed_unread()

    def drain(self) -> None:
        """Hand the kept output to the transport."""
        self._is_full = False
        self._hand_on()

    def send(self, frames: bytes) -> None:
        """Send as much as the kernel takes at once: uvloop would keep it until the end of its turn."""
        transport = self._transport
        if transport is None:
            return
        if self._is_full:
            self._kept += frames
            self._heed_unread()
            return
        if not transport.get_write_buffer_size():
            try:
                num_sent = self._sock.send(frames)
            except OSError:
                num_sent = 0  # the transport will meet the same error and handle it
            if num_sent == len(frames):
                return
            frames = frames[num_sent:]
        transport.write(frames)

    def end(self) -> None:
        """Close the connection once all output is sent."""
        self._hand_on()
        if self._transport is not None:
            self._transport.close()

    def _heed_unread(self) -> None:
        """Disconnect a peer that leaves too much unread."""
        if self._transport is not None and self.unsent_bytes > UNSENT_BYTES_MAX:
            self._transport.abort()

    def _hand_on(self) -> None:
        """Give the transport the kept output, as one write."""
        if self._kept and self._transport is not None:
            kept, self._kept = self._kept, bytearray()
            self._transport.write(kept)
