"""Own the columns that outlive a crash: one entry per block, slot and lease, in arrays that the caller provides.

The daemon lays the columns over shared memory that the supervisor keeps; tests lay them over plain
arrays. The core works on them in place, so there is no second copy of the state and no log to
replay. Where they lie is `kvleased.memory`'s business.

A block's entry is whole only if its seal matches: the seal is written after every other column and before the state
becomes READY, so that after a crash at any instant an entry is either whole or recognisably not.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.shape import CacheShape

TIER_COLUMNS: Final = (
    ("state", np.uint8, 1),
    ("generation", np.uint64, 1),
    ("tenant", np.uint64, 1),
    ("checksum", np.uint64, 1),
    ("position", np.uint32, 1),
    ("seal", np.uint64, 1),
    ("key", np.uint8, BYTES_PER_KEY),
    ("is_remote", np.bool_, 1),
)
"""Name, element type and elements of each column of a tier, in the order in which they are laid out."""

ROW_COLUMNS: Final = (
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
"""The same for the lease rows; `num_blocks`, an int32 per group, and `block_ids`, an int32 per place, follow."""

MAGAZINES_MAX: Final = 32
"""Magazines of one cache: a block has a bit for each."""

MAGAZINE_COLUMNS: Final = (("name", np.uint64, 1), ("sequence", np.uint64, 1))
"""The same for the magazines."""

HOLDER_COLUMNS: Final = (("held_by", np.uint32, 1),)
"""The same for what the magazines record of each block."""

NULL: Final = -1
"""Stands at a place of a row that needs no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRecords:
    """The columns of one tier; each has one entry per block, `key` is two-dimensional."""

    state: NDArray[np.uint8]
    generation: NDArray[np.uint64]
    tenant: NDArray[np.uint64]
    """64 bits that name the tenant whose bytes are, or were last, in the block; 0 means that it holds zeros."""
    checksum: NDArray[np.uint64]
    """xxh3 of the bytes; 0 if none was taken."""
    position: NDArray[np.uint32]
    """Index of the block in its chain, so that after a restart, too, no block leaves before its children."""
    seal: NDArray[np.uint64]
    key: NDArray[np.uint8]
    is_remote: NDArray[np.bool_]
    """Whether the bytes have come from the remote store, or gone there. The seal does not cover this: if it is wrong
    after a crash, the store is asked once more, or another node computes what it could have found."""

    @classmethod
    def plain(cls, num_entries: int) -> Self:
        """Return columns of zeros in ordinary memory."""
        return cls(
            state=np.zeros(num_entries, np.uint8),
            generation=np.zeros(num_entries, np.uint64),
            tenant=np.zeros(num_entries, np.uint64),
            checksum=np.zeros(num_entries, np.uint64),
            position=np.zeros(num_entries, np.uint32),
            seal=np.zeros(num_entries, np.uint64),
            key=np.zeros((num_entries, BYTES_PER_KEY), np.uint8),
            is_remote=np.zeros(num_entries, np.bool_),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRows:
    """The block table: a row of block ids per lease, and what a restart must know of the lease."""

    lease_id: NDArray[np.int64]
    """0 if the row is unused; written last when a row comes to life and first when it ends."""
    worker_id: NDArray[np.int64]
    request_digest: NDArray[np.uint64]
    num_tokens: NDArray[np.int32]
    """Tokens that the lease is to cover."""
    num_computed: NDArray[np.int32]
    """Tokens whose states the worker says are written, including those of a prefix that was found."""
    hit_tokens: NDArray[np.int32]
    """Those of them that were found when the lease was granted, or that its parent had when it was forked."""
    phase: NDArray[np.int32]
    asked: NDArray[np.uint64]
    """64 bits of what the request asked for, so that even after a restart another request of the same id is noticed."""
    engine: NDArray[np.uint64]
    """64 bits that name the engine whose ranks share the lease; 0 if one process calls for all of them."""
    ranks: NDArray[np.uint64]
    """A bit for each rank that shares the lease."""
    ranks_ever: NDArray[np.uint64]
    """A bit for each rank that ever shared it."""
    num_blocks: NDArray[np.int32]
    """[rows, groups]: the end of the places in use."""
    block_ids: NDArray[np.int32]
    """[rows, places of all groups]: block ids while the lease is on the device, slot ids while evicted, or NULL."""

    @classmethod
    def plain(cls, num_rows: int, num_groups: int, table_width: int) -> Self:
        """Return rows of zeros in ordinary memory."""
        return cls(
            lease_id=np.zeros(num_rows, np.int64),
            worker_id=np.zeros(num_rows, np.int64),
            request_digest=np.zeros(num_rows, np.uint64),
            num_tokens=np.zeros(num_rows, np.int32),
            num_computed=np.zeros(num_rows, np.int32),
            hit_tokens=np.zeros(num_rows, np.int32),
            phase=np.zeros(num_rows, np.int32),
            asked=np.zeros(num_rows, np.uint64),
            engine=np.zeros(num_rows, np.uint64),
            ranks=np.zeros(num_rows, np.uint64),
            ranks_ever=np.zeros(num_rows, np.uint64),
            num_blocks=np.zeros((num_rows, num_groups), np.int32),
            block_ids=np.zeros((num_rows, table_width), np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRows:
    """What kernels read of the mapped leases: their blocks as kernels count them, group by group."""

    sequence: NDArray[np.uint32]
    """[rows]: odd while a row is being written; a reader takes a row only if it is even and the same afterwards."""
    num_published: NDArray[np.int32]
    """[rows, groups]: entries that a reader may use; 0 unless the lease is mapped."""
    kernel_ids: NDArray[np.int32]
    """[rows, kernel blocks of all places of all groups]; places that need no block read as block 0."""

    @classmethod
    def plain(cls, num_rows: int, num_groups: int, kernel_width: int) -> Self:
        """Return rows of zeros in ordinary memory."""
        return cls(
            sequence=np.zeros(num_rows, np.uint32),
            num_published=np.zeros((num_rows, num_groups), np.int32),
            kernel_ids=np.zeros((num_rows, kernel_width), np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MagazineRecords:
    """What a restart must know of the magazines, and which of them hold each device block."""

    name: NDArray[np.uint64]
    """64 bits that name the magazine at each place, or 0; written last when it begins and first when it ends."""
    sequence: NDArray[np.uint64]
    """That of its last exchange; written before the exchange is carried out, so that none is carried out twice."""
    held_by: NDArray[np.uint32]
    """A bit for each place whose magazine holds the block."""

    @classmethod
    def plain(cls, num_blocks: int) -> Self:
        """Return columns of zeros in ordinary memory."""
        return cls(
            name=np.zeros(MAGAZINES_MAX, np.uint64),
            sequence=np.zeros(MAGAZINES_MAX, np.uint64),
            held_by=np.zeros(num_blocks, np.uint32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecords:
    """All columns of one cache."""

    device: TierRecords
    host: TierRecords
    disk: TierRecords
    rows: LeaseRows
    kernel_rows: KernelRows
    magazines: MagazineRecords

    @classmethod
    def plain(cls, shape: CacheShape) -> Self:
        """Return columns of zeros in ordinary memory, which is what a new cache starts from."""
        return cls(
            device=TierRecords.plain(shape.num_blocks),
            host=TierRecords.plain(shape.num_slots),
            disk=TierRecords.plain(shape.num_disk_slots),
            rows=LeaseRows.plain(shape.max_leases, len(shape.groups), shape.table_width),
            kernel_rows=KernelRows.plain(shape.max_leases, len(shape.groups), shape.kernel_width),
            magazines=MagazineRecords.plain(shape.num_blocks),
        )


def key_digests(records: TierRecords) -> NDArray[np.uint64]:
    """Return 64 bits of the key of each entry, as a view that changes with the keys."""
    return records.key.view(np.uint64)[:, 0]
