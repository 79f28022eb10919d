"""Laws of the eviction order."""

from collections.abc import Callable

import pytest

from kvleased.core.eviction import EvictionOrder, LeafFirstLRU
from kvleased.core.lease.leases import NOWHERE
from tests.unit.service.core.builders import as_ids

NUM_BLOCKS = 100


def an_order(*blocks: int) -> EvictionOrder:
    """Return an order over blocks that were let go of one after another."""
    order = LeafFirstLRU(NUM_BLOCKS)
    for block in blocks:
        order.add(as_ids([block]))
    return order


def test_longest_ago_leaves_first() -> None:
    """Blocks leave in the order in which they were let go of."""
    order = an_order(3, 1, 2)

    assert order.coldest(2, NOWHERE).tolist() == [3, 1]
    assert list(order) == [3, 1, 2]


def test_protected_blocks_do_not_leave() -> None:
    """A protected block is passed over, and the next one leaves in its place."""
    assert an_order(3, 1, 2).coldest(2, as_ids([1])).tolist() == [3, 2]


def test_no_more_leave_than_there_are() -> None:
    """A caller that asks for more blocks than there are gets all of them."""
    assert an_order(3, 1).coldest(9, NOWHERE).tolist() == [3, 1]
    assert an_order(3, 1).coldest(0, NOWHERE).tolist() == []


def test_asking_changes_nothing() -> None:
    """A question for the next blocks to leave takes none out."""
    order = an_order(3, 1)

    order.coldest(2, as_ids([3]))

    assert list(order) == [3, 1]


def test_block_that_was_taken_out_to_be_copied_goes_back_to_its_place() -> None:
    """A copy changes nothing in the order, whatever is put back first."""
    order = an_order(3, 1, 2, 7)
    order.set_aside(as_ids([1, 99]))
    order.set_aside(as_ids([7, 3]))
    meanwhile = list(order)

    order.put_back(as_ids([7, 3]))
    order.add(as_ids([8]))
    order.put_back(as_ids([1]))

    assert meanwhile == [2]
    assert list(order) == [3, 1, 2, 7, 8]


def test_blocks_whose_places_went_by_are_next() -> None:
    """Blocks that are put back when all colder and some hotter ones have left are the coldest, in their old order."""
    order = an_order(3, 1, 2, 7)
    order.set_aside(as_ids([3, 1]))
    order.evicted(order.coldest(1, NOWHERE))

    order.put_back(as_ids([1, 3]))

    assert list(order) == order.coldest(9, NOWHERE).tolist() == [3, 1, 7]


def test_place_of_a_block_that_is_used_while_it_is_copied_is_forgotten() -> None:
    """A use during a copy counts: the block is as hot as its last use."""
    order = an_order(3)
    order.set_aside(as_ids([3]))
    order.discard(as_ids([3]))
    order.add(as_ids([1, 3]))

    assert list(order) == [1, 3]


def test_places_of_blocks_that_are_copied_outlive_the_ring() -> None:
    """Blocks that are aside while the ring is made anew go back between the same others, and once gone by, in order."""
    order = LeafFirstLRU(100)
    order.add(as_ids(range(10)))
    order.set_aside(as_ids([4, 5]))
    for _ in range(100):
        order.add(as_ids([*range(20, 60)]))
        order.discard(as_ids([*range(20, 60)]))
    between = [*order]

    order.put_back(as_ids([5, 4]))

    assert between == [0, 1, 2, 3, 6, 7, 8, 9]
    assert [*order] == [*range(10)]
    assert order.put_all_back().tolist() == []


def test_discarded_block_is_not_in_the_order() -> None:
    """A held block is not evictable; the removal of a block that is not in the order is ignored."""
    order = an_order(3, 1)

    order.discard(as_ids([3, 99]))

    assert 3 not in order
    assert 1 in order
    assert len(order) == 1
    assert repr(order) == "<LeafFirstLRU 1 evictable>"


def test_order_outlives_its_places() -> None:
    """Blocks stay in order, however often they come and go at either end."""
    order = LeafFirstLRU(4)
    order.add(as_ids([0, 1, 2, 3]))

    for _ in range(100):
        order.discard(as_ids([1, 2]))
        order.add(as_ids([1]))
        order.add_coldest(as_ids([2]))

    assert list(order) == [2, 0, 3, 1]
    assert order.holds(as_ids([0, 1])).all()
    assert order.coldest(3, as_ids([0])).tolist() == [2, 3, 1]


def test_order_goes_around_its_ring() -> None:
    """Many blocks keep their order even where the ring begins again."""
    order = LeafFirstLRU(20)

    for shift in range(20):
        blocks = [(at + shift) % 20 for at in range(20)]
        order.add(as_ids(blocks))
        assert list(order) == blocks
        order.discard(as_ids(blocks))
        assert order.coldest(1, NOWHERE).tolist() == []


def test_gaps_are_passed_over() -> None:
    """The next block to leave is found, however many left before it."""
    order = LeafFirstLRU(NUM_BLOCKS)
    order.add(as_ids(range(NUM_BLOCKS)))

    order.discard(as_ids(range(NUM_BLOCKS - 1)))
    assert order.coldest(1, NOWHERE).tolist() == [NUM_BLOCKS - 1]

    order.discard(as_ids([NUM_BLOCKS - 1]))
    assert order.coldest(1, NOWHERE).tolist() == []


def test_those_that_were_said_to_be_next_leave_and_the_others_keep_their_order() -> None:
    """Evicted blocks take no others out of the order, and are passed over from then on."""
    order = LeafFirstLRU(NUM_BLOCKS)
    order.add(as_ids(range(10)))
    order.discard(as_ids([1, 4]))

    order.evicted(order.coldest(3, NOWHERE))

    assert list(order) == [5, 6, 7, 8, 9]
    assert order.coldest(9, NOWHERE).tolist() == [5, 6, 7, 8, 9]


def test_all_may_leave_at_once() -> None:
    """An order whose blocks have all left is empty, and takes others."""
    order = an_order(3, 1, 2)
    order.discard(as_ids([2]))

    order.evicted(order.coldest(2, NOWHERE))
    assert order.coldest(1, NOWHERE).tolist() == []

    order.add(as_ids([2]))
    assert order.coldest(1, NOWHERE).tolist() == [2]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda order: order.discard(as_ids([1])), id="held again"),
        pytest.param(
            lambda order: (order.set_aside(as_ids([3])), order.put_back(as_ids([3]))),
            id="put back among them",
        ),
    ],
)
def test_those_that_were_next_leave_also_where_something_has_changed_since(
    change: Callable[[EvictionOrder], None],
) -> None:
    """If other blocks come or go before the chosen ones leave, they are counted once, and keep their places."""
    order = an_order(3, 1, 2)
    leaving = order.coldest(2, NOWHERE)
    change(order)
    expected = [block for block in order if block not in leaving]

    order.evicted(leaving)

    assert list(order) == order.coldest(9, NOWHERE).tolist() == expected
    assert len(order) == len(expected)
