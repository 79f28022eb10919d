"""Policies that decide which cached block leaves first: one policy a file, all behind one contract."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.classes import ClassedLRU
from kvleased.core.eviction.lru import Ids, LeafFirstLRU
from kvleased.core.eviction.order import EvictionOrder

__all__ = ["POLICIES", "ClassedLRU", "EvictionOrder", "LeafFirstLRU", "make_order"]

POLICIES: Final[tuple[str, ...]] = ("leaf-lru",)


class _Told(LeafFirstLRU):
    def cached(self, blocks: Ids) -> None:
        """Pass over what makes no difference."""

    def evicted(self, blocks: Ids) -> None:
        """Take blocks out."""
        self.discard(blocks)


def make_order(policy: str, num_blocks: int, keys: NDArray[np.uint64]) -> _Told:
    """Return an empty order."""
    del policy, keys
    return _Told(num_blocks)
