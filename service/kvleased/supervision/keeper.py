"""Own the descriptors and notes kept over restarts, and the messages about them between supervisor and control process.

A message is one JSON object in one packet of a SOCK_SEQPACKET socket pair; descriptors travel with it by SCM_RIGHTS.

From the control process:
    create {number, name, bytes, metadata}   make a sealed memory region and keep it; answered by created or refused
    keep {name, metadata} + 1 descriptor     keep a descriptor over restarts; it replaces what has the same name
    note {name, metadata}                    keep metadata alone over restarts; it replaces what has the same name
    drop {name}                              forget what has this name
    recycle_mover {role, generation}         kill that mover, prove it dead, start another
    ready {}                                 the control process serves
    alive {}                                 its event loop turns; sent about once a second once caches are brought back
From the supervisor:
    hello {epoch, num_kept, restarts}        first message of a life; kept messages with `num_kept` entries follow
    kept {entries: [{name, metadata, has_descriptor, bytes}]} + one descriptor for each entry that has one
    created {number} + 1 descriptor, refused {number, message}
    mover {role, generation} + 1 descriptor  the daemon's end of a new mover's socket
    mover_died {role, generation}            that mover is proven dead
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvleased.system.descriptors import ADVICE, DescriptorsLostError, receive_packet
from kvleased.telemetry import logs

MESSAGE_BYTES_MAX: Final = 128 * 1024
"""Bytes of one message, well below what a socket buffer takes as one packet."""
METADATA_BYTES_MAX: Final = 64 * 1024
"""Bytes of one entry's metadata as JSON."""
FDS_A_MESSAGE: Final = 200
"""Descriptors that travel with one message; the kernel allows 253."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""With these seals, no worker that has the descriptor can shorten the region that others map."""
_FILES_ADVICE: Final = "; give it fewer bytes, or raise the daemon's limit on the size of files (ulimit -f, LimitFSIZE)"
"""What to do if memory, which is a file to the kernel, is above that limit."""
_FRAME_BYTES: Final = 1024
"""Bytes of a kept message that are left for all but its entries."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One descriptor that outlives the control process, with the metadata that the control process gave it."""

    name: str
    fd: int
    num_bytes: int
    """Bytes of a memory region; 0 for any other descriptor."""
    metadata: Mapping[str, Any]

    @property
    def entry(self) -> Message:
        """The entry as it travels in a kept message."""
        return {
            "name": self.name,
            "metadata": dict(self.metadata),
            "has_descriptor": True,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Metadata that outlives the control process without any descriptor."""

    name: str
    metadata: Mapping[str, Any]

    @property
    def entry(self) -> Message:
        """The entry as it travels in a kept message."""
        return {"name": self.name, "metadata": dict(self.metadata), "has_descriptor": False}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as the bytes of one packet; a message that is too large is a bug."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    assert len(payload) <= MESSAGE_BYTES_MAX, "message above MESSAGE_BYTES_MAX"
    return payload


def receive(link: socket.socket, flags: int = 0) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors, or None at the end.

    The descriptors are missing if they were lost because this process may have no more.

    Raises:
        BlockingIOError: there is no message yet.
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
    """Descriptors and notes that outlive the control process, by name."""

    def __init__(self) -> None:
        """Start empty."""
        self._kept: dict[str, Kept | Note] = {}

    def __len__(self) -> int:
        """Count what is kept."""
        return len(self._kept)

    def act(self, message: Message, fds: Sequence[int]) -> list[tuple[Message, list[int]]]:
        """Carry out create, keep, note or drop, and return the messages that answer it."""
        operation = message["op"]
        if operation == "create":
            return [self._create(message)]
        if operation == "keep" and not fds:
            # The next life does not know the process that the descriptor stands for, as if it had never attached.
            logs.line("error", "descriptor_not_kept", name=message["name"], advice=ADVICE)
        elif operation == "keep":
            self._keep(
                Kept(name=message["name"], fd=fds[0], num_bytes=0, metadata=message["metadata"])
            )
        elif operation == "note":
            self._keep(Note(name=message["name"], metadata=message["metadata"]))
        elif operation == "drop":
            self._drop(message["name"])
        return []

    def handover(self) -> Iterator[tuple[Message, list[int]]]:
        """Yield kept messages with all entries; each message keeps to the limits of bytes and descriptors."""
        entries: list[Message] = []
        fds: list[int] = []
        used_bytes = 0
        for item in self._kept.values():
            entry = item.entry
            entry_bytes = len(json.dumps(entry)) + 2
            own_fds = [item.fd] if isinstance(item, Kept) else []
            is_full = (
                len(fds) + len(own_fds) > FDS_A_MESSAGE
                or used_bytes + entry_bytes > MESSAGE_BYTES_MAX - _FRAME_BYTES
            )
            if entries and is_full:
                yield {"op": "kept", "entries": entries}, fds
                entries, fds, used_bytes = [], [], 0
            entries.append(entry)
            fds += own_fds
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
            fd = _sealed(name, num_bytes)
        except OSError as error:
            advice = _FILES_ADVICE if error.errno == errno.EFBIG else ""
            return {"op": "refused", "number": message["number"], "message": f"{error}{advice}"}, []
        self._keep(Kept(name=name, fd=fd, num_bytes=num_bytes, metadata=message["metadata"]))
        return {"op": "created", "number": message["number"]}, [fd]

    def _keep(self, item: Kept | Note) -> None:
        self._drop(item.name)
        self._kept[item.name] = item

    def _drop(self, name: str) -> None:
        item = self._kept.pop(name, None)
        if isinstance(item, Kept):
            os.close(item.fd)


def _sealed(name: str, num_bytes: int) -> int:
    """Return the descriptor of a new memory region whose size nobody can change."""
    fd = os.memfd_create(f"kvlease:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
