"""Own a pool without memory: only keys go in and out of it as blocks would, to tell how many hits there would be."""

import numpy as np
from numpy.typing import NDArray

from kvleased.core.ids import Ids
from kvleased.traces.policies import order_of


class ShadowPool:
    """The keys that a pool of some policy and size would hold after the requests so far.

    A request holds all of its keys until it ends; then they are released, the last first. Requests do not overlap. A
    request that is longer than the pool holds only its first keys.
    """

    def __init__(self, policy: str, num_blocks: int) -> None:
        """Start empty."""
        self.num_blocks = num_blocks
        self._keys: NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self._order = order_of(policy, num_blocks, self._keys)
        self._block_of: dict[int, int] = {}
        self._num_used = 0
        """Blocks, from the first on, that hold keys; a block that once held a key never becomes free again."""

    def __repr__(self) -> str:
        """Show how full it is."""
        return f"<ShadowPool {self._num_used} of {self.num_blocks} used>"

    def ask(self, digests: NDArray[np.uint64]) -> int:
        """Serve one request for distinct keys, in token order; return how many of them are a prefix hit."""
        named = digests[: self.num_blocks].tolist()
        block_of = self._block_of
        blocks = np.array([block_of.get(name, -1) for name in named], np.intp)
        is_there = blocks >= 0
        num_hits = len(blocks) if is_there.all() else int(is_there.argmin())
        missing, found = (~is_there).nonzero()[0], blocks[is_there]
        # As in a pool, room is made before what was found counts as used.
        blocks[missing] = fresh = self._taken(len(missing), found)
        if len(found):
            self._order.discard(found)
        if len(missing):
            self._keys[fresh] = digests[missing]
            self._order.cached(fresh)
            block_of.update(zip(digests[missing].tolist(), fresh.tolist(), strict=True))
        if len(blocks):
            self._order.add(blocks[::-1])
        return num_hits

    def _taken(self, count: int, found: Ids) -> Ids:
        """Return blocks for new keys: unused ones first, and then blocks, other than those found, that are evicted."""
        num_unused = min(count, self.num_blocks - self._num_used)
        fresh = np.arange(self._num_used, self._num_used + num_unused)
        self._num_used += num_unused
        if num_unused == count:
            return fresh
        victims = self._order.coldest(count - num_unused, found)
        self._order.evicted(victims)
        for key in self._keys[victims].tolist():
            del self._block_of[key]
        return np.concatenate([fresh, victims])
