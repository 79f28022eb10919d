"""Laws of the pool: its counts add up, and the last holder of a block decides what becomes of it."""

import pytest

from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.records import TierRecords, key_digests
from kvleased.core.blocks.states import BLOCK_TRANSITIONS, Event, State, compile_transitions
from kvleased.core.eviction import POLICIES, make_order
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from tests.unit.service.core.builders import as_ids

TENANT, OTHER_TENANT = 7, 8


def a_pool(num_blocks: int = 4, policy: str = "leaf-lru") -> Pool:
    """Return a pool of free blocks."""
    return over(TierRecords.plain(num_blocks), policy)


def over(records: TierRecords, policy: str = "leaf-lru") -> Pool:
    """Return a pool over columns, with every block taken to be free."""
    order = make_order(policy, len(records.state), key_digests(records))
    return Pool(records, compile_transitions(BLOCK_TRANSITIONS), order, 99)


def take(pool: Pool, count: int, tenant: int = TENANT) -> Ids:
    """Take free blocks for a lease."""
    ids = pool.suitable(count, tenant)
    assert ids is not None
    pool.take(ids, Event.GRANT, tenant)
    return ids


def published(pool: Pool, count: int) -> Ids:
    """Take blocks and commit them under keys that are their ids."""
    ids = take(pool, count)
    pool.publish(ids, b"".join(bytes([block]) * 32 for block in ids), Event.COMMIT)
    return ids


def test_repr_shows_life() -> None:
    """The text of a pool shows how many blocks are in each state."""
    pool = a_pool()
    take(pool, 1)

    assert repr(pool) == "<Pool 3 free, 1 reserved>"
    assert repr(a_pool(0)) == "<Pool empty>"


def test_states_add_up_to_the_blocks() -> None:
    """Every block is in one state."""
    pool = a_pool(5)
    published(pool, 2)
    take(pool, 1)

    assert sum(pool.counts().values()) == len(pool) == 5
    assert (pool.counts()["ready"], pool.counts()["reserved"], pool.num_free) == (2, 1, 2)


@pytest.mark.parametrize(("count", "is_there"), [(3, True), (4, True), (5, False)])
def test_free_blocks_are_had_up_to_the_last(count: int, is_there: bool) -> None:
    """As many blocks are suitable as are free."""
    found = a_pool(4).suitable(count, TENANT)

    assert (found is not None) is is_there


def test_suitable_changes_nothing() -> None:
    """A search for suitable blocks takes none of them."""
    pool = a_pool()

    pool.suitable(2, TENANT)

    assert pool.num_free == 4


def test_another_tenants_block_is_not_suitable() -> None:
    """A block with another tenant's bytes must be scrubbed first, unless nobody can read it unwritten."""
    pool = a_pool(2)
    pool.let_go(take(pool, 2))

    assert pool.suitable(1, OTHER_TENANT) is None
    assert len(pool.unsuitable(5, OTHER_TENANT)) == 2
    assert pool.suitable(2) is not None


def test_suitable_blocks_are_found_among_others() -> None:
    """Free blocks of the right tenant are found anywhere in the free list, and only they are taken."""
    pool = a_pool(4)
    own, foreign = take(pool, 2), take(pool, 2, OTHER_TENANT)
    pool.let_go(own)
    pool.let_go(foreign)

    taken = take(pool, 2)

    assert sorted(taken) == sorted(own)
    assert sorted(pool.free.ids) == sorted(foreign)


def test_last_holder_frees_a_private_block() -> None:
    """A private block is free only when its last holder lets go of it, and its generation grows then."""
    pool = a_pool()
    ids = take(pool, 1)
    pool.hold(ids)

    pool.let_go(ids)
    assert pool.num_free == 3
    assert pool.records.generation[ids[0]] == 0

    pool.let_go(ids)
    assert pool.num_free == 4
    assert pool.records.generation[ids[0]] == 1


def test_last_holder_makes_a_ready_block_evictable() -> None:
    """A committed block stays findable when nobody holds it, and only then may it be evicted."""
    pool = a_pool()
    ids = published(pool, 1)
    assert pool.num_available == 3

    pool.let_go(ids)

    assert pool.num_available == 4
    assert pool.index.get(pool.keys_of(ids)) == ids[0]


def test_leaves_leave_before_their_prefix() -> None:
    """The blocks of one chain leave from its end."""
    pool = a_pool()
    ids = published(pool, 3)

    pool.let_go(ids)

    assert pool.victims(3, NOWHERE).tolist() == ids[::-1].tolist()


def test_block_copied_for_its_eviction_leaves_next() -> None:
    """A block that was held only for its copy goes back to its place; after a copy that is a use, it is the hottest."""
    pool = a_pool()
    cold, hot = published(pool, 1), published(pool, 1)
    pool.let_go(cold)
    pool.let_go(hot)

    pool.hold_to_copy(cold)
    pool.let_go_of_copied(cold, is_use=False)
    before = pool.victims(1, NOWHERE).tolist()
    pool.hold_to_copy(cold)
    pool.let_go_of_copied(cold, is_use=True)

    assert (before, pool.victims(1, NOWHERE).tolist()) == (cold.tolist(), hot.tolist())


@pytest.mark.parametrize("policy", POLICIES)
def test_block_let_go_of_while_it_is_copied_takes_its_place(policy: str) -> None:
    """Blocks of a chain that its last holder leaves while some are copied leave in the order of the chain."""
    pool = a_pool(6, policy)
    chain = published(pool, 5)
    pool.hold_to_copy(chain[1:3])
    pool.hold_to_copy(chain[4:])
    pool.hold(chain[:1])

    pool.let_go(chain)
    meanwhile = pool.victims(9, NOWHERE).tolist()
    pool.let_go(chain[:1])
    pool.let_go_of_copied(chain[1:3], is_use=False)
    pool.let_go_of_copied(chain[4:], is_use=False)

    assert meanwhile == chain[3:4].tolist()
    assert pool.victims(9, NOWHERE).tolist() == chain[::-1].tolist()


def test_private_block_that_was_copied_is_free_once_nobody_holds_it() -> None:
    """A block that never became findable takes no place in the order while it is copied."""
    pool = a_pool(3)
    ids = take(pool, 2)
    pool.hold_to_copy(ids)

    pool.let_go(ids)
    meanwhile = pool.num_available
    pool.let_go_of_copied(ids, is_use=False)

    assert (meanwhile, pool.num_available, pool.num_free) == (1, 3, 3)


def test_touched_blocks_leave_last() -> None:
    """Blocks that nobody uses become the hottest, the deepest first; a held one stays held, and a copied one aside."""
    pool = a_pool(6)
    chain = published(pool, 4)
    pool.records.position[chain] = range(4)
    other = published(pool, 1)
    pool.let_go(chain)
    pool.let_go(other)
    pool.hold(chain[:1])
    pool.hold_to_copy(chain[2:3])

    pool.touch(chain)
    meanwhile = pool.victims(9, NOWHERE).tolist()
    pool.let_go_of_copied(chain[2:3], is_use=False)
    pool.touch(chain[:1])

    assert meanwhile == [*other.tolist(), chain[3], chain[1]]
    assert pool.victims(9, NOWHERE).tolist() == [*other.tolist(), *chain[:0:-1].tolist()]


def test_held_block_is_not_evicted() -> None:
    """An eviction of a held block is noticed as our own mistake."""
    pool = a_pool()
    ids = published(pool, 1)

    with pytest.raises(AssertionError, match="held"):
        pool.evict(ids)


def test_evicted_block_is_free_and_unknown() -> None:
    """An evicted block is free, and its key is not found any more."""
    pool = a_pool()
    ids = published(pool, 2)
    pool.let_go(ids)

    pool.evict(ids[:1])

    assert pool.num_free == 3
    assert pool.index.blocks().tolist() == [ids[1]]
    assert list(pool.order) == [ids[1]]


def test_index_that_points_elsewhere_is_noticed() -> None:
    """A block that is not found under its own key is noticed as our own mistake."""
    pool = a_pool()
    ids = published(pool, 1)
    pool.let_go(ids)
    pool.records.key[ids] = 3

    with pytest.raises(AssertionError, match="elsewhere"):
        pool.evict(ids)


def test_awaited_block_cannot_come_to_nothing() -> None:
    """A failed fill of a block that somebody else holds too is noticed as our own mistake."""
    pool = a_pool()
    ids = as_ids([0])
    pool.take(ids, Event.FILL, TENANT)
    pool.hold(ids)

    with pytest.raises(AssertionError, match="held by more than the copy"):
        pool.end(ids, Event.FAIL)


def test_published_block_is_sealed() -> None:
    """A committed block's seal matches, and does not after any change of its entry."""
    pool = a_pool()
    ids = published(pool, 2)
    assert pool.are_sealed(ids).all()

    pool.records.checksum[ids[0]] = 5

    assert pool.are_sealed(ids).tolist() == [False, True]


def test_rebuilt_pool_is_what_it_was() -> None:
    """The free list, the index and the order follow from the columns alone."""
    pool = a_pool(6)
    ids = published(pool, 3)
    pool.records.position[ids] = [0, 1, 2]
    pool.let_go(ids)
    again = over(pool.records)

    again.rebuild()

    assert again.index.find(pool.keys_of(ids)).tolist() == ids.tolist()
    assert len(again.index) == len(pool.index)
    assert list(again.order) == list(pool.order)
    assert sorted(again.free.ids) == sorted(pool.free.ids)
    assert State.READY in again.records.state


def test_rebuilt_pool_knows_whose_bytes_its_blocks_hold() -> None:
    """After a restart, another tenant's bytes still make a block unsuitable."""
    pool = a_pool(1)
    pool.let_go(take(pool, 1))

    pool.rebuild()

    assert pool.suitable(1, OTHER_TENANT) is None
    assert pool.suitable(1, TENANT) is not None


# Policies -------------------------------------------------------------------------------------------------------------


def test_policy_learns_from_what_happens_to_blocks() -> None:
    """A hold counts as a use and a copy does not; a key that comes back in another block is known again."""
    pool = a_pool(4, "arc")
    copied, used = published(pool, 1), published(pool, 1)
    pool.let_go(copied)
    pool.let_go(used)

    pool.hold_to_copy(copied)
    pool.let_go_of_copied(copied, is_use=False)
    pool.hold(used)
    pool.let_go(used)
    before = repr(pool.order)
    key = pool.keys_of(copied)
    pool.evict(copied)
    again = take(pool, 2)[1:]
    pool.publish(again, key, Event.COMMIT)
    pool.let_go(again)

    assert before == "<arc order of 1 + 1 evictable>"
    assert again != copied
    assert repr(pool.order) == "<arc order of 0 + 2 evictable>"


@pytest.mark.parametrize("policy", ["leaf-lru", "arc", "s3-fifo", "adaptive"])
def test_policy_is_in_force_for_each_tenant(policy: str) -> None:
    """A tenant's blocks leave as if no other tenant had any, even those from before there was a second tenant."""
    pool, alone = a_pool(30, policy), a_pool(30, policy)
    pool.part_tenants(at_once=False)

    for one, tenant in ((pool, OTHER_TENANT), (alone, TENANT)):
        first = published(one, 8)
        one.let_go(first)
        one.hold(first[:3])
        one.let_go(first[:3])
        take(one, 4, tenant)
        one.let_go(published(one, 8))

    assert pool.owners is not None
    own = pool.owners.coldest(TENANT, 16, NOWHERE)
    assert own.tolist() == alone.victims(16, NOWHERE).tolist()
    assert len(own) == 16


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_outlives_a_restart_with_tenants(policy: str) -> None:
    """With several tenants, the policy is the same after a restart, but what it learned is forgotten."""
    pool = a_pool(8, policy)
    pool.let_go(published(pool, 3))
    again = over(pool.records, policy)
    again.part_tenants(at_once=True)

    again.rebuild()

    assert again.owners is not None
    assert (again.owners.order.columns is None) == (policy == "leaf-lru")
    assert sorted(again.order) == sorted(pool.order)
    again.evict(again.victims(2, NOWHERE))
    assert len(again.order) == 1
