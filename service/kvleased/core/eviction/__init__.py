"""Policies that decide which cached block leaves first: one policy a file, all behind one contract."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.eviction.adaptive import Adaptive
from kvleased.core.eviction.arc import ARC
from kvleased.core.eviction.classes import ClassedOrder
from kvleased.core.eviction.lfu import LFU
from kvleased.core.eviction.lru import LeafFirstLRU
from kvleased.core.eviction.order import EvictionOrder
from kvleased.core.eviction.s3fifo import S3FIFO
from kvleased.core.eviction.segment_policy import SegmentPolicy
from kvleased.core.eviction.segments import SegmentedOrder

__all__ = [
    "POLICIES",
    "ClassedOrder",
    "EvictionOrder",
    "LeafFirstLRU",
    "SegmentedOrder",
    "make_order",
]

_LRU: Final = "leaf-lru"
_SEGMENT_POLICIES: Final = MappingProxyType[
    str, Callable[[int, NDArray[np.uint64]], SegmentPolicy]
]({one.name: one for one in (ARC, S3FIFO, LFU, Adaptive)})
POLICIES: Final = (_LRU, *_SEGMENT_POLICIES)
"""The names of the policies, the default first."""


def make_order(policy: str, num_blocks: int, keys: NDArray[np.uint64]) -> EvictionOrder:
    """Return an empty order of a policy over all blocks; block i has a key with the digest keys[i].

    At most `num_blocks` of them are ever cached, for which the policy is made.
    """
    if policy == _LRU:
        return LeafFirstLRU(len(keys))
    return SegmentedOrder(len(keys), _SEGMENT_POLICIES[policy](num_blocks, keys))
