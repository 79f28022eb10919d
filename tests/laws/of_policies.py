"""Bugs of eviction policies to switch on: which blocks an order has, and which of them it may name."""

from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvleased.core.eviction import classes, segments
from kvleased.core.eviction.lru import LeafFirstLRU
from kvleased.core.eviction.segments import Part
from kvleased.core.ids import Ids
from tests.laws.mended import Mutation


def use_is_told_to_the_first_segment(patch: pytest.MonkeyPatch) -> None:
    """A segment is not told that a block left it for a higher one."""

    def tell_rings(rings: list[LeafFirstLRU], places: NDArray[np.int64]) -> None:
        if len(places):
            rings[0].left(len(places))

    patch.setattr(segments, "tell_rings", tell_rings)
    patch.setattr(classes, "tell_rings", tell_rings)


def block_of_another_segment_is_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """If a copy of victims from several segments fails, only the victims of one segment come back."""
    parted = Part._parted

    def first_alone(self: Part, blocks: Ids) -> list[tuple[int, Ids]]:
        return parted(self, blocks)[:1]

    patch.setattr(Part, "_parted", first_alone)


def protected_blocks_are_not_hidden(patch: pytest.MonkeyPatch) -> None:
    """The prefix that a call is about to use is evicted to make room for the call."""
    coldest = Part.coldest

    def careless(self: Part, count: int, protected: Ids) -> Ids:
        return coldest(self, count, protected[:0])

    patch.setattr(Part, "coldest", careless)


OF_POLICIES: Final[tuple[Mutation, ...]] = (
    use_is_told_to_the_first_segment,
    block_of_another_segment_is_not_put_back,
    protected_blocks_are_not_hidden,
)
"""Bugs that show under some policy, whichever groups a cache has."""
