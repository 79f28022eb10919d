"""Own what is kept over restarts, and the messages about it between the supervisor and the control process.

A message is one JSON object in one packet of a SOCK_SEQPACKET socket pair; descriptors travel beside it by SCM_RIGHTS.

From the control process:
    create {number, name, bytes, metadata}   make a sealed memory region and keep it; answered by created or refused
    keep {name, metadata} + 1 descriptor     keep a descriptor over restarts, in place of any of the same name
    drop {name}                              forget it
    recycle_mover {role, generation}         kill that mover, prove it dead, start another
    ready {}                                 the control process serves
    alive {}                                 its event loop turns; said about once a second, once what was kept is read
From the supervisor:
    hello {epoch, num_kept, restarts}        first message of a life; `num_kept` entries follow in kept messages
    kept {entries: [{name, bytes, metadata}]} + one descriptor each
    created {number} + 1 descriptor, refused {number, message}
    mover {role, generation} + 1 descriptor  the daemon's end of a new mover's socket
    mover_died {role, generation}            that mover is proven dead
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvleased.descriptors import ADVICE, DescriptorsLostError, receive_packet
from kvleased.telemetry import logs

MESSAGE_BYTES_MAX: Final = 128 * 1024
"""Bytes of one message, well below what a socket's buffer takes in one piece."""
METADATA_BYTES_MAX: Final = 64 * 1024
"""Bytes of one entry's metadata as JSON."""
FDS_A_MESSAGE: Final = 200
"""Descriptors beside one message; the kernel allows 253."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""No worker that has the descriptor can make the region shorter under the others."""
_FRAME_BYTES: Final = 1024
"""Bytes of a kept message beside its entries."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One descriptor that outlives the control process, and what the control process noted about it."""

    name: str
    fd: int
    num_bytes: int
    """Bytes of a memory region; 0 for any other descriptor."""
    metadata: Mapping[str, Any]

    @property
    def entry(self) -> Message:
        """The entry as it travels in a kept message."""
        return {"name": self.name, "bytes": self.num_bytes, "metadata": dict(self.metadata)}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as one packet's bytes; one that is too large is a mistake of ours."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    assert len(payload) <= MESSAGE_BYTES_MAX, "message above MESSAGE_BYTES_MAX"
    return payload


def receive(link: socket.socket, flags: int = 0) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors, none where this process may have no more, or None at the end.

    Raises:
        BlockingIOError: there is none yet.
    """
    try:
        payload, fds = receive_packet(link, MESSAGE_BYTES_MAX, FDS_A_MESSAGE, flags)
    except DescriptorsLostError as lost:
        payload, fds = lost.packet, []
    if not payload:
        return None
    message: Message = json.loads(payload)
    return message, fds


class Store:
    """Descriptors that outlive the control process, by name."""

    def __init__(self) -> None:
        """Start empty."""
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        """Count what is kept."""
        return len(self._kept)

    def act(self, message: Message, fds: Sequence[int]) -> list[tuple[Message, list[int]]]:
        """Carry out create, keep or drop, and return the messages that answer it."""
        operation = message["op"]
        if operation == "create":
            return [self._create(message)]
        if operation == "keep" and not fds:
            # Whoever it proves alive is not known to the next life, as if he had never come.
            logs.line("error", "descriptor_not_kept", name=message["name"], advice=ADVICE)
        elif operation == "keep":
            self._keep(
                Kept(name=message["name"], fd=fds[0], num_bytes=0, metadata=message["metadata"])
            )
        elif operation == "drop":
            self._drop(message["name"])
        return []

    def handover(self) -> Iterator[tuple[Message, list[int]]]:
        """Yield kept messages for all entries, each within the limits of bytes and descriptors."""
        entries: list[Message] = []
        fds: list[int] = []
        used_bytes = 0
        for item in self._kept.values():
            entry = item.entry
            entry_bytes = len(json.dumps(entry)) + 2
            is_full = (
                len(fds) == FDS_A_MESSAGE
                or used_bytes + entry_bytes > MESSAGE_BYTES_MAX - _FRAME_BYTES
            )
            if entries and is_full:
                yield {"op": "kept", "entries": entries}, fds
                entries, fds, used_bytes = [], [], 0
            entries.append(entry)
            fds.append(item.fd)
            used_bytes += entry_bytes
        if entries:
            yield {"op": "kept", "entries": entries}, fds

    def close(self) -> None:
        """Forget everything."""
        for name in list(self._kept):
            self._drop(name)

    def _create(self, message: Message) -> tuple[Message, list[int]]:
        name, num_bytes = message["name"], message["bytes"]
        try:
            fd = os.memfd_create(f"kvlease:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            return {"op": "refused", "number": message["number"], "message": str(error)}, []
        self._keep(Kept(name=name, fd=fd, num_bytes=num_bytes, metadata=message["metadata"]))
        return {"op": "created", "number": message["number"]}, [fd]

    def _keep(self, kept: Kept) -> None:
        self._drop(kept.name)
        self._kept[kept.name] = kept

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            os.close(kept.fd)
