"""The daemon's end of a disk mover for tests: pools of real memory, and a method for each packet."""

import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.core.tier.labels import LABEL
from kvleased.memory.cpu import map_region
from kvleased.movers import protocol
from kvleased.movers.cpu import checksum
from kvleased.movers.disk.cells import StoreShape
from kvleased.movers.protocol import Batch, Completion, Found, Piece, PoolMap, Purge, Purged, Status

POOL: Final = 5
LAYOUT: Final = bytes(range(32))
_SECONDS_TO_ANSWER: Final = 30.0

Labels = NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class Pools:
    """How large pools are, and how many pieces a block has on the device."""

    num_blocks: int = 16
    num_slots: int = 16
    num_disk_slots: int = 16
    bytes_per_slot: int = 8192
    num_pieces: int = 1
    padding_bytes: int = 0
    """Bytes at the end of a slot that belong to no piece."""

    @property
    def bytes_per_piece(self) -> int:
        """Bytes of each piece."""
        return (self.bytes_per_slot - self.padding_bytes) // self.num_pieces

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all its pieces."""
        return self.bytes_per_piece * self.num_pieces

    @property
    def shape(self) -> StoreShape:
        """The shape of the store."""
        return StoreShape(
            layout=LAYOUT, bytes_per_slot=self.bytes_per_slot, num_slots=self.num_disk_slots
        )

    def message(self, file_id: str = "") -> PoolMap:
        """Return the message that tells the mover of the pools; on the device, layers are outermost."""
        num_bytes = self.bytes_per_piece
        return PoolMap(
            pool=POOL,
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            bytes_per_slot=self.bytes_per_slot,
            device_bytes=(self.num_blocks * self.bytes_per_block,),
            layout_fingerprint=LAYOUT.hex(),
            num_disk_slots=self.num_disk_slots,
            file_id=file_id,
            pieces=tuple(
                Piece(
                    rank=0,
                    offset_bytes=index * self.num_blocks * num_bytes,
                    block_stride_bytes=num_bytes,
                    num_bytes=num_bytes,
                    slot_offset_bytes=index * num_bytes,
                )
                for index in range(self.num_pieces)
            ),
        )


class Driver:
    """Send requests to a mover over a link, and remember everything that it said."""

    def __init__(self, link: socket.socket, pools: Pools) -> None:
        self.link = link
        self.pools = pools
        self.statuses: list[Status] = []
        self.found: dict[int, tuple[bytes, int]] = {}
        """Label and checksum of the slots that were found."""
        self.has_looked = False
        self.looked_through: set[int] = set()
        """Pools whose stores have been looked through."""
        self.completions: deque[Completion] = deque()
        self.purges: deque[Purged] = deque()
        self._number = 0
        sizes = (
            pools.num_blocks * pools.bytes_per_block,
            pools.num_slots * pools.bytes_per_slot,
        )
        self._fds = [os.memfd_create("pool", os.MFD_CLOEXEC) for _ in sizes]
        for fd, num_bytes in zip(self._fds, sizes, strict=True):
            os.ftruncate(fd, num_bytes)
        device, host = (
            map_region(fd, num_bytes) for fd, num_bytes in zip(self._fds, sizes, strict=True)
        )
        self.host = host.reshape(pools.num_slots, pools.bytes_per_slot)
        self._device = device.reshape(pools.num_pieces, pools.num_blocks, pools.bytes_per_piece)
        link.settimeout(_SECONDS_TO_ANSWER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        for fd in self._fds:
            os.close(fd)

    def block(self, block: int) -> bytes:
        """Return the bytes of a block, over all its pieces."""
        return self._device[:, block].tobytes()

    def wipe(self) -> None:
        """Erase the device, so that no stored byte is left there."""
        self._device[:] = 0

    def fill(self, host_id: int, content: int) -> int:
        """Put the content with this number in a host slot; return its checksum."""
        payload = payload_of(content, self.pools.bytes_per_block)
        self.host[host_id, : len(payload)] = np.frombuffer(payload, np.uint8)
        return checksum(memoryview(payload))

    def map(self, file_id: str = "") -> None:
        """Tell the mover of the pools."""
        self.map_other(self.pools.message(file_id))

    def map_other(self, message: PoolMap) -> None:
        """Tell the mover of the pools of another cache, which are in the same memory."""
        first, *rest = message.packets()
        socket.send_fds(self.link, [first], self._fds)
        for packet in rest:
            self.link.send(packet)

    def unmap(self) -> None:
        """Have the mover forget the pools."""
        self.link.send(protocol.encode_unmap(POOL))

    def hear(self) -> bytes:
        """Take in one packet; return its kind, which is empty at the end."""
        packet = self.link.recv(protocol.PACKET_BYTES_MAX)
        kind = packet[:1]
        if kind == protocol.DONE:
            self.completions.append(Completion.decode(packet))
        elif kind == protocol.STATUS:
            self.statuses.append(Status.decode(packet))
        elif kind == protocol.FOUND:
            self._note(Found.decode(packet))
        elif kind == protocol.PURGED:
            self.purges.append(Purged.decode(packet))
        return kind

    def purge(self) -> str:
        """Have the store removed, and wait for the answer; return the reason if it was not removed."""
        self.link.send(Purge(pool=POOL).encode())
        while not self.purges:
            if not self.hear():
                raise ConnectionResetError
        return self.purges.popleft().reason

    def until_on(self) -> None:
        """Wait until the store works."""
        while not (self.statuses and self.statuses[-1].is_on):
            if not self.hear():
                raise ConnectionResetError

    def until_off(self) -> str:
        """Wait until the store does not work; return the reason."""
        while not self.statuses or self.statuses[-1].is_on:
            if not self.hear():
                raise ConnectionResetError
        return self.statuses[-1].reason

    def look(self) -> dict[int, tuple[bytes, int]]:
        """Wait until the store has been looked through; return label and checksum of the slots that hold something."""
        while not self.has_looked:
            if not self.hear():
                raise ConnectionResetError
        return self.found

    def store(
        self, slots: list[int], labels: Labels, hosts: list[int], sums: list[int] | None = None
    ) -> Completion:
        """Store host slots, and wait for the answer."""
        self.send(Direction.STORE, hosts, slots, labels, sums)
        return self.answer()

    def load(
        self, slots: list[int], labels: Labels, blocks: list[int], sums: list[int] | None = None
    ) -> Completion:
        """Load blocks, and wait for the answer."""
        self.send(Direction.LOAD, slots, blocks, labels, sums)
        return self.answer()

    def send(
        self,
        direction: Direction,
        sources: list[int],
        targets: list[int],
        labels: Labels,
        sums: list[int] | None = None,
    ) -> int:
        """Send a batch; return its number."""
        self._number += 1
        batch = Batch(
            number=self._number,
            pool=POOL,
            direction=direction,
            with_checksums=True,
            source_ids=np.array(sources, np.int32).tobytes(),
            target_ids=np.array(targets, np.int32).tobytes(),
            checksums=b"" if sums is None else np.array(sums, np.uint64).tobytes(),
            labels=labels.tobytes(),
        )
        self.link.send(batch.encode())
        return self._number

    def answer(self) -> Completion:
        """Wait for the next answer to a batch."""
        while not self.completions:
            if not self.hear():
                raise ConnectionResetError
        return self.completions.popleft()

    def _note(self, found: Found) -> None:
        labels = np.frombuffer(found.labels, LABEL)
        sums = np.frombuffer(found.checksums, np.uint64).tolist()
        slots = np.frombuffer(found.slot_ids, np.int32).tolist()
        for slot, label, one in zip(slots, labels, sums, strict=True):
            self.found[slot] = (label.tobytes(), one)
        self.has_looked = self.has_looked or found.is_last
        if found.is_last:
            self.looked_through.add(found.pool)


def labels_of(contents: list[int], generation: int = 1) -> Labels:
    """Return the labels of the contents with these numbers."""
    labels = np.zeros(len(contents), LABEL)
    for label, content in zip(labels, contents, strict=True):
        label["key"] = np.void((content + 1).to_bytes(32, "little"))
        label["tenant"] = content % 3
        label["generation"] = generation
        label["position"] = content % 7
    return labels


def payload_of(content: int, num_bytes: int) -> bytes:
    """Return the bytes that always belong to a content's number; no two contents have a sector in common."""
    return np.random.default_rng(content).bytes(num_bytes)
