"""Own where a chunk's pages lie in a row of the pool, and the copies between rows and the engine's tensors.

Which rows belong to whom, and when to copy, is decided elsewhere.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.geometry import ceil_div

HEAD_BYTES: Final = 64
"""Bytes at the start of a row that name its content: the block's key, then zeros; one cache line in all."""
KEY_BYTES: Final = 32

_LIBC: Final = ctypes.CDLL(None)
_memmove: Final = _LIBC.memmove
_memmove.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
_memmove.restype = None

Addresses = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One page of every block of a group: its tensor, and its place in a block's share of a row."""

    tensor: int
    num_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTensor:
    """One of the engine's tensors, whose first axis counts its blocks."""

    address: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where the pages of a chunk lie in a row: after the head, block by block, page by page."""

    bytes_per_block: int
    blocks_per_chunk: int
    groups: tuple[tuple[Part, ...], ...]

    @classmethod
    def of_pages(
        cls,
        pages: Sequence[Sequence[tuple[int, int]]],
        *,
        bytes_per_block: int,
        blocks_per_chunk: int,
    ) -> Self:
        """Lay out the pages of every group; each page is given by its tensor and its bytes.

        Raises:
            ValueError: the pages of a group take more bytes than a block has.
        """
        groups = []
        for group_id, group in enumerate(pages):
            parts, offset_bytes = [], 0
            for tensor, num_bytes in group:
                parts.append(Part(tensor=tensor, num_bytes=num_bytes, offset_bytes=offset_bytes))
                offset_bytes += num_bytes
            if offset_bytes > bytes_per_block:
                message = (
                    f"the pages of group {group_id} take {offset_bytes} bytes of a block, "
                    f"but a block has {bytes_per_block}"
                )
                raise ValueError(message)
            groups.append(tuple(parts))
        return cls(
            bytes_per_block=bytes_per_block,
            blocks_per_chunk=blocks_per_chunk,
            groups=tuple(groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """Pages of one group to copy: the engine's blocks, and where each block starts in the pool's rows."""

    parts: tuple[Part, ...]
    blocks: NDArray[np.int64]
    chunks: NDArray[np.int64]
    """For each block, the index of its chunk in the job."""
    share_offsets: NDArray[np.int64]
    """For each block, where its share starts in its chunk's row, in bytes."""


def moves_of(
    layout: RowLayout,
    blocks: NDArray[np.int32],
    group_blocks: Sequence[int],
    first_blocks: Sequence[int],
    num_chunks: int,
) -> list[Move]:
    """Return what a job copies: blocks in the order of their groups; each group's blocks fill chunk after chunk.

    Only a group's first chunk may lack blocks at its start, and only its last chunk at its end.

    Raises:
        ValueError: the blocks and the chunks do not match.
    """
    moves, num_blocks, num_used = [], 0, 0
    per_chunk = layout.blocks_per_chunk
    for parts, count, first_block in zip(layout.groups, group_blocks, first_blocks, strict=True):
        if not count:
            continue
        places = first_block % per_chunk + np.arange(count, dtype=np.int64)
        moves.append(
            Move(
                parts=parts,
                blocks=blocks[num_blocks : num_blocks + count].astype(np.int64),
                chunks=num_used + places // per_chunk,
                share_offsets=HEAD_BYTES + places % per_chunk * layout.bytes_per_block,
            )
        )
        num_blocks += count
        num_used += ceil_div(int(places[-1]) + 1, per_chunk)
    if num_blocks != len(blocks) or num_used != num_chunks:
        message = f"a job of {len(blocks)} blocks in {num_chunks} chunks fills {num_blocks} blocks in {num_used}"
        raise ValueError(message)
    return moves


class Rows:
    """One rank's pool as rows of one block each."""

    def __init__(self, region: NDArray[np.uint8], num_rows: int, row_stride_bytes: int) -> None:
        """View a mapped region; it stays mapped as long as this object is used."""
        self._region = region
        self.num_rows = num_rows
        self.row_stride_bytes = row_stride_bytes
        self.address = region.ctypes.data
        rows = region[: num_rows * row_stride_bytes].reshape(num_rows, row_stride_bytes)
        self._heads: NDArray[np.uint8] = rows[:, :KEY_BYTES]

    def __repr__(self) -> str:
        """Show life: the number of rows, and the bytes of each."""
        return f"<Rows {self.num_rows} of {self.row_stride_bytes} bytes>"

    @property
    def region(self) -> NDArray[np.uint8]:
        """The whole mapped region."""
        return self._region

    def has(self, rows: NDArray[np.int32]) -> bool:
        """Tell whether all given rows are rows of this pool."""
        return not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < self.num_rows)

    def blank(self, rows: NDArray[np.int32]) -> None:
        """Erase the keys of rows that are about to be written, so that nobody takes the bytes for the old content."""
        self._heads[rows] = 0

    def sign(self, rows: NDArray[np.int32], keys: bytes) -> None:
        """Write the keys into rows whose content is complete."""
        self._heads[rows] = _keys_of(keys)

    def carrying(self, rows: NDArray[np.int32], keys: bytes) -> NDArray[np.bool_]:
        """Tell for each row whether it carries its key."""
        carried: NDArray[np.bool_] = (self._heads[rows] == _keys_of(keys)).all(axis=1)
        return carried

    def addresses(self, rows: NDArray[np.int64]) -> Addresses:
        """Return where rows start."""
        return self.address + rows * self.row_stride_bytes


class Pins(Protocol):
    """The pool that is pinned for a GPU."""

    @property
    def wanted(self) -> Rows | None:
        """The pool that is pinned, or is being pinned."""

    def has(self, rows: Rows) -> bool:
        """Tell whether a pool is pinned."""

    def begin(self, rows: Rows) -> None:
        """Begin to pin a pool in place of the previous one, which no copy may use any more."""

    def end(self) -> None:
        """Unpin the pool; no copy may use it any more."""


class Copies(Protocol):
    """Copies of pages: on a device in the background, on a host at once."""

    def takes(self, rows: Rows) -> bool:
        """Tell whether a pool can be copied from and to by now; if not, begin what is missing."""

    def store(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        """Begin to copy from the engine's tensors, the first of each pair, into the pool's rows."""

    def load(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        """Begin to copy from the pool's rows, the first of each pair, into the engine's tensors."""

    def finished(self) -> list[int]:
        """Return the jobs whose copies have ended; each is returned once."""

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the copies of these jobs have ended."""

    def close(self) -> None:
        """Wait for all copies, and let go of the pool."""


class HostCopies:
    """Copies within host memory, carried out at once.

    A second thread would take processor time from the engine, which computes on the host too, and would wait for the
    interpreter's lock between any two copies.
    """

    def __init__(self) -> None:
        """Begin with no jobs."""
        self._through: list[int] = []

    def takes(self, rows: Rows) -> bool:  # noqa: ARG002 - the contract
        """Return True: any memory will do."""
        return True

    def store(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        """Copy at once."""
        self._copy(job_id, pairs)

    def load(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        """Copy at once."""
        self._copy(job_id, pairs)

    def finished(self) -> list[int]:
        """Return the jobs since the last call."""
        through, self._through = self._through, []
        return through

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: all copies have ended."""

    def close(self) -> None:
        """Return at once: no copy is unfinished."""

    def _copy(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        for sources, targets, num_bytes in pairs:
            # The loop over pages runs inside `map` and `deque`, without bytecode for each page.
            deque(map(_memmove, targets.tolist(), sources.tolist(), repeat(num_bytes)), maxlen=0)
        self._through.append(job_id)


class StreamCopies:
    """Copies between a GPU and the pinned pool, on one side stream for each direction.

    A copy starts after the work that the model's stream has been given so far, so that a store reads finished pages and
    a load overwrites no page that is still read. Loads also wait for earlier stores, and stores for earlier loads.
    """

    def __init__(
        self, torch: Any, device: Any, submit: Callable[[Any, Any, Any], None], pins: Pins
    ) -> None:
        """Make the streams; `submit` copies on the current stream, given sources, targets and each copy's bytes."""
        self._torch = torch
        self._submit = submit
        self._pins = pins
        self._device = device
        self._storing = torch.cuda.Stream(device=device)
        self._loading = torch.cuda.Stream(device=device)
        self._under_way: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def takes(self, rows: Rows) -> bool:
        """Tell whether the pool is pinned; begin to pin it if it is another one than before."""
        if self._pins.wanted is not rows:
            self.wait(set(self._under_way))
            self._pins.begin(rows)
        return self._pins.has(rows)

    def store(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        """Copy on the store stream."""
        self._begin(job_id, pairs, self._storing, self._loading)

    def load(self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]]) -> None:
        """Copy on the load stream."""
        self._begin(job_id, pairs, self._loading, self._storing)

    def finished(self) -> list[int]:
        """Return the jobs whose event has happened."""
        through = [job_id for job_id, (event, _) in self._under_way.items() if event.query()]
        for job_id in through:
            del self._under_way[job_id]
        return through

    def wait(self, job_ids: set[int]) -> None:
        """Wait for the jobs' events; `finished` returns the jobs afterwards."""
        for job_id in job_ids & self._under_way.keys():
            self._under_way[job_id][0].synchronize()

    def close(self) -> None:
        """Wait for all copies, and unpin the pool."""
        self.wait(set(self._under_way))
        self._pins.end()

    def _begin(
        self, job_id: int, pairs: list[tuple[Addresses, Addresses, int]], stream: Any, other: Any
    ) -> None:
        torch = self._torch
        stream.wait_stream(torch.cuda.current_stream(self._device))
        stream.wait_stream(other)
        sources = torch.from_numpy(np.concatenate([pair[0] for pair in pairs]))
        targets = torch.from_numpy(np.concatenate([pair[1] for pair in pairs]))
        num_bytes = torch.from_numpy(
            np.concatenate([np.full(len(pair[0]), pair[2], np.int64) for pair in pairs])
        )
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._submit(sources, targets, num_bytes)
            event.record(stream)
        # The lists of addresses must live until the copies end: the driver may read them late.
        self._under_way[job_id] = (event, (sources, targets, num_bytes))


def pairs_of(
    rows: Rows, row_ids: NDArray[np.int32], tensors: Sequence[PageTensor], moves: list[Move]
) -> list[tuple[Addresses, Addresses, int]]:
    """Return, for each part of each move, the addresses in the engine's tensor, those in the pool, and the bytes."""
    pairs = []
    for move in moves:
        shares = rows.addresses(row_ids[move.chunks].astype(np.int64)) + move.share_offsets
        for part in move.parts:
            tensor = tensors[part.tensor]
            pages = tensor.address + move.blocks * tensor.block_stride_bytes
            pairs.append((pages, shares + part.offset_bytes, part.num_bytes))
    return pairs


def _keys_of(keys: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
