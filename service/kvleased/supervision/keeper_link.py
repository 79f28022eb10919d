"""Own the control process's end of the link to the supervisor, which keeps descriptors and notes."""

import asyncio
import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import termios
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from kvlease.errors import PoolFullError, TooLargeError
from kvleased.supervision import keeper
from kvleased.supervision.keeper import Kept, Message, Note
from kvleased.supervision.silence import BEAT_SECONDS
from kvleased.system.descriptors import ADVICE

_LOG: Final[structlog.stdlib.BoundLogger] = structlog.get_logger()


class HandoverError(Exception):
    """What the supervisor keeps did not arrive whole; the missing part would be forgotten, so nothing may be served."""


class Listener(Protocol):
    """Is told of movers that come and go."""

    def mover_came(self, role: str, sock: socket.socket, generation: int) -> None:
        """Take the socket of a new mover."""

    def mover_died(self, role: str, generation: int) -> None:
        """Take note that a mover is proven dead."""


class KeeperLink:
    """Ask the supervisor for memory, and have it keep what must outlive this process."""

    def __init__(
        self,
        sock: socket.socket,
        host_directory_fd: int | None = None,
        disk_directory_fd: int | None = None,
    ) -> None:
        """Take the inherited end of the socket pair, and the directories that the supervisor holds."""
        self._sock = sock
        self.host_directory_fd = host_directory_fd
        """The directory of host pools that the daemon was started with; None if it was started without."""
        self.disk_directory_fd = disk_directory_fd
        """The same for disk stores."""
        self._number = 0
        self._pending: dict[int, tuple[str, asyncio.Future[int]]] = {}
        """The names of the regions that are being made, and the futures of their descriptors, by message number."""
        self._listener: Listener | None = None
        self._next_beat: asyncio.TimerHandle | None = None
        self.restarts: Mapping[str, int] = {}
        """How often the supervisor has replaced a control process, by how the old one ended."""
        self.renew: Callable[[], None] = lambda: None
        """Called when the supervisor was told that tokens or certificates have changed."""

    def take_over(self) -> tuple[int, list[Kept], list[Note]]:
        """Return the epoch and all descriptors and notes that were kept.

        This blocks, so call it before anything is served.

        Raises:
            HandoverError: descriptors were lost, because this process may have no more.
        """
        hello, _ = self._next()
        assert hello["op"] == "hello", "hello comes first"
        self.restarts = hello.get("restarts", {})
        kept: list[Kept] = []
        notes: list[Note] = []
        while (num_before := len(kept) + len(notes)) < hello["num_kept"]:
            message, fds = self._next()
            noted = [entry for entry in message["entries"] if not _has_descriptor(entry)]
            others = [entry for entry in message["entries"] if _has_descriptor(entry)]
            _check_arrived(len(others), len(fds), num_before, hello["num_kept"])
            notes += [Note(name=entry["name"], metadata=entry["metadata"]) for entry in noted]
            kept += [
                Kept(
                    name=entry["name"], fd=fd, num_bytes=entry["bytes"], metadata=entry["metadata"]
                )
                for entry, fd in zip(others, fds, strict=True)
            ]
        return hello["epoch"], kept, notes

    def start(self, listener: Listener) -> None:
        """Read the supervisor's messages from now on."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._read)

    def close(self) -> None:
        """Stop reading and sending beats, and close the socket."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()

    async def create(self, name: str, num_bytes: int, metadata: Mapping[str, Any]) -> int:
        """Return the descriptor of a new sealed region, which the supervisor keeps unless the caller is cancelled.

        Raises:
            PoolFullError: the kernel refuses the memory, or this process may have no more descriptors.
            TooLargeError: the metadata is above the limit.
        """
        _check(metadata)
        self._number += 1
        number = self._number
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending[number] = name, future
        self._send(
            {
                "op": "create",
                "number": number,
                "name": name,
                "bytes": num_bytes,
                "metadata": dict(metadata),
            }
        )
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                os.close(future.result())
            self.drop(name)
            raise

    def keep(self, name: str, fd: int, metadata: Mapping[str, Any]) -> None:
        """Have the supervisor keep a descriptor; when this returns, the message is sent."""
        _check(metadata)
        self._send({"op": "keep", "name": name, "metadata": dict(metadata)}, [fd])

    def note(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Have the supervisor keep metadata alone; when this returns, the message is sent."""
        _check(metadata)
        self._send({"op": "note", "name": name, "metadata": dict(metadata)})

    def drop(self, name: str) -> None:
        """Have the supervisor forget a descriptor or a note."""
        self._send({"op": "drop", "name": name})

    def give_back(self, fds: Mapping[str, int]) -> None:
        """Have the supervisor forget descriptors, in this order, and close them; they are given by name."""
        for name, fd in fds.items():
            self.drop(name)
            os.close(fd)

    def recycle_mover(self, role: str, generation: int) -> None:
        """Have the supervisor kill and replace a mover."""
        self._send({"op": "recycle_mover", "role": role, "generation": generation})

    def ready(self) -> None:
        """Say that this process serves."""
        self._send({"op": "ready"})

    def show_life(self) -> None:
        """Say that the event loop turns, now and about once a second until `close`; this never waits."""
        # If messages lie unread, the supervisor stands still, and more of them would only fill the socket.
        if not self._has_unread():
            # If the supervisor has gone, `_read` finds that out.
            with contextlib.suppress(OSError):
                self._sock.send(keeper.encode({"op": "alive"}), socket.MSG_DONTWAIT)
        self._next_beat = asyncio.get_running_loop().call_later(BEAT_SECONDS, self.show_life)

    def _has_unread(self) -> bool:
        """Tell whether the supervisor has unread messages; false where a sandbox does not allow the question."""
        try:
            (num_bytes,) = struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return False
        return bool(num_bytes)

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        payload = keeper.encode(message)
        while True:
            try:
                socket.send_fds(self._sock, [payload], fds)
            except BlockingIOError:
                # The supervisor never waits for this process, so it reads soon.
                select.select([], [self._sock], [])
                continue
            return

    def _next(self) -> tuple[Message, list[int]]:
        received = keeper.receive(self._sock)
        assert received is not None, "the supervisor has ended"
        return received

    def _read(self) -> None:
        while True:
            try:
                received = keeper.receive(self._sock, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if received is None:
                # The supervisor has ended; the kernel is about to end this process, too.
                asyncio.get_running_loop().remove_reader(self._sock.fileno())
                return
            self._act(*received)

    def _act(self, message: Message, fds: list[int]) -> None:
        assert self._listener is not None, "not started"
        operation = message["op"]
        if operation == "mover" and not fds:
            # A mover without its socket is of no use; for the socket of the next one there may be room.
            _LOG.warning("mover_not_attached", role=message["role"], advice=ADVICE)
            self.recycle_mover(message["role"], message["generation"])
        elif operation == "mover":
            sock = socket.socket(fileno=fds[0])
            self._listener.mover_came(message["role"], sock, message["generation"])
        elif operation == "mover_died":
            self._listener.mover_died(message["role"], message["generation"])
        elif operation == "renew":
            self.renew()
        elif operation == "created":
            self._created(message["number"], fds)
        elif operation == "refused":
            _, refused = self._pending.pop(message["number"])
            if not refused.cancelled():
                refused.set_exception(
                    PoolFullError(f"the kernel refused the memory: {message['message']}")
                )

    def _created(self, number: int, fds: Sequence[int]) -> None:
        name, future = self._pending.pop(number)
        if future.cancelled():
            for fd in fds:
                os.close(fd)
        elif fds:
            future.set_result(fds[0])
        else:
            self.drop(name)
            message = f"the control process has as many descriptors as it is allowed; {ADVICE}"
            future.set_exception(PoolFullError(message, resource="descriptors"))


def _has_descriptor(entry: Message) -> bool:
    """Tell whether a descriptor comes with an entry; a supervisor of an earlier build sends one with each."""
    return bool(entry.get("has_descriptor", True))


def _check_arrived(num_entries: int, num_fds: int, num_before: int, num_kept: int) -> None:
    """Refuse entries whose descriptors were lost: the kernel drops those that this process has no room for."""
    if num_fds < num_entries:
        message = (
            f"the descriptors of {num_entries} entries were lost, after {num_before} of {num_kept} had been received; "
            "this process may not have any more"
        )
        raise HandoverError(message)


def _check(metadata: Mapping[str, Any]) -> None:
    num_bytes = len(json.dumps(metadata))
    if num_bytes > keeper.METADATA_BYTES_MAX:
        message = (
            f"the registration has {num_bytes} bytes, but the limit is {keeper.METADATA_BYTES_MAX}"
        )
        raise TooLargeError(
            message, resource="registration_bytes", need=num_bytes, limit=keeper.METADATA_BYTES_MAX
        )
