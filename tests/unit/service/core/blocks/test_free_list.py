"""Laws of the free list: blocks are taken in the order in which they were offered, the last freed first."""

import numpy as np

from kvleased.core.blocks.free_list import FreeList


def listed(*ids: int) -> FreeList:
    """Return a list of the given free blocks of eight, the next to be taken first."""
    return FreeList(np.array(ids, np.intp), 8)


def test_what_was_freed_last_is_taken_first() -> None:
    """The block that was freed last is taken first, for its bytes are the likeliest to be in a hardware cache."""
    free = listed(3, 1)

    free.add(np.array([5, 4], np.intp))

    assert free.top(2).tolist() == [5, 4]
    assert free.ids.tolist() == [5, 4, 3, 1]
    assert repr(free) == "<FreeList 4 of 8>"


def test_offered_blocks_are_the_top_in_any_order() -> None:
    """A caller that takes the very array that it was offered takes just these blocks."""
    free = listed(4, 5, 6, 7)

    offered = free.offer(free.top(2)[::-1].copy())
    free.take(offered)

    assert offered.tolist() == [5, 4]
    assert free.ids.tolist() == [6, 7]


def test_any_other_blocks_leave_the_rest_in_order() -> None:
    """An array that was not offered, or was offered before a change, is taken block by block."""
    free = listed(4, 5, 6, 7)
    offered = free.offer(free.top(1).copy())
    free.add(np.array([2], np.intp))

    free.take(offered)
    free.take(np.array([7], np.intp))

    assert free.ids.tolist() == [2, 5, 6]
    assert free.count == 3
