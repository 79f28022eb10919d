"""Own copies between pools of CPU memory; the packets that ask for them are `engine`'s business."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers.protocol import Batch

_RUN_BYTES_MAX: Final = 1 << 20
"""Bytes of a run of adjacent blocks that is copied in one go: it should still be in the cache for its checksums."""


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

    device: NDArray[np.uint8]
    host: NDArray[np.uint8]

    def carry_out(self, batch: Batch) -> Copied:
        """Copy or scrub what the batch says.

        Raises:
            OutOfBoundsError: some id lies outside its pool; then nothing was written.
        """
        targets = np.frombuffer(batch.target_ids, np.int32)
        sources = np.frombuffer(batch.source_ids, np.int32)
        if batch.direction is Direction.SCRUB:
            _check_bounds(targets, self.device)
            for start, end in _runs(targets, targets, self._blocks_a_run):
                self.device[targets[start] : targets[start] + end - start] = 0
            return Copied()
        is_offload = batch.direction is Direction.OFFLOAD
        source, target = (self.device, self.host) if is_offload else (self.host, self.device)
        _check_bounds(sources, source)
        _check_bounds(targets, target)
        if len(sources) != len(targets):
            raise OutOfBoundsError
        if is_offload and batch.with_checksums:
            return self._copy_and_sum(source, target, sources, targets)
        if not is_offload and batch.checksums:
            wanted = np.frombuffer(batch.checksums, np.uint64)
            if len(wanted) != len(targets):
                raise OutOfBoundsError
            return self._copy_and_verify(source, target, sources, targets, wanted)
        for source_id, target_id, count in self._copy_runs(sources, targets):
            target[target_id : target_id + count] = source[source_id : source_id + count]
        return Copied()

    def _copy_and_sum(
        self,
        source: NDArray[np.uint8],
        target: NDArray[np.uint8],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> Copied:
        sums: list[int] = []
        for source_id, target_id, count in self._copy_runs(sources, targets):
            target[target_id : target_id + count] = source[source_id : source_id + count]
            sums += [checksum(target[block]) for block in range(target_id, target_id + count)]
        return Copied(checksums=np.array(sums, np.uint64).tobytes())

    def _copy_and_verify(
        self,
        source: NDArray[np.uint8],
        target: NDArray[np.uint8],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        wanted: NDArray[np.uint64],
    ) -> Copied:
        copied = Copied()
        expected = wanted.tolist()
        position = 0
        for source_id, target_id, count in self._copy_runs(sources, targets):
            target[target_id : target_id + count] = source[source_id : source_id + count]
            for block in range(target_id, target_id + count):
                # 0 stands for "no checksum was taken", which proves nothing either way.
                if expected[position] and checksum(target[block]) != expected[position]:
                    copied.failed.append(position)
                position += 1
        return copied

    @property
    def _blocks_a_run(self) -> int:
        bytes_per_block: int = self.device.shape[1]
        return max(1, _RUN_BYTES_MAX // bytes_per_block)

    def _copy_runs(
        self, sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> list[tuple[int, int, int]]:
        """Return (source, target, blocks) of each run of blocks that are adjacent at both ends."""
        runs = _runs(sources, targets, self._blocks_a_run)
        firsts = [start for start, _ in runs]
        return [
            (source_id, target_id, end - start)
            for source_id, target_id, (start, end) in zip(
                sources[firsts].tolist(), targets[firsts].tolist(), runs, strict=True
            )
        ]


def checksum(block: NDArray[np.uint8]) -> int:
    """Return the xxh3 of a block's bytes, never 0, which stands for "none was taken"."""
    return xxhash.xxh3_64_intdigest(block.data) or 1


def _check_bounds(ids: NDArray[np.int32], pool: NDArray[np.uint8]) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(pool)):
        raise OutOfBoundsError


def _runs(
    sources: NDArray[np.int32], targets: NDArray[np.int32], blocks_max: int
) -> list[tuple[int, int]]:
    """Return [start, end) of each stretch of positions, up to `blocks_max`, whose ids are adjacent at both ends."""
    if len(targets) == 0:
        return []
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    edges = [0, *breaks.tolist(), len(targets)]
    return [
        (start, min(start + blocks_max, end))
        for first, end in pairwise(edges)
        for start in range(first, end, blocks_max)
    ]
