"""Own the bytes of one disk store: in which order they are written, and which of them are believed.

The file is never memory-mapped, so if it is cut off, that is an error and not a signal. Cells go through the page
cache; the bytes of slots bypass it if the file system can do that.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlease.geometry import floor_div
from kvlease.units import BYTES_PER_SECTOR
from kvleased.movers.disk import cells
from kvleased.movers.disk.cells import BYTES_PER_CELL, CELL, Cells, StoreShape
from kvleased.movers.disk.errors import StoreError, told
from kvleased.movers.pools import Pools
from kvleased.movers.rows import Pool, checksum

USE_NOTED_SECONDS: Final = 60.0
"""Reading notes the use of a store when the note is older; writing always does."""
_RUN_BYTES_MAX: Final = 1 << 20
"""Bytes of adjacent slots that are read or written in one call; they should still be in the cache for their sums."""
_CHUNK_BYTES_MAX: Final = 32 << 20
"""Bytes that are written before loads may have their turn."""
_ALONE_BYTES_MAX: Final = 1 << 20
"""Bytes up to which a second thread costs more than it helps."""

_T = TypeVar("_T")
_Run = tuple[int, int]
"""First position and number of positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Blocks on their way to or from a store, one at each position, in the order of their slots in the store."""

    slots: NDArray[np.int32]
    """Slots of the store, ascending."""
    others: NDArray[np.int32]
    """Host slots to write from, or device blocks to read to."""
    labels: NDArray[np.void]
    checksums: NDArray[np.uint64]
    """The checksums that the bytes must have; 0 if unknown."""

    def __len__(self) -> int:
        return len(self.slots)


class StoreFile:
    """One open store; it owns its descriptors, and its place stays locked while they are open."""

    def __init__(
        self,
        shape: StoreShape,
        path: Path,
        file_id: str,
        cells_fd: int,
        payload_fd: int,
        helper: Executor,
    ) -> None:
        """Take the descriptors; `payload_fd` may be a second one of the same file, which bypasses the page cache."""
        self.shape = shape
        self._path = path
        self.file_id = file_id
        """Hex that no other file ever has; the file gets a new one after it was cut off."""
        self._cells_fd = cells_fd
        self._payload_fd = payload_fd
        self._helper = helper
        self._staging = threading.local()

    def close(self) -> None:
        """Close the file; a thread that still writes then gets an error and cannot hit another file."""
        for fd in {self._cells_fd, self._payload_fd} - {-1}:
            os.close(fd)
        self._cells_fd = self._payload_fd = -1

    def note_use(self) -> None:
        """Have the file count as used now, which reading it does not; it is kept the longer for that."""
        with suppress(OSError):
            os.utime(self._cells_fd)

    def check(self) -> None:
        """Look whether the file is still there and whole.

        Raises:
            StoreError: the file is removed, not whole, or cannot be looked at.
        """
        self.check_bytes(self.look())

    def look(self) -> os.stat_result:
        """Return what the kernel says of the file.

        Raises:
            StoreError: the file is removed, or cannot be looked at.
        """
        try:
            status = os.fstat(self._cells_fd)
        except OSError as error:
            raise self._failed("look at", error) from error
        if not status.st_nlink:
            advice = "keep others from removing it; it is made anew, empty"
            raise StoreError(f"{self._path} was removed; {advice}")
        return status

    def check_bytes(self, status: os.stat_result) -> None:
        """Check that the file was whole when the kernel said this of it.

        Raises:
            StoreError: it was cut off, or more was written behind its end.
        """
        if status.st_size != self.shape.file_bytes:
            found = f"{status.st_size} bytes, not {self.shape.file_bytes}"
            advice = "keep others from changing it; it is made whole again by itself"
            raise StoreError(f"{self._path} has {found}; {advice}")

    def renew_head(self, file_id: bytes) -> bool:
        """Write the file's head anew, with a new id, if it was overwritten or cut off: nobody knows what else was.

        Tells whether that was needed.

        Raises:
            StoreError: the head cannot be read or written.
        """
        try:
            if os.pread(self._cells_fd, BYTES_PER_CELL, 0) == self.shape.head(
                bytes.fromhex(self.file_id)
            ):
                return False
            write_whole(self._cells_fd, [self.shape.head(file_id)], 0)
            os.fdatasync(self._cells_fd)
        except OSError as error:
            raise self._failed("look at", error) from error
        return True

    def found(self, first: int, count: int) -> tuple[NDArray[np.int32], Cells]:
        """Return those of adjacent slots that hold something, judging by their cells, and the cells.

        Raises:
            StoreError: the cells cannot be read.
        """
        slots = np.arange(first, min(first + count, self.shape.num_slots), dtype=np.int32)
        said = self._cells(slots)
        are_whole = cells.are_whole(self.shape, slots, said)
        return slots[are_whole], said[are_whole]

    def write(
        self, transfer: Transfer, images: Pool, num_bytes: int, between: Callable[[], None]
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Write the first bytes of host slots durably; return their checksums, and which were not as expected.

        First the slots' old cells are cleared; a slot says what it holds only when its bytes are durable. `between` is
        called now and then, while no thread is at work.

        Raises:
            StoreError: it is not certain that anything was written, but no slot claims to hold what it does not.
        """
        self.check()
        sums = np.zeros(len(transfer), np.uint64)
        write = partial(self._write_runs, transfer, images, num_bytes, sums)
        try:
            self._put_cells(transfer.slots, np.zeros(len(transfer), CELL))
            for chunk in self._chunks(transfer.slots):
                self._share(write, chunk)
                between()
            os.fdatasync(self._payload_fd)
            are_wrong = (transfer.checksums != 0) & (transfer.checksums != sums)
            good = ~are_wrong
            slots, labels = transfer.slots[good], transfer.labels[good]
            self._put_cells(
                slots, cells.make_cells(self.shape, slots, labels, sums[good], num_bytes)
            )
            os.fdatasync(self._cells_fd)
        except OSError as error:
            self._deny(transfer.slots)
            raise self._failed("write", error) from error
        return sums, are_wrong

    def read(self, transfer: Transfer, pools: Pools) -> list[int]:
        """Read slots into blocks; return the positions whose bytes are missing or do not match their label or checksum.

        Raises:
            StoreError: the store does not work; nothing was written.
        """
        status = self.look()
        self.check_bytes(status)
        if not len(transfer):
            return []
        if time.time() - status.st_mtime > USE_NOTED_SECONDS:
            self.note_use()
        said = self._cells(transfer.slots)
        sums: NDArray[np.uint64] = said["checksum"]
        are_wanted = (
            cells.are_whole(self.shape, transfer.slots, said)
            & cells.have_labels(said, transfer.labels)
            & (said["num_bytes"] == pools.image_bytes)
            & ((transfer.checksums == 0) | (transfer.checksums == sums))
        )
        wanted = np.flatnonzero(are_wanted)
        missing, torn = [], []
        for chunk in self._chunks(transfer.slots[wanted]):
            read = partial(
                self._read_runs, transfer.slots[wanted], transfer.others[wanted], sums[wanted]
            )
            for unread, wrong in self._share(partial(read, pools), chunk):
                missing += unread
                torn += wrong
        self._deny(transfer.slots[wanted[sorted(torn)]])
        lost = wanted[missing + torn].tolist()
        return sorted([*lost, *np.flatnonzero(~are_wanted).tolist()])

    def _write_runs(
        self,
        transfer: Transfer,
        images: Pool,
        num_bytes: int,
        sums: NDArray[np.uint64],
        runs: Sequence[_Run],
    ) -> None:
        stride_bytes = self.shape.stride_bytes
        is_aligned = images.shape[1] == stride_bytes and not images.ctypes.data % BYTES_PER_SECTOR
        for first, count in runs:
            positions = range(first, first + count)
            slots = [images[transfer.others[position]] for position in positions]
            if not is_aligned:
                slots = self._staged(slots)
            for position, slot in zip(positions, slots, strict=True):
                sums[position] = checksum(slot[:num_bytes].data)
            offset = self.shape.slot_offset_bytes(int(transfer.slots[first]))
            write_whole(self._payload_fd, [slot.data for slot in slots], offset)

    def _read_runs(
        self,
        slots: NDArray[np.int32],
        blocks: NDArray[np.int32],
        sums: NDArray[np.uint64],
        pools: Pools,
        runs: Sequence[_Run],
    ) -> tuple[list[int], list[int]]:
        """Return the positions that could not be read, and those whose bytes do not have their checksum."""
        missing, torn = [], []

        def land(first: int, count: int) -> None:
            staged = self._staging_slots(count)
            for position, image in zip(range(first, first + count), staged, strict=True):
                if checksum(image[: pools.image_bytes].data) == sums[position]:
                    pools.scatter_slot(int(blocks[position]), image)
                else:
                    torn.append(position)

        for first, count in runs:
            if self._fetch(slots, first, count):
                land(first, count)
                continue
            # A run that cannot be read at once is read slot by slot, so that its good slots are not lost.
            for position in range(first, first + count):
                if count > 1 and self._fetch(slots, position, 1):
                    land(position, 1)
                else:
                    missing.append(position)
        return missing, torn

    def _fetch(self, slots: NDArray[np.int32], first: int, count: int) -> bool:
        """Read the bytes of adjacent slots into this thread's staging memory; tell whether all came."""
        staged = self._staging_slots(count)
        try:
            offset = self.shape.slot_offset_bytes(int(slots[first]))
            return os.preadv(self._payload_fd, [staged.data], offset) == staged.nbytes
        except OSError:
            return False

    def _staged(self, slots: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        staged = list(self._staging_slots(len(slots)))
        for target, source in zip(staged, slots, strict=True):
            target[: len(source)] = source
        return staged

    def _staging_slots(self, count: int) -> Pool:
        """Return aligned memory that only this thread uses; its bytes beyond the end of a slot are zero."""
        if not hasattr(self._staging, "slots"):
            stride_bytes = self.shape.stride_bytes
            most = max(1, floor_div(_RUN_BYTES_MAX, stride_bytes))
            memory = mmap.mmap(-1, most * stride_bytes)
            self._staging.slots = np.frombuffer(memory, np.uint8).reshape(most, stride_bytes)
        staged: Pool = self._staging.slots[:count]
        return staged

    def _chunks(self, slots: NDArray[np.int32]) -> Iterator[list[_Run]]:
        """Yield runs of adjacent slots, in chunks that are not too large."""
        stride_bytes = self.shape.stride_bytes
        chunk: list[_Run] = []
        chunk_bytes = 0
        for run in _runs(slots, floor_div(_RUN_BYTES_MAX, stride_bytes)):
            chunk.append(run)
            chunk_bytes += run[1] * stride_bytes
            if chunk_bytes >= _CHUNK_BYTES_MAX:
                yield chunk
                chunk, chunk_bytes = [], 0
        if chunk:
            yield chunk

    def _share(self, act: Callable[[Sequence[_Run]], _T], runs: Sequence[_Run]) -> list[_T]:
        """Have two threads act on half of the runs each, if that is worth it."""
        num_bytes = sum(count for _, count in runs) * self.shape.stride_bytes
        if len(runs) == 1 or num_bytes <= _ALONE_BYTES_MAX:
            return [act(runs)]
        middle = floor_div(len(runs), 2)
        theirs = self._helper.submit(act, runs[middle:])
        try:
            ours = act(runs[:middle])
        finally:
            # Whatever happened here, no thread may still be at work when this returns.
            theirs.exception()
        try:
            return [ours, theirs.result()]
        finally:
            # Otherwise an error would refer to itself by way of this frame, and keep all memory of the cache mapped.
            del theirs

    def _cells(self, slots: NDArray[np.int32]) -> Cells:
        """Return the cells of slots in the file; a cell is empty if the file ends before it, or if it cannot be read.

        Raises:
            StoreError: the file's first cell cannot be read, either.
        """
        said = np.zeros(len(slots), CELL)
        for first, count in _runs(slots, len(slots)):
            if self._fetch_cells(slots, said, first, count):
                continue
            # If a sector cannot be read, only the cells in it are lost.
            for position in range(first, first + count):
                self._fetch_cells(slots, said, position, 1)
        return said

    def _fetch_cells(self, slots: NDArray[np.int32], said: Cells, first: int, count: int) -> bool:
        """Read adjacent cells; tell whether that worked.

        Raises:
            StoreError: neither they nor the file's first cell can be read.
        """
        part = said[first : first + count]
        try:
            offset = self.shape.cell_offset_bytes(int(slots[first]))
            os.preadv(self._cells_fd, [part.view(np.uint8).data], offset)
        except OSError as error:
            part[:] = np.zeros(1, CELL)
            try:
                os.pread(self._cells_fd, BYTES_PER_CELL, 0)
            except OSError:
                raise self._failed("read", error) from error
            return False
        return True

    def _put_cells(self, slots: NDArray[np.int32], written: Cells) -> None:
        for first, count in _runs(slots, len(slots)):
            offset = self.shape.cell_offset_bytes(int(slots[first]))
            write_whole(self._cells_fd, [written[first : first + count].tobytes()], offset)

    def _deny(self, slots: NDArray[np.int32]) -> None:
        """Clear the cells of slots as far as that can be written; nobody relies on it."""
        try:
            self._put_cells(slots, np.zeros(len(slots), CELL))
        except OSError:
            return

    def _failed(self, what: str, error: OSError) -> StoreError:
        return StoreError(f"{self._path} cannot be used ({what}): {told(error)}")


def write_whole(fd: int, parts: Sequence[bytes | memoryview], offset_bytes: int) -> None:
    """Write all of the parts, one after another, or fail.

    Raises:
        OSError: not all of it was written.
    """
    if os.pwritev(fd, parts, offset_bytes) != sum(map(len, parts)):
        raise OSError(errno.EIO, "a write was incomplete")


def _runs(slots: NDArray[np.int32], count_max: int) -> list[_Run]:
    """Return the stretches of positions whose slots are adjacent, none of them too long."""
    positions = np.arange(len(slots))
    breaks = np.ones(len(slots), bool)
    breaks[1:] = np.diff(slots) != 1
    stretches = np.maximum.accumulate(np.where(breaks, positions, 0))
    firsts = np.flatnonzero((positions - stretches) % max(1, count_max) == 0)
    counts = np.diff(firsts, append=len(slots))
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))
