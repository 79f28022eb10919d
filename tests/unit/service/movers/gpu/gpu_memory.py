"""Play a GPU's streams over host memory: work is done only when its end has been asked for twice."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvleased.movers.gpu.cuda import CudaPools
from kvleased.movers.gpu.pins import Pins
from kvleased.movers.protocol import Piece
from kvleased.movers.spans import Spans


@dataclass(frozen=True)
class Region:
    """An array that stands for a device region."""

    array: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Return the address at which the region begins."""
        return self.array.ctypes.data

    def __len__(self) -> int:
        return len(self.array)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Stream:
    """A queue of copies that goes on only when its end is asked for."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    copied: list[tuple[Spans, bool]] = field(default_factory=list)
    """The copies that were asked for, and whether each was said to be pinned."""
    num_looks: int = 0

    def copy(self, spans: Spans, *, is_pinned: bool) -> None:
        """Queue copies of spans, the last span first."""
        self.copied.append((spans, is_pinned))
        for source, target, num_bytes in reversed(_rows(spans)):
            assert num_bytes > 0, "nothing to copy"
            self.waiting.append(
                lambda source=source, target=target, num_bytes=num_bytes: ctypes.memmove(
                    target, source, num_bytes
                )
            )

    def zero(self, spans: Spans) -> None:
        """Queue the filling of targets with zeros."""
        for _, target, num_bytes in _rows(spans):
            self.waiting.append(
                lambda target=target, num_bytes=num_bytes: ctypes.memset(target, 0, num_bytes)
            )

    def mark(self) -> "Mark":
        """Return a mark behind all work that waits."""
        return Mark(self)


@dataclass
class Mark:
    """The end of the work that a stream has got so far."""

    stream: Stream
    num_looks: int = 0

    @property
    def is_done(self) -> bool:
        """Tell whether the end was asked for before; if so, do the work."""
        self.num_looks += 1
        if self.num_looks == 1:
            return False
        while self.stream.waiting:
            self.stream.waiting.pop(0)()
        return True


@dataclass
class Streams:
    """The two queues of a GPU."""

    urgent: Stream = field(default_factory=Stream)
    others: Stream = field(default_factory=Stream)


@dataclass
class Pinner:
    """Remember pinned ranges, and refuse any above a number of them."""

    ranges_max: int = 1 << 30
    ranges: dict[int, int] = field(default_factory=dict)

    def pin(self, address: int, num_bytes: int) -> None:
        """Remember a range."""
        if len(self.ranges) >= self.ranges_max:
            raise InvalidError("cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY")
        self.ranges[address] = num_bytes

    def unpin(self, address: int) -> None:
        """Forget it."""
        del self.ranges[address]


def laid_on_gpu(
    devices: tuple[NDArray[np.uint8], ...],
    host: NDArray[np.uint8],
    *,
    num_blocks: int,
    bytes_per_slot: int,
    pieces: Sequence[Piece],
    chunk_bytes: int = 100,
) -> CudaPools:
    """Lay pools as a GPU's mover does: half of the host pool is pinned, and chunks end within blocks."""
    pins = Pins(Pinner(), host, chunk_bytes=chunk_bytes)
    for _ in range(pins.num_chunks // 2):
        pins.pin_next()
    pools = CudaPools.laid(
        tuple(map(Region, devices)),
        host,
        num_blocks=num_blocks,
        bytes_per_slot=bytes_per_slot,
        streams=Streams(),
        pins=pins,
        threads=ThreadPoolExecutor(2),
    )
    return pools.with_pieces(pieces)


def _rows(spans: Spans) -> list[tuple[int, int, int]]:
    columns = (spans.sources.tolist(), spans.targets.tolist(), spans.num_bytes.tolist())
    return list(zip(*columns, strict=True))
