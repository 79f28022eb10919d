"""Own the counts of findable keys by bucket, for tenants whose workers are told what is surely absent; reads none back.

A key's bucket is the low bits of its first word. Where a bucket counts nothing, no tier whose blocks are known here has
a key of it. The arrays are the caller's, who shares them with readers; after every command each count is right.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.records import TierRecords
from kvleased.core.blocks.states import State
from kvleased.core.ids import Ids

Counts = NDArray[np.uint32]
"""[buckets], a power of two of them: how many keys are in each; there are always fewer blocks than it can count."""

_ONE: Final = np.uint32(1)
# Reading a member of an enumeration costs as much as a small array operation.
_READY: Final = int(State.READY)


class KeyCounts:
    """The counts of one cache's tenants; a tenant has none until they are begun."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Begin without counts, and be told from now on by the index of each tier."""
        self._tables: dict[int, Counts] = {}
        self._tiers = [TierCounts(pool.records, self._tables) for pool in pools]
        for pool, tier in zip(pools, self._tiers, strict=True):
            pool.index.watcher = tier

    def __repr__(self) -> str:
        """Show whose keys are counted."""
        return f"<KeyCounts of {len(self._tables)} tenants>"

    def begin(self, tenant: int, table: Counts) -> None:
        """Count a tenant's keys from now on in an array of zeros, of which only buckets that have keys are written."""
        assert len(table).bit_count() == 1, "buckets are told by bits"
        self._count(tenant, table)
        self._tables[tenant] = table

    def end(self, tenant: int) -> None:
        """Count a tenant's keys no more."""
        del self._tables[tenant]

    def violations(self) -> list[str]:
        """Return in words whose counts are not those of what is findable."""
        found = []
        for tenant, table in self._tables.items():
            right = np.zeros_like(table)
            self._count(tenant, right)
            if not np.array_equal(table, right):
                found.append(
                    f"the key counts of tenant {tenant} are not those of the keys that are findable"
                )
        return found

    def _count(self, tenant: int, table: Counts) -> None:
        """Count a tenant's findable keys in all tiers, by the states of the blocks."""
        for tier in self._tiers:
            tier.count(tenant, table)


class TierCounts:
    """What the index of one tier tells the counts."""

    def __init__(self, records: TierRecords, tables: dict[int, Counts]) -> None:
        """Look at the first word of each block's key, and at its tenant; `tables` are those of all tiers."""
        self._words = records.key.view(np.int64)[:, 0]
        self._tenants = records.tenant
        self._states = records.state
        self._tables = tables

    def add(self, blocks: Ids) -> None:
        """Count blocks that become findable; key and tenant have been written before."""
        if self._tables:
            for table, buckets in self._parted(blocks):
                np.add.at(table, buckets, _ONE)

    def discard(self, blocks: Ids) -> None:
        """Count blocks no more that are found no more; key and tenant are those that they were found under."""
        if self._tables:
            for table, buckets in self._parted(blocks):
                np.subtract.at(table, buckets, _ONE)

    def count(self, tenant: int, table: Counts) -> None:
        """Count all findable blocks of a tenant into an array."""
        (own,) = ((self._states == _READY) & (self._tenants == tenant)).nonzero()
        if len(own):
            np.add.at(table, self._buckets(own, table), _ONE)

    def _parted(self, blocks: Ids) -> Iterator[tuple[Counts, NDArray[np.int64]]]:
        """Yield for each tenant whose keys are counted the buckets of its blocks."""
        tenants = self._tenants[blocks]
        for tenant in set(tenants.tolist()):
            table = self._tables.get(tenant)
            if table is not None:
                yield table, self._buckets(blocks[tenants == tenant], table)

    def _buckets(self, blocks: Ids, table: Counts) -> NDArray[np.int64]:
        buckets: NDArray[np.int64] = self._words[blocks] & np.int64(len(table) - 1)
        return buckets
