"""Laws of pictures: a cell shows the states and tenants of its blocks, several if there are many, and no secrets."""

from dataclasses import fields

import numpy as np
import pytest

from kvlease.errors import InvalidError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Tier
from kvleased.core.views.picture import (
    HELD,
    LOOKS,
    NOBODY,
    OTHERS,
    BlockFacts,
    Holder,
    Picture,
    picture,
)
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WORKER,
    a_cache,
    cached,
    evicted,
    ids,
    keys,
    records,
    reserve,
    tick,
)


def looks(found: Picture) -> list[str]:
    """Return the names of a picture's looks."""
    return [LOOKS[look] for look in found.looks.tolist()]


def test_looks_are_the_states_and_held() -> None:
    """A block looks as its state says; a READY block looks different when it is held."""
    cache = a_cache()
    cached(cache, keys(0, 1))
    blocks = ids(reserve(cache, 3, "again", keys(0)).block_ids)

    found = cache.picture(Tier.DEVICE, [TENANT])

    assert (found.first_block, found.num_blocks, found.blocks_per_cell) == (0, 8, 1)
    assert [LOOKS[found.looks[block]] for block in blocks] == ["held", "reserved", "reserved"]
    assert sorted(looks(found)) == sorted(["held", "ready", *["reserved"] * 2, *["free"] * 4])


def test_tenants_are_numbered_as_named() -> None:
    """Each block has the number of its tenant; all unnamed tenants share one number, and one stands for no tenant."""
    cache = a_cache()
    mine = ids(reserve(cache, 1, "mine").block_ids)
    theirs = ids(reserve(cache, 1, "theirs", worker_id=STRANGER).block_ids)

    both = cache.picture(Tier.DEVICE, [OTHER_TENANT, TENANT]).tenants
    one = cache.picture(Tier.DEVICE, [TENANT]).tenants
    none = cache.picture(Tier.DEVICE, []).tenants

    assert (both[mine[0]], both[theirs[0]]) == (2, 1)
    assert (one[mine[0]], one[theirs[0]]) == (1, OTHERS)
    assert (none[mine[0]], none[theirs[0]]) == (OTHERS, OTHERS)
    assert np.count_nonzero(both == NOBODY) == 6


def test_null_blocks_are_not_shown() -> None:
    """Null blocks, which are never granted, are not part of a picture."""
    found = a_cache(null_blocks=1).picture(Tier.DEVICE, [])

    assert (found.first_block, found.num_blocks, len(found.looks)) == (1, 7, 7)


def test_cell_of_several_shows_the_most_common_but_alarms_first() -> None:
    """A cell shows the commonest look of its blocks, and that tenant, but any quarantined block goes before."""
    cache = a_cache(12)
    columns = records(cache).device
    columns.state[:] = [0, 3, 3, 3, 0, 0, 0, State.QUARANTINED, 0, 0, 0, 1]
    columns.tenant[:] = TENANT
    columns.tenant[0] = OTHER_TENANT

    found = picture(cache._state, Tier.DEVICE, [OTHER_TENANT, TENANT], cells_max=3)

    assert found.blocks_per_cell == 4
    assert looks(found) == ["ready", "quarantined", "free"]
    assert found.tenants.tolist() == [2, 2, NOBODY]


def test_last_cell_may_be_of_fewer() -> None:
    """If the blocks do not fill the last cell, it shows those that there are."""
    cache = a_cache(10)
    records(cache).device.state[8:] = State.RESERVED

    found = picture(cache._state, Tier.DEVICE, [], cells_max=3)

    assert looks(found) == ["free", "free", "reserved"]


@pytest.mark.parametrize("num_blocks", [100_000, 400_000])
def test_picture_of_many_blocks_is_bounded(num_blocks: int) -> None:
    """A picture has a bounded number of cells, however many blocks there are."""
    cache = a_cache(num_blocks, 0, table_blocks=8)
    tenants = list(range(1, 60))

    found = cache.picture(Tier.DEVICE, tenants)

    assert len(found.looks) == len(found.tenants) <= 1 << 15
    assert set(looks(found)) == {"free"}


def test_held_block_names_its_leases() -> None:
    """The facts of a block tell its leases and their age, the tiers of its key, and only the beginning of the key."""
    cache = a_cache()
    cached(cache, keys(5))
    first, second = reserve(cache, 1, "a", keys(5)), reserve(cache, 1, "b", keys(5), worker_id=MATE)
    (block,) = ids(first.block_ids)

    found = cache.block_facts(Tier.DEVICE, block, now=9.0)

    assert found == BlockFacts(
        block_id=block,
        look="held",
        num_holders=2,
        tenant_digest=TENANT,
        key_prefix="05000000",
        position=0,
        leases=tuple(
            Holder(lease_id=one.lease_id, phase="active", age_seconds=9.0)
            for one in (first, second)
        ),
        magazines=(),
        num_pins=0,
        also_in=(),
    )


def test_free_block_says_nothing() -> None:
    """A free block tells nothing of its earlier holders."""
    cache = a_cache()
    cached(cache, keys(1))
    (block,) = np.flatnonzero(records(cache).device.state == State.READY).tolist()
    cache.handle(c.Pin(keys=keys(1)), 0.0)
    assert cache.block_facts(Tier.DEVICE, block, 0.0).num_pins == 1

    free = cache.block_facts(Tier.DEVICE, (block + 1) % 8, 0.0)

    assert (free.look, free.tenant_digest, free.key_prefix, free.leases) == ("free", 0, "", ())


def test_only_few_leases_of_a_block_are_named() -> None:
    """The facts of a block name a bounded number of its leases."""
    cache = a_cache(16, max_leases=16)
    cached(cache, keys(1))
    blocks = [reserve(cache, 1, str(number), keys(1)).block_ids for number in range(10)]

    found = cache.block_facts(Tier.DEVICE, ids(blocks[0])[0], 0.0)

    assert (found.num_holders, len(found.leases)) == (10, 8)


def test_row_that_was_longer_does_not_count() -> None:
    """Entries behind the end of a row do not belong to its lease."""
    cache = a_cache()
    block = ids(reserve(cache, 1, "mine").block_ids)[0]
    rows = records(cache).rows
    (row,) = np.flatnonzero(rows.lease_id).tolist()
    rows.block_ids[row, 1] = other = (block + 1) % 8

    assert cache.block_facts(Tier.DEVICE, other, 0.0).leases == ()


def test_slots_of_evicted_leases_are_theirs() -> None:
    """A slot names the evicted lease that has it; the device block of the same number does not."""
    cache = a_cache()
    evicted(cache, keys(0))
    slots = np.flatnonzero(records(cache).host.state != State.FREE).tolist()

    found = cache.block_facts(Tier.HOST, slots[0], 0.0)

    assert [one.phase for one in found.leases] == ["evicted"]
    assert cache.block_facts(Tier.DEVICE, slots[0], 0.0).leases == ()


def test_tiers_that_have_the_key_are_named() -> None:
    """The facts of a slot or a block name the other tiers that have its key."""
    cache = a_cache(num_disk_slots=4)
    evicted(cache, keys(0))
    number = int(np.flatnonzero(records(cache).host.state != State.FREE)[0])
    found = cache.block_facts(Tier.HOST, number, 0.0)

    assert set(found.also_in) <= {"device", "disk"}
    assert cache.block_facts(Tier.DISK, 0, 0.0).leases == ()


def test_block_that_is_not_there_is_refused() -> None:
    """A number outside the pool, or of a null block, is refused with the two bounds."""
    cache = a_cache(null_blocks=1)

    for number in (0, 8, -1):
        with pytest.raises(InvalidError, match="has blocks 1 to 7, so there is no block"):
            cache.block_facts(Tier.DEVICE, number, 0.0)


def test_quarantined_block_says_so() -> None:
    """A lease that was not renewed leaves its blocks quarantined, in the picture too."""
    cache = a_cache()
    reserve(cache, 1, "late")
    tick(cache, LEASE_SECONDS)

    assert "quarantined" in looks(cache.picture(Tier.DEVICE, []))


def test_facts_hold_no_whole_key() -> None:
    """The facts of a block do not suffice to ask for it."""
    names = {field.name for field in fields(BlockFacts)}

    assert names.isdisjoint({"key", "keys", "token_ids", "checksum"})
    assert len(State) == HELD


def test_pictures_change_nothing() -> None:
    """A picture changes nothing in the cache."""
    cache = a_cache()
    lease = reserve(cache, 2, "mine")
    before = repr(cache)
    cache.picture(Tier.DEVICE, [TENANT])
    cache.block_facts(Tier.DEVICE, ids(lease.block_ids)[0], 1.0)

    assert (repr(cache), cache.check()) == (before, [])
    assert isinstance(cache, Cache)
    assert cache.has_lease(lease.lease_id)
    assert cache.num_leases_of(WORKER) == 1
