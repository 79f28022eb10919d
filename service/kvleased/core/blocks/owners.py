"""Own whose bytes the blocks of a pool hold, and how many each tenant uses; `tenants` tells what it may have.

Here a tenant is named by a small number, its place in the lists, so that blocks of several tenants are counted in one
go. Number 0 is nobody: a block that is being zeroed is in use, but belongs to no tenant.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction import ClassedOrder, EvictionOrder
from kvleased.core.ids import Ids

NOBODY: Final = 0


class Owners:
    """The tenants of a pool's blocks, and the eviction order that keeps their blocks apart."""

    def __init__(
        self, num_blocks: int, order: EvictionOrder, used: Ids, tenants: NDArray[np.uint64]
    ) -> None:
        """Start with the blocks in use, the tenant of each, and the order of the evictable ones."""
        self._digests: list[int] = [NOBODY]
        self._numbers: dict[int, int] = {}
        self._used: list[int] = [0]
        self._owner: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        """The number of the tenant of each block in use; meaningless for the free ones."""
        self._count(used, tenants)
        self.order = ClassedOrder(order, self._owner)

    def __repr__(self) -> str:
        """Show how many blocks each tenant uses."""
        return f"<Owners {dict(zip(self._digests, self._used, strict=True))}>"

    def usage(self) -> dict[int, tuple[int, int]]:
        """Count the blocks in use, and those of them that can be evicted, of each tenant that has any."""
        return {
            self._digests[number]: (used, self.order.num_of(number))
            for number, used in enumerate(self._used)
            if used and number != NOBODY
        }

    def coldest(self, digest: int, count: int, protected: Ids) -> Ids:
        """Return up to `count` of a tenant's blocks that should leave next, none of them protected; changes nothing."""
        return self.order.coldest_of(self._numbers[digest], count, protected)

    def take(self, blocks: Ids, tenant: int | NDArray[np.uint64] | None) -> None:
        """Note that free blocks come into use: for one tenant, for one tenant each, or for nobody, to be zeroed."""
        self._count(blocks, tenant)
        self.order.forget(blocks)

    def free(self, blocks: Ids) -> None:
        """Note that blocks are no longer in use."""
        owners = self._owner[blocks]
        # Nearly always they are all one tenant's; comparing their bytes takes a tenth of the time of counting.
        first = owners[:1].tobytes()
        if first and owners.tobytes() == first * len(owners):
            self._used[owners[0]] -= len(blocks)
            return
        numbers = np.bincount(owners)
        for number in numbers.nonzero()[0].tolist():
            self._used[number] -= int(numbers[number])

    def _count(self, blocks: Ids, tenant: int | NDArray[np.uint64] | None) -> None:
        if isinstance(tenant, int):
            number = self._number(tenant)
            self._owner[blocks] = number
            self._used[number] += len(blocks)
        elif tenant is None:
            self._owner[blocks] = NOBODY
            self._used[NOBODY] += len(blocks)
        else:
            for digest in set(tenant.tolist()):
                self._count(blocks[tenant == digest], digest)

    def _number(self, digest: int) -> int:
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self._digests)
            self._digests.append(digest)
            self._used.append(0)
        return number
