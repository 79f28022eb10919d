"""Own copies between pools of CPU memory; the packets that ask for them are `engine`'s business."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers.protocol import Batch

_RUN_BYTES_MAX: Final = 1 << 18
"""Bytes of a run of adjacent blocks that is copied in one go: it should still be in the cache for its checksums."""

Pool = NDArray[np.uint8]
"""[blocks, bytes_per_block]"""
_Run = tuple[int, int, int]
"""First source, first target, blocks."""


class OutOfBoundsError(Exception):
    """A batch names a block outside its pool; nothing of it is carried out."""


@dataclass(slots=True)
class Copied:
    """What a batch led to."""

    checksums: bytes = b""
    failed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CpuPools:
    """The device pool and the host pool of one cache, each [blocks, bytes_per_block]."""

    device: Pool
    host: Pool

    def carry_out(self, batch: Batch) -> Copied:
        """Copy or scrub what the batch says.

        Raises:
            OutOfBoundsError: some id lies outside its pool; then nothing was written.
        """
        targets = np.frombuffer(batch.target_ids, np.int32)
        sources = np.frombuffer(batch.source_ids, np.int32)
        if batch.direction is Direction.SCRUB:
            _check_bounds(targets, self.device)
            targets = np.sort(targets)
            for _, target_id, count in self._runs(targets, targets):
                self.device[target_id : target_id + count] = 0
            return Copied()
        is_offload = batch.direction is Direction.OFFLOAD
        source, target = (self.device, self.host) if is_offload else (self.host, self.device)
        _check_bounds(sources, source)
        _check_bounds(targets, target)
        wanted = np.frombuffer(b"" if is_offload else batch.checksums, np.uint64)
        if len(sources) != len(targets) or len(wanted) not in {0, len(targets)}:
            raise OutOfBoundsError
        # In the order of the memory that is written: that is quicker, and more blocks are found adjacent.
        order = np.argsort(targets)
        runs = self._runs(sources[order], targets[order])
        if is_offload and batch.with_checksums:
            sums = _in_order(order, _copy_and_sum(source, target, runs))
            return Copied(checksums=sums.tobytes())
        if len(wanted):
            sums = _in_order(order, _copy_and_sum(source, target, runs))
            # 0 stands for "no checksum was taken", which proves nothing either way.
            return Copied(failed=np.flatnonzero((wanted != 0) & (sums != wanted)).tolist())
        _copy(source, target, runs)
        return Copied()

    def _runs(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> list[_Run]:
        """Return (source, target, blocks) of each stretch of blocks, not too long, that are adjacent at both ends."""
        blocks_max = max(1, _RUN_BYTES_MAX // self.device.shape[1])
        positions = np.arange(len(targets))
        breaks = np.ones(len(targets), bool)
        breaks[1:] = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        stretches = np.maximum.accumulate(np.where(breaks, positions, 0))
        firsts = np.flatnonzero((positions - stretches) % blocks_max == 0)
        counts = np.diff(firsts, append=len(targets))
        return list(
            zip(sources[firsts].tolist(), targets[firsts].tolist(), counts.tolist(), strict=True)
        )


def checksum(block: memoryview) -> int:
    """Return the xxh3 of a block's bytes, never 0, which stands for "none was taken"."""
    return xxhash.xxh3_64_intdigest(block) or 1


def _copy(source: Pool, target: Pool, runs: Iterable[_Run]) -> None:
    # Slices of a memoryview cost half of what those of an array do.
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    for source_id, target_id, count in runs:
        start, to = source_id * bytes_per_block, target_id * bytes_per_block
        num_bytes = count * bytes_per_block
        written[to : to + num_bytes] = read[start : start + num_bytes]


def _copy_and_sum(source: Pool, target: Pool, runs: Iterable[_Run]) -> list[int]:
    """Copy, and return the checksum of each block as it now lies in the target, taken while it is in the cache."""
    read, written = _bytes_of(source), _bytes_of(target)
    bytes_per_block = target.shape[1]
    sums: list[int] = []
    for source_id, target_id, count in runs:
        start, to = source_id * bytes_per_block, target_id * bytes_per_block
        num_bytes = count * bytes_per_block
        written[to : to + num_bytes] = read[start : start + num_bytes]
        sums += [
            checksum(written[block : block + bytes_per_block])
            for block in range(to, to + num_bytes, bytes_per_block)
        ]
    return sums


def _check_bounds(ids: NDArray[np.int32], pool: Pool) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(pool)):
        raise OutOfBoundsError


def _bytes_of(pool: Pool) -> memoryview:
    return pool.reshape(-1).data


def _in_order(order: NDArray[np.intp], sums: list[int]) -> NDArray[np.uint64]:
    """Return what was found in another order in the order of the batch."""
    found = np.empty(len(order), np.uint64)
    found[order] = sums
    return found
