"""Own how columns lie in shared memory and how a worker reads its rows of the block table; the daemon writes them.

Columns of one region follow each other, each aligned to a cache line. The block table has one row per live lease: what
a restart must know of the lease, and its block ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvlease._checks import shown
from kvlease.errors import InvalidError, UnknownLeaseError
from kvlease.geometry import ALIGNMENT_BYTES, exact_div, round_up
from kvlease.units import BLOCKS_MAX, TOKENS_MAX, checked_count

_INT64_MAX: Final = 2**63 - 1

Column = tuple[str, type[np.generic], int]
"""Name, element type and elements per entry of a column."""

Buffer = memoryview | bytearray | bytes | NDArray[np.uint8]
"""Bytes that columns can be laid over."""

ROW_COLUMNS: Final[tuple[Column, ...]] = (
    ("lease_id", np.int64, 1),
    ("worker_id", np.int64, 1),
    ("request_digest", np.uint64, 1),
    ("num_tokens", np.int32, 1),
    ("num_blocks", np.int32, 1),
    ("num_published", np.int32, 1),
    ("phase", np.int32, 1),
)
"""The columns of the block table, before its block ids; the daemon's records have the same, which a test holds."""


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Columns of `num_entries` entries each, one after another."""

    columns_in_order: tuple[Column, ...]
    num_entries: int

    @property
    def region_bytes(self) -> int:
        """Bytes of a region that holds all columns: the sum of round_up(column, 64)."""
        return sum(
            round_up(self._column_bytes(column), ALIGNMENT_BYTES)
            for column in self.columns_in_order
        )

    def columns(self, buffer: Buffer, start_bytes: int = 0) -> dict[str, NDArray[Any]]:
        """Lay the columns over `buffer`, from `start_bytes` on; those with more than one element per entry are 2-D.

        Raises:
            InvalidError: the buffer is too short.
        """
        view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
        if len(view) < start_bytes + self.region_bytes:
            message = f"the region holds {len(view)} bytes, its columns need {start_bytes + self.region_bytes}"
            raise InvalidError(
                message,
                resource="region_bytes",
                need=start_bytes + self.region_bytes,
                available=len(view),
            )
        arrays: dict[str, NDArray[Any]] = {}
        offset = start_bytes
        for column in self.columns_in_order:
            name, dtype, width = column
            flat = np.frombuffer(view, dtype, count=self.num_entries * width, offset=offset)
            arrays[name] = flat if width == 1 else flat.reshape(self.num_entries, width)
            offset += round_up(self._column_bytes(column), ALIGNMENT_BYTES)
        return arrays

    def _column_bytes(self, column: Column) -> int:
        _, dtype, width = column
        return self.num_entries * width * np.dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The block table of one cache: `num_rows` rows of up to `blocks_per_row` block ids."""

    num_rows: int
    blocks_per_row: int

    @property
    def region_bytes(self) -> int:
        """Bytes of the region that holds the table."""
        return self._layout.region_bytes

    def columns(self, buffer: Buffer) -> dict[str, NDArray[Any]]:
        """Lay the table over `buffer`; `block_ids` is [num_rows, blocks_per_row], the others [num_rows].

        Raises:
            InvalidError: the buffer is too short.
        """
        columns = self._layout.columns(buffer)
        columns["block_ids"] = columns["block_ids"].reshape(self.num_rows, self.blocks_per_row)
        return columns

    @property
    def _layout(self) -> ColumnLayout:
        return ColumnLayout(
            (*ROW_COLUMNS, ("block_ids", np.int32, self.blocks_per_row)), self.num_rows
        )


class RowTable:
    """Read the block table that the daemon publishes; every answer is checked to be of the lease asked for."""

    def __init__(self, layout: TableLayout, region: Buffer) -> None:
        """Lay the table over the region.

        Raises:
            InvalidError: the region is too short.
        """
        columns: Mapping[str, NDArray[Any]] = layout.columns(region)
        self.layout = layout
        self._lease_ids: NDArray[np.int64] = columns["lease_id"]
        self._num_published: NDArray[np.int32] = columns["num_published"]
        self._block_ids: NDArray[np.int32] = columns["block_ids"]

    def __repr__(self) -> str:
        """Show life: how many rows are of a lease."""
        return (
            f"<RowTable {np.count_nonzero(self._lease_ids)} of {self.layout.num_rows} rows in use>"
        )

    def block_ids(self, row: int, lease_id: int) -> NDArray[np.int32]:
        """Return a copy of the block ids that are published for a lease, in token order; none before it is mapped.

        Raises:
            UnknownLeaseError: the row is not, or no longer, of that lease.
        """
        if not 0 <= row < self.layout.num_rows or self._lease_ids[row] != lease_id:
            raise _not_of(row, lease_id)
        ids: NDArray[np.int32] = self._block_ids[row, : self._num_published[row]].copy()
        # The daemon clears a row's lease id before it hands the row on: an id still there vouches for the copy.
        if self._lease_ids[row] != lease_id:
            raise _not_of(row, lease_id)
        return ids


def table_width(num_blocks: int, tokens_per_block: int, token_alignment: int | None) -> int:
    """Return the entries of a row for so many blocks: of whole stretches of `token_alignment` tokens, or as they are.

    width = round_up(num_blocks, token_alignment / gcd(token_alignment, tokens_per_block))

    Raises:
        InvalidError: rule bad_token_alignment.
    """
    if token_alignment is None:
        return num_blocks
    if token_alignment <= 0:
        message = f"token_alignment is {token_alignment}; it must be positive, or left out"
        raise InvalidError(
            message, resource="token_alignment", rule="bad_token_alignment", need=token_alignment
        )
    shared = gcd(token_alignment, tokens_per_block)
    return round_up(num_blocks, exact_div(token_alignment, shared))


def kernel_block_ids(
    block_ids: NDArray[np.int32] | Sequence[int],
    kernel_blocks_per_block: int,
    kernel_block_stride: int | None = None,
) -> NDArray[np.int32]:
    """Return the ids as a kernel counts them, in the last axis: block b is b*m … b*m + n-1.

    n = kernel_blocks_per_block, m = kernel_block_stride, which is n where no other pages lie between blocks.

    Raises:
        InvalidError: rule kernel_block_id_too_large: an id would not fit in the table's int32; or an id is no whole
            number, or a block has no kernel block.
    """
    ids = whole_numbers("block_ids", block_ids)
    checked_count("kernel_blocks_per_block", kernel_blocks_per_block, least=1, most=BLOCKS_MAX)
    stride = kernel_blocks_per_block if kernel_block_stride is None else kernel_block_stride
    checked_count("kernel_block_stride", stride, least=kernel_blocks_per_block, most=BLOCKS_MAX)
    last_id = int(ids.max(initial=0))
    last_kernel_block = last_id * stride + kernel_blocks_per_block - 1
    if last_kernel_block > BLOCKS_MAX:
        message = (
            f"block {last_id} has kernel block {last_kernel_block}, above {BLOCKS_MAX}; "
            "have larger kernel blocks"
        )
        raise InvalidError(
            message,
            resource="block_ids",
            rule="kernel_block_id_too_large",
            need=min(last_kernel_block, _INT64_MAX),
            limit=BLOCKS_MAX,
        )
    if stride == kernel_blocks_per_block == 1:
        return ids.astype(np.int32, copy=False)
    inner = np.arange(kernel_blocks_per_block, dtype=np.int64)
    expanded = ids[..., None].astype(np.int64) * stride + inner
    return expanded.reshape(*ids.shape[:-1], -1).astype(np.int32)


def token_slots(
    block_ids: NDArray[np.int32] | Sequence[int],
    positions: NDArray[np.int64] | Sequence[int],
    tokens_per_block: int,
) -> NDArray[np.int64]:
    """Return where each position is kept: block_ids[p // n] * n + p % n, with n = tokens_per_block.

    Raises:
        InvalidError: rule position_outside_blocks, or ids or positions are no whole numbers.
    """
    ids = whole_numbers("block_ids", block_ids).astype(np.int64)
    wanted = whole_numbers("positions", positions).astype(np.int64)
    checked_count("tokens_per_block", tokens_per_block, least=1, most=TOKENS_MAX)
    num_covered = len(ids) * tokens_per_block
    if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= num_covered):
        message = (
            f"positions {wanted.min()} … {wanted.max()} are not all among the {num_covered} tokens "
            "that the blocks cover"
        )
        raise InvalidError(
            message,
            resource="tokens",
            rule="position_outside_blocks",
            need=int(wanted.max()) + 1,
            available=num_covered,
        )
    block_index, inner = np.divmod(wanted, tokens_per_block)
    slots: NDArray[np.int64] = ids[block_index] * tokens_per_block + inner
    return slots


def whole_numbers(name: str, values: object) -> NDArray[np.integer[Any]]:
    """Return an array of whole numbers; nothing is rounded, and an empty list is one of no numbers.

    Raises:
        InvalidError: rule not_whole_numbers.
    """
    try:
        found = np.asarray(values)
    except ValueError as error:
        message = f"{name} must be whole numbers in rows of one length: {error}"
        raise InvalidError(message, resource=name, rule="not_whole_numbers") from error
    if found.size == 0:
        return found.astype(np.int64)
    if found.ndim and found.dtype.kind in "iu" and found.max() <= _INT64_MAX:
        return found
    message = f"{name} must be a sequence of whole numbers that int64 holds, not {shown(values)}"
    raise InvalidError(message, resource=name, rule="not_whole_numbers")


def _not_of(row: int, lease_id: int) -> UnknownLeaseError:
    return UnknownLeaseError(
        f"row {row} of the block table is not of lease {lease_id}; it ended or moved to another row"
    )
