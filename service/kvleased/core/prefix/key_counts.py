"""Own the counts of findable keys by bucket, from which a tenant's workers see which keys are surely not cached.

A key's bucket is the low bits of its first word. If a bucket counts 0, no tier whose blocks are known here has a key in
that bucket. The caller owns the arrays and shares them with readers. After every command, each count is right. Only
`violations` reads the counts here.
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
"""[buckets], a power of two: how many keys are in each bucket; no pool has too many blocks for a uint32."""

_ONE: Final = np.uint32(1)
# Reading a member of an enumeration costs as much as a small array operation.
_READY: Final = int(State.READY)


class KeyCounts:
    """The counts of one cache's tenants; a tenant has none until `begin`."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """Begin without counts; from now on, the index of each tier reports its changes."""
        self._tables: dict[int, Counts] = {}
        self._tiers = [TierCounts(pool.records, self._tables) for pool in pools]
        for pool, tier in zip(pools, self._tiers, strict=True):
            pool.index.watcher = tier

    def __repr__(self) -> str:
        """Show whose keys are counted."""
        return f"<KeyCounts of {len(self._tables)} tenants>"

    def begin(self, tenant: int, table: Counts) -> None:
        """Count a tenant's keys from now on in an array of zeros; only buckets that have keys are written."""
        assert len(table).bit_count() == 1, "buckets are told by bits"
        self._count(tenant, table)
        self._tables[tenant] = table

    def end(self, tenant: int) -> None:
        """Stop counting a tenant's keys."""
        del self._tables[tenant]

    def violations(self) -> list[str]:
        """Return a sentence for each tenant whose counts are not those of its findable keys."""
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
    """The part of the counts that the index of one tier reports to."""

    def __init__(self, records: TierRecords, tables: dict[int, Counts]) -> None:
        """Read each block's tenant and the first word of its key; `tables` are shared by all tiers."""
        self._words = records.key.view(np.int64)[:, 0]
        self._tenants = records.tenant
        self._states = records.state
        self._tables = tables

    def add(self, blocks: Ids) -> None:
        """Count blocks that become findable; their keys and tenants must already be written."""
        if self._tables:
            for table, buckets in self._parted(blocks):
                np.add.at(table, buckets, _ONE)

    def discard(self, blocks: Ids) -> None:
        """Uncount blocks that are no longer findable; their keys and tenants must still be the old ones."""
        if self._tables:
            for table, buckets in self._parted(blocks):
                np.subtract.at(table, buckets, _ONE)

    def count(self, tenant: int, table: Counts) -> None:
        """Count all findable blocks of a tenant into an array."""
        (own,) = ((self._states == _READY) & (self._tenants == tenant)).nonzero()
        if len(own):
            np.add.at(table, self._buckets(own, table), _ONE)

    def _parted(self, blocks: Ids) -> Iterator[tuple[Counts, NDArray[np.int64]]]:
        """Yield the table and the buckets of each tenant that has some of the blocks and whose keys are counted."""
        tenants = self._tenants[blocks]
        for tenant in set(tenants.tolist()):
            table = self._tables.get(tenant)
            if table is not None:
                yield table, self._buckets(blocks[tenants == tenant], table)

    def _buckets(self, blocks: Ids, table: Counts) -> NDArray[np.int64]:
        buckets: NDArray[np.int64] = self._words[blocks] & np.int64(len(table) - 1)
        return buckets
