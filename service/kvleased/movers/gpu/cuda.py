"""Own copies between pools on a GPU and the host pool; `streams` owns how a GPU carries them out.

Nothing waits in a step: a batch is begun, and it ends when the GPU has done its part and all checksums are taken. They
are taken over the host's bytes: of an offload as part after part arrives, of a reload while they are sent.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from time import sleep
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers.batches import URGENT
from kvleased.movers.gpu.pins import Pins
from kvleased.movers.gpu.summing import Summing
from kvleased.movers.pools import (
    Copied,
    OutOfBoundsError,
    Region,
    blocks_inside,
    differing,
    ids_of,
    image_bytes_of,
    replicas,
    slots_in,
)
from kvleased.movers.protocol import Batch, Piece
from kvleased.movers.rows import Pool
from kvleased.movers.spans import End, Ids, Spans, Way

PART_BYTES: Final = 16 << 20
"""Bytes of an offload that are summed while later ones arrive."""
POLL_SECONDS: Final = 20e-6
"""Seconds between two looks at events when there is nothing else to do."""


class Mark(Protocol):
    """A place in a stream."""

    @property
    def is_done(self) -> bool:
        """Whether everything before it has been carried out."""


class Stream(Protocol):
    """A queue of work of a GPU."""

    def copy(self, spans: Spans, *, is_pinned: bool) -> None:
        """Copy every span; memory of the host is pinned, or the copies are waited for."""

    def zero(self, spans: Spans) -> None:
        """Fill the targets with zeros."""

    def mark(self) -> Mark:
        """Return the place behind all work given so far."""


class Streams(Protocol):
    """The two queues of one GPU: copies of one direction do not wait for those of the other."""

    @property
    def urgent(self) -> Stream:
        """Work that a request waits for: copies towards the device, and work on it."""

    @property
    def others(self) -> Stream:
        """Copies that only write back."""


class Memory(Protocol):
    """A rank's device region."""

    @property
    def address(self) -> int:
        """The address at which it begins."""

    def __len__(self) -> int:
        """Count its bytes."""

    def close(self) -> None:
        """Unmap it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some blocks of a batch, which the GPU has been given."""

    mark: Mark
    """The place in the stream behind their copies."""
    slot_ids: Ids
    """The slots that are to be summed when the copies have ended; none if nothing is to be summed then."""


class Work:
    """A batch that has begun."""

    def __init__(self, parts: Sequence[Part], *, batch: Batch, summing: Summing) -> None:
        """Take the parts in the order in which they end."""
        self.batch = batch
        self._under_way = deque(parts)
        self._summing = summing

    def step(self) -> bool:
        """Do what can be done without waiting, but not for long; tell whether anything was done."""
        num_before = len(self._under_way)
        while self._under_way and self._under_way[0].mark.is_done:
            self._summing.add(self._under_way.popleft().slot_ids)
        return self._summing.step() or len(self._under_way) < num_before

    @property
    def is_over(self) -> bool:
        """Whether everything has been moved and summed."""
        return not self._under_way and self._summing.is_over

    def copied(self) -> Copied:
        """Return the result, once the work is over."""
        assert self.is_over, "still under way"
        sums = self._summing.sums
        if self.batch.direction is Direction.OFFLOAD:
            return Copied(checksums=sums.tobytes())
        wanted = np.frombuffer(self.batch.checksums, np.uint64)
        return Copied(failed=differing(sums, wanted) if len(sums) else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPools:
    """The device pools of all ranks, on one GPU, and the host pool of one cache."""

    devices: tuple[Memory, ...]
    slots: Pool
    """[slots, bytes_per_slot]"""
    num_blocks: int
    """Number of blocks whose pieces all lie in their regions."""
    pieces: tuple[Piece, ...]
    streams: Streams
    pins: Pins
    threads: Executor
    """Threads that take checksums."""

    @classmethod
    def laid(  # noqa: PLR0913 - each is a part of the pools
        cls,
        devices: tuple[Memory, ...],
        host: Region,
        *,
        num_blocks: int,
        bytes_per_slot: int,
        streams: Streams,
        pins: Pins,
        threads: Executor,
    ) -> Self:
        """Lay a cache over its regions; no piece of its blocks is known yet."""
        return cls(
            devices=devices,
            slots=slots_in(host, bytes_per_slot, ()),
            num_blocks=num_blocks,
            pieces=(),
            streams=streams,
            pins=pins,
            threads=threads,
        )

    def with_pieces(self, pieces: Sequence[Piece]) -> Self:
        """Return the same pools with more pieces; leave out blocks and slots that would lie outside of them."""
        # An empty piece would claim another piece's place in the slot.
        found = (*self.pieces, *(piece for piece in pieces if piece.num_bytes))
        return type(self)(
            devices=self.devices,
            slots=slots_in(self.slots.reshape(-1), self.slots.shape[1], found),
            num_blocks=blocks_inside(self.num_blocks, found, [len(one) for one in self.devices]),
            pieces=found,
            streams=self.streams,
            pins=self.pins,
            threads=self.threads,
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block, over all ranks that keep different bytes."""
        return sum(piece.num_bytes for piece in self._own_pieces)

    @property
    def image_bytes(self) -> int:
        """Bytes of a slot up to the end of its last piece."""
        return image_bytes_of(self.pieces)

    def begin(self, batch: Batch) -> Work:
        """Give the GPU the work of a batch.

        Raises:
            OutOfBoundsError: an id lies outside its pool; nothing was begun.
        """
        direction = batch.direction
        sources, targets, wanted = ids_of(
            batch, num_blocks=self.num_blocks, num_slots=len(self.slots)
        )
        stream = self.streams.urgent if direction in URGENT else self.streams.others
        summing = Summing(self.slots[:, : self.image_bytes], self.threads)
        if direction is Direction.OFFLOAD and batch.with_checksums:
            parts = self._offloaded_in_parts(stream, sources, targets)
        else:
            self._give(stream, direction, Spans.of(self._ways(direction), sources, targets))
            parts = [Part(stream.mark(), targets[:0])]
        if len(wanted):
            summing.add(sources)
        return Work(parts, batch=batch, summing=summing)

    def carry_out(self, batch: Batch) -> Copied:
        """Carry out a batch, and wait for its end.

        Raises:
            OutOfBoundsError: an id lies outside its pool; nothing was written.
        """
        work = self.begin(batch)
        while not work.is_over:
            if not work.step():
                sleep(POLL_SECONDS)
        return work.copied()

    def scatter_slot(self, block: int, image: NDArray[np.uint8]) -> None:
        """Write one block of the device pool, on every rank, from the bytes of a slot, and wait until it is done.

        Raises:
            OutOfBoundsError: the block lies outside the pool, or the image is shorter than a block needs.
        """
        if not 0 <= block < self.num_blocks or len(image) < self.image_bytes:
            raise OutOfBoundsError
        ways = self._ways(Direction.RELOAD, image.ctypes.data)
        stream = self.streams.urgent
        stream.copy(Spans.of(ways, _FIRST, np.array([block], np.int32)), is_pinned=False)
        mark = stream.mark()
        while not mark.is_done:
            sleep(POLL_SECONDS)

    def close(self) -> None:
        """Let go of the memory; no copy may still use it."""
        self.pins.close()
        for device in self.devices:
            device.close()

    def _give(self, stream: Stream, direction: Direction, spans: Spans) -> None:
        if direction is Direction.SCRUB:
            stream.zero(spans)
        elif direction is Direction.DUPLICATE:
            stream.copy(spans, is_pinned=True)
        else:
            self._copy(stream, spans, host_is_source=direction is not Direction.OFFLOAD)

    def _offloaded_in_parts(self, stream: Stream, sources: Ids, targets: Ids) -> list[Part]:
        blocks_a_part = max(1, PART_BYTES // max(1, self.image_bytes))
        ways, parts = self._ways(Direction.OFFLOAD), []
        for start in range(0, len(targets), blocks_a_part):
            some = slice(start, start + blocks_a_part)
            self._give(stream, Direction.OFFLOAD, Spans.of(ways, sources[some], targets[some]))
            parts.append(Part(stream.mark(), targets[some]))
        return parts

    def _copy(self, stream: Stream, spans: Spans, *, host_is_source: bool) -> None:
        for part, is_pinned in self.pins.sorted(spans, host_is_source=host_is_source):
            stream.copy(part, is_pinned=is_pinned)

    def _ways(self, direction: Direction, slots_address: int | None = None) -> list[Way]:
        """Return where the pieces of blocks are read and written; `slots_address` stands for another array of slots."""
        host = self.slots.ctypes.data if slots_address is None else slots_address
        ways = []
        for piece in self._own_pieces if direction is Direction.OFFLOAD else self.pieces:
            there = End(
                self.devices[piece.rank].address + piece.offset_bytes, piece.block_stride_bytes
            )
            here = End(host + piece.slot_offset_bytes, self.slots.shape[1])
            source, target = {
                Direction.OFFLOAD: (there, here),
                Direction.RELOAD: (here, there),
            }.get(direction, (there, there))
            ways.append(Way(source, target, piece.num_bytes))
        return ways

    @property
    def _own_pieces(self) -> list[Piece]:
        """The pieces that are offloaded: those that no earlier rank keeps, too."""
        pairs = zip(self.pieces, replicas(self.pieces), strict=True)
        return [piece for piece, is_replica in pairs if not is_replica]


_FIRST: Final = np.zeros(1, np.int32)
