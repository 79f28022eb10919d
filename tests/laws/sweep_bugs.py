"""Bugs of a disk store that the sweep must find, each switched on for the rest of the process."""

import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers import protocol
from kvleased.movers.cpu import checksum
from kvleased.movers.disk import store_file, store_place
from kvleased.movers.disk.cells import Cells
from kvleased.movers.disk.engine import DiskEngine
from kvleased.movers.disk.store_file import StoreFile
from kvleased.movers.protocol import Batch, Completion

_put_cells = StoreFile._put_cells
_act = DiskEngine._act


def old_label_stays() -> None:
    """The cell of a slot is not cleared before other bytes are written into the slot."""

    def put(self: StoreFile, slots: NDArray[np.int32], written: Cells) -> None:
        if written["magic"].any():
            _put_cells(self, slots, written)

    StoreFile._put_cells = put  # type: ignore[method-assign]


def acknowledged_before_written() -> None:
    """A store is acknowledged when it has been understood."""

    def act(self: DiskEngine, packet: bytes, fds: list[int]) -> None:
        if packet[:1] == protocol.BATCH:
            batch = Batch.decode(packet)
            if batch.direction is Direction.STORE:
                self._link.sendall(Completion(number=batch.number, is_done=True).encode())
                self._complete(batch)
                return
        _act(self, packet, fds)

    DiskEngine._act = act  # type: ignore[method-assign]


def short_write_is_done() -> None:
    """Nobody checks how much was written."""

    def write(fd: int, parts: Sequence[bytes | memoryview], offset_bytes: int) -> None:
        os.pwritev(fd, parts, offset_bytes)

    store_file.write_whole = write


def failed_write_is_done() -> None:
    """The error of a failed write is ignored."""

    def write(fd: int, parts: Sequence[bytes | memoryview], offset_bytes: int) -> None:
        try:
            os.pwritev(fd, parts, offset_bytes)
        except OSError:
            return

    store_file.write_whole = write


def bytes_are_not_checked() -> None:
    """Bytes are believed because the label is right."""
    store_file.checksum = lambda block: _Anything(checksum(block))


def left_over_is_not_known() -> None:
    """What is left of a store that was being made is taken for a file of others, so that it stays."""

    def is_ours(name: str, directory_fd: int) -> bool:
        return not name.endswith(".new") or name not in os.listdir(directory_fd)

    store_place.is_ours = is_ours


class _Anything(int):
    """A number that equals every other number."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


BUGS: Final[dict[str, Callable[[], None]]] = {
    bug.__name__: bug
    for bug in (
        old_label_stays,
        acknowledged_before_written,
        short_write_is_done,
        failed_write_is_done,
        bytes_are_not_checked,
        left_over_is_not_known,
    )
}
