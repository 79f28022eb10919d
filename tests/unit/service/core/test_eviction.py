"""Laws of the eviction order."""

from kvleased.core.eviction import EvictionOrder, LeafFirstLRU


def an_order(*blocks: int) -> EvictionOrder:
    """Return an order over blocks that were let go of one after another."""
    order = LeafFirstLRU()
    for block in blocks:
        order.add([block])
    return order


def test_longest_ago_leaves_first() -> None:
    """Blocks leave in the order in which they were let go of."""
    order = an_order(3, 1, 2)

    assert order.coldest(2) == [3, 1]
    assert list(order) == [3, 1, 2]


def test_protected_blocks_do_not_leave() -> None:
    """A protected block is passed over, and the next one leaves in its place."""
    assert an_order(3, 1, 2).coldest(2, {1}) == [3, 2]


def test_no_more_leave_than_there_are() -> None:
    """Who asks for more gets all that there is."""
    assert an_order(3, 1).coldest(9) == [3, 1]
    assert an_order(3, 1).coldest(0) == []


def test_asking_changes_nothing() -> None:
    """To ask who leaves next takes nobody out."""
    order = an_order(3, 1)

    order.coldest(2)

    assert list(order) == [3, 1]


def test_block_that_was_taken_out_to_be_copied_is_next_again() -> None:
    """Blocks put back at the cold end leave before all others, in the given order."""
    order = an_order(3, 1)

    order.add_coldest([7, 8])

    assert list(order) == [7, 8, 3, 1]


def test_discarded_block_is_not_in_the_order() -> None:
    """A block that somebody holds again is not evictable; one that was not there is ignored."""
    order = an_order(3, 1)

    order.discard([3, 99])

    assert 3 not in order
    assert 1 in order
    assert len(order) == 1
    assert repr(order) == "<LeafFirstLRU 1 evictable>"
