"""Streams over memory of the host: work is done no sooner than when its end has been asked for twice."""

import ctypes
from collections.abc import Callable, Sequence
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
    """A device region that is an array."""

    array: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.array.ctypes.data

    def __len__(self) -> int:
        return len(self.array)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Stream:
    """A queue of copies, which goes on only when somebody looks at it."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    copied: list[tuple[Spans, bool]] = field(default_factory=list)
    """What was asked for, and whether it was said to be pinned."""
    num_looks: int = 0

    def copy(self, spans: Spans, *, is_pinned: bool) -> None:
        """Have spans copied later, the last first."""
        self.copied.append((spans, is_pinned))
        for source, target, num_bytes in reversed(_rows(spans)):
            assert num_bytes > 0, "nothing to copy"
            self.waiting.append(
                lambda source=source, target=target, num_bytes=num_bytes: ctypes.memmove(
                    target, source, num_bytes
                )
            )

    def zero(self, spans: Spans) -> None:
        """Have targets filled with zeros later."""
        for _, target, num_bytes in _rows(spans):
            self.waiting.append(
                lambda target=target, num_bytes=num_bytes: ctypes.memset(target, 0, num_bytes)
            )

    def mark(self) -> "Mark":
        """Return the place behind all that waits."""
        return Mark(self)


@dataclass
class Mark:
    """The end of what was given to a stream."""

    stream: Stream
    num_looks: int = 0

    @property
    def is_done(self) -> bool:
        """Whether this is the second look at least."""
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
    """Remember what is pinned; refuse from a number of ranges on."""

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
    """Lay pools as the mover of a GPU does, half of the host pool pinned, in chunks that no block respects."""
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
    )
    return pools.with_pieces(pieces)


def _rows(spans: Spans) -> list[tuple[int, int, int]]:
    columns = (spans.sources.tolist(), spans.targets.tolist(), spans.num_bytes.tolist())
    return list(zip(*columns, strict=True))
