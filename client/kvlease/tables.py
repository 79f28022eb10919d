"""Own how the block table lies in shared memory and how a worker reads its rows; the daemon writes them.

The block table has one row for each live lease. The row holds what a restarted daemon must know of the lease, the
lease's block ids and, once the lease is mapped, its blocks as kernels count them.

A row may be read while it is written. Its `sequence` is odd during the write and larger afterwards. So a copy is whole
if the number was even before the copying and is the same after it; otherwise the row is copied again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvlease._bound import Bound
from kvlease._checks import checked_integer, shown
from kvlease.columns import Buffer, Column, ColumnLayout
from kvlease.errors import InvalidError, UnavailableError, UnknownLeaseError, WrongStateError
from kvlease.geometry import exact_div, round_up
from kvlease.units import BLOCKS_MAX, TOKENS_MAX, checked_count

NO_ROW: Final = -1
"""The row of a padding request, by which an engine fills up a step."""

_INT64_MAX: Final = 2**63 - 1

Ints = NDArray[np.integer[Any]] | Sequence[int]

ROW_COLUMNS: Final[tuple[Column, ...]] = (
    ("lease_id", np.int64, 1),
    ("worker_id", np.int64, 1),
    ("request_digest", np.uint64, 1),
    ("num_tokens", np.int32, 1),
    ("num_computed", np.int32, 1),
    ("hit_tokens", np.int32, 1),
    ("phase", np.int32, 1),
    ("engine", np.uint64, 1),
    ("asked", np.uint64, 1),
    ("ranks", np.uint64, 1),
    ("ranks_ever", np.uint64, 1),
)
"""The first columns of the block table; a test makes sure that the daemon's records have the same."""

_SPINS_MAX: Final = 100
_PAUSES_MAX: Final = 500
_PAUSE_SECONDS: Final = 0.001
"""A row that is being written is copied again: a hundred times at once, then after pauses, for 0.5 s in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """One group's part of every row."""

    num_places: int
    """Block ids that the part has room for: the group's table_blocks."""
    kernel_blocks_per_block: int = 1
    kernel_block_stride: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether kernels count the group's blocks as the plan does."""
        return self.kernel_blocks_per_block == self.kernel_block_stride == 1

    @property
    def kernel_width(self) -> int:
        """Kernel block ids that the part has room for: num_places * kernel_blocks_per_block."""
        return self.num_places * self.kernel_blocks_per_block


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The block table of one cache: `num_rows` rows, each with one part for every group."""

    num_rows: int
    parts: tuple[TablePart, ...]

    @property
    def region_bytes(self) -> int:
        """Bytes of the region that holds the table."""
        return self._layout.region_bytes

    @property
    def kernel_firsts(self) -> list[int]:
        """The index at which each group's kernel block ids start in a row."""
        return list(accumulate((part.kernel_width for part in self.parts), initial=0))[:-1]

    def columns(self, buffer: Buffer) -> dict[str, NDArray[Any]]:
        """Lay the columns over `buffer`: the wide columns are 2-D even if they are one element wide, all others 1-D.

        Raises:
            InvalidError: the buffer is too short.
        """
        columns = self._layout.columns(buffer)
        for name, _, width in self._wide_columns:
            columns[name] = columns[name].reshape(self.num_rows, width)
        return columns

    @property
    def _layout(self) -> ColumnLayout:
        num_blocks, block_ids, num_published, kernel_ids = self._wide_columns
        lease_columns = (*ROW_COLUMNS, num_blocks, block_ids)
        kernel_columns = (("sequence", np.uint32, 1), num_published, kernel_ids)
        return ColumnLayout((*lease_columns, *kernel_columns), self.num_rows)

    @property
    def _wide_columns(self) -> tuple[Column, Column, Column, Column]:
        return (
            ("num_blocks", np.int32, len(self.parts)),
            ("block_ids", np.int32, sum(part.num_places for part in self.parts)),
            ("num_published", np.int32, len(self.parts)),
            ("kernel_ids", np.int32, sum(part.kernel_width for part in self.parts)),
        )


class RowTable(Bound):
    """Read the block table that the daemon publishes; every answer is checked to be whole and of the lease asked for.

    All its reading methods raise UnknownLeaseError if a row does not, or no longer, belong to its lease;
    WrongStateError, rule row_not_mapped, if the lease was not mapped, or not again since its eviction; and
    UnavailableError if the daemon does not finish writing a row, because it was killed. Once a daemon is back, the same
    call succeeds.
    """

    def __init__(self, layout: TableLayout, region: Buffer) -> None:
        """Lay the table over the region.

        Raises:
            InvalidError: the region is too short.
        """
        columns: Mapping[str, NDArray[Any]] = layout.columns(region)
        self.layout = layout
        self._kernel_firsts = layout.kernel_firsts
        self._lease_ids: NDArray[np.int64] = columns["lease_id"]
        self._sequence: NDArray[np.uint32] = columns["sequence"]
        self._num_published: NDArray[np.int32] = columns["num_published"]
        self._kernel_ids: NDArray[np.int32] = columns["kernel_ids"]

    def __repr__(self) -> str:
        """Show life: how many rows belong to a lease."""
        return (
            f"<RowTable {np.count_nonzero(self._lease_ids)} of {self.layout.num_rows} rows in use>"
        )

    def kernel_ids(self, row: int, lease_id: int, group: int = 0) -> NDArray[np.int32]:
        """Return a copy of a mapped lease's kernel block ids of one group, in token order.

        A place that needs no block, such as one before a window, reads as block 0.

        Raises:
            InvalidError: rule no_such_group.
        """
        return self.gather(*self._checked(row, lease_id), group).ravel()

    def block_ids(self, row: int, lease_id: int, group: int = 0) -> NDArray[np.int32]:
        """Return a copy of a mapped lease's block ids of one group, in token order, whatever blocks kernels count.

        Raises:
            InvalidError: rule no_such_group.
        """
        return self.gather_blocks(*self._checked(row, lease_id), group).ravel()

    def gather(
        self, rows: Ints, lease_ids: Ints, group: int = 0, *, width: int | None = None
    ) -> NDArray[np.int32]:
        """Return the table of one group for the requests of a step: [requests, width] kernel block ids, then zeros.

        A padding request has the row NO_ROW, and reads as zeros. Without `width`, the table is as wide as the longest
        of the rows. The zeros behind a row's ids are padding: never look there for a token of the lease.

        Raises:
            InvalidError: rule no_such_group; block_table_row_overflow if a row is longer than `width`;
                rows_without_leases if there are not as many leases as rows; or a row or lease is no whole number.
        """
        part = self._part(group)
        if width is not None:
            checked_count("width", width, most=BLOCKS_MAX)
        wanted = whole_numbers("rows", rows).astype(np.int64)
        owners = whole_numbers("lease_ids", lease_ids).astype(np.int64)
        if len(wanted) != len(owners):
            message = f"there are {len(wanted)} rows and {len(owners)} leases; pass one of each for every request"
            raise InvalidError(message, resource="lease_ids", rule="rows_without_leases")
        table = np.zeros((len(wanted), part.kernel_width if width is None else width), np.int32)
        longest = self._copy(table, wanted, owners, group)
        return table if width is not None else np.ascontiguousarray(table[:, :longest])

    def gather_blocks(
        self, rows: Ints, lease_ids: Ints, group: int = 0, *, width: int | None = None
    ) -> NDArray[np.int32]:
        """Return the table of `gather` in block ids, which `kvlease.slots.run_slots` takes; `width` counts blocks.

        Raises:
            InvalidError: as for `gather`.
        """
        part = self._part(group)
        num_parts = part.kernel_blocks_per_block
        if width is not None:
            width = checked_count("width", width, most=BLOCKS_MAX) * num_parts
        table = self.gather(rows, lease_ids, group, width=width)
        return table if part.is_plain else table[:, ::num_parts] // part.kernel_block_stride

    def _checked(self, row: int, lease_id: int) -> tuple[Ints, Ints]:
        rows = whole_numbers("row", [checked_integer("row", row)])
        lease_ids = whole_numbers("lease_id", [checked_integer("lease_id", lease_id)])
        self._check(rows, lease_ids)
        return rows, lease_ids

    def _part(self, group: int) -> TablePart:
        num_groups = len(self.layout.parts)
        number = checked_integer("group", group)
        if not 0 <= number < num_groups:
            message = (
                f"there is no group {shown(number)}; the cache's number of groups is {num_groups}"
            )
            raise InvalidError(
                message, resource="group", rule="no_such_group", need=number, limit=num_groups
            )
        return self.layout.parts[number]

    def _copy(
        self,
        table: NDArray[np.int32],
        rows: NDArray[np.int64],
        lease_ids: NDArray[np.int64],
        group: int,
    ) -> int:
        """Copy rows to their places in `table`, each until its copy is whole; return the length of the longest row."""
        places = np.flatnonzero(rows != NO_ROW)
        longest = 0
        for _ in _attempts():
            asked, owners = rows[places], lease_ids[places]
            self._check(asked, owners)
            before = self._sequence[asked]
            published = self._num_published[asked]
            counts = published[:, group]
            most = int(counts.max(initial=0))
            first = self._kernel_firsts[group]
            is_of_row = np.arange(most) < counts[:, None]
            ids = np.where(is_of_row, self._kernel_ids[asked, first : first + most], np.int32(0))
            is_whole = (before & 1 == 0) & (self._sequence[asked] == before)
            # The daemon clears a row's lease id before it reuses the row, so an id still there vouches for the copy.
            self._check(asked, owners)
            _check_mapped(published, is_whole, owners)
            end = int(counts[is_whole].max(initial=0))
            if end > table.shape[1]:
                raise _overflow(end, table.shape[1])
            table[places[is_whole], :end] = ids[is_whole, :end]
            longest = max(longest, end)
            places = places[~is_whole]
            if not len(places):
                return longest
        message = f"row {rows[places[0]]} of the block table is still being written; ask again once the daemon is back"
        raise UnavailableError(message, resource="tables", rule="row_being_written")

    def _check(self, rows: NDArray[Any], lease_ids: NDArray[Any]) -> None:
        """Refuse rows that do not belong to their leases."""
        is_inside = (rows >= 0) & (rows < self.layout.num_rows)
        is_owned = is_inside & (self._lease_ids[np.where(is_inside, rows, 0)] == lease_ids)
        if not is_owned.all():
            at = int(is_owned.argmin())
            message = (
                f"row {rows[at]} of the block table does not belong to lease {lease_ids[at]}, "
                "which ended or moved to another row"
            )
            raise UnknownLeaseError(message)


def table_width(num_blocks: int, tokens_per_block: int, token_alignment: int | None) -> int:
    """Return how many entries a row has for `num_blocks`, rounded up to whole stretches of `token_alignment` tokens.

    width = round_up(num_blocks, token_alignment / gcd(token_alignment, tokens_per_block)), or num_blocks without it

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
    """Return the ids as a kernel counts them, along the last axis: block b is b*m … b*m + n-1.

    n = kernel_blocks_per_block, m = kernel_block_stride; m is n if no other pages lie between blocks.

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
            f"block {last_id} has kernel block {last_kernel_block}, above the limit of {BLOCKS_MAX}; "
            "use larger kernel blocks"
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
    """Return the slot of each position p: block_ids[p // n] * n + p % n, with n = tokens_per_block.

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
        need, rule = int(wanted.max()) + 1, "position_outside_blocks"
        raise InvalidError(message, resource="tokens", rule=rule, need=need, available=num_covered)
    block_index, inner = np.divmod(wanted, tokens_per_block)
    slots: NDArray[np.int64] = ids[block_index] * tokens_per_block + inner
    return slots


def whole_numbers(name: str, values: object) -> NDArray[np.integer[Any]]:
    """Return an array of whole numbers; nothing is rounded, and an empty list is an array without numbers.

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
    message = f"{name} must be a sequence of whole numbers that fit in int64, not {shown(values)}"
    raise InvalidError(message, resource=name, rule="not_whole_numbers")


def _check_mapped(
    published: NDArray[np.int32], is_whole: NDArray[np.bool_], lease_ids: NDArray[np.int64]
) -> None:
    """Refuse leases that have nothing published in any group: their padding would read as somebody's block 0."""
    is_unmapped = is_whole & ~published.any(axis=1)
    if is_unmapped.any():
        message = (
            f"lease {lease_ids[is_unmapped.argmax()]} is not mapped: map it after its reserve, and again after a "
            "reload, before its row is read"
        )
        raise WrongStateError(message, resource="tables", rule="row_not_mapped")


def _overflow(longest: int, width: int) -> InvalidError:
    message = f"a row has {longest} ids, but the table has room for {width}; pass a larger width"
    rule = "block_table_row_overflow"
    return InvalidError(message, resource="width", rule=rule, need=longest, available=width)


def _attempts() -> Iterator[None]:
    """Yield once for each attempt to copy rows: first without pauses, then after pauses, and not for ever."""
    for _ in range(_SPINS_MAX):
        yield
    for _ in range(_PAUSES_MAX):
        time.sleep(_PAUSE_SECONDS)
        yield
