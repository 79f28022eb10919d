"""Laws of sectors that cannot be written: each costs its own slot and no other, and a failing disk costs none."""

import numpy as np
import pytest

from kvlease.ids import BYTES_PER_KEY
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Copy, Direction, Mover, Outcome, Tier
from kvleased.core.shape import WritePolicy
from kvleased.core.suspects import Suspects
from tests.unit.service.core.builders import (
    TOKENS_PER_BLOCK,
    WORKER,
    copies,
    ids,
    land,
    records,
    release,
    reserve,
    the_copy,
    tick,
)
from tests.unit.service.core.tier_builders import a_tiered_cache, adopt, doc, labels_of

SECONDS_TO_REST = 2.0


class Disk:
    """A disk with some bad slots: a copy to one of them fails as a whole, and the store goes off."""

    def __init__(self, cache: Cache, *bad: int) -> None:
        self.cache = cache
        self.bad = set(bad)
        self.now = 0.0
        self.num_failures = 0

    def settle(self, outcome: Outcome) -> None:
        """Carry out copies until none is started for a while."""
        left = copies(outcome)
        while left or (left := self.wait()):
            left += self.carry_out(left.pop(0))
        assert self.cache.check() == []

    def wait(self) -> list[Copy]:
        """Return the copies that are started a little later."""
        self.now += SECONDS_TO_REST
        return copies(tick(self.cache, self.now))

    def carry_out(self, copy: Copy) -> list[Copy]:
        """Let a copy be done or fail, and return the copies that are started then."""
        if copy.direction is not Direction.STORE or not self.bad.intersection(ids(copy.target_ids)):
            return copies(self.cache.handle(c.CopyDone(copy_id=copy.copy_id), self.now))
        self.num_failures += 1
        self._turn(on=False)
        self.cache.handle(c.CopyFailed(copy_id=copy.copy_id), self.now)
        self.now += SECONDS_TO_REST
        return self._turn(on=True)

    def _turn(self, *, on: bool) -> list[Copy]:
        return copies(self.cache.handle(c.TierChanged(tier=Tier.DISK, is_on=on), self.now))


def commit(cache: Cache, packed: bytes, now: float) -> Outcome:
    """Commit the blocks of keys, release them, and return what that starts."""
    count = len(packed) // BYTES_PER_KEY
    lease = reserve(cache, count, f"request {packed.hex()}")
    command = c.Commit(
        worker_id=WORKER,
        lease_id=lease.lease_id,
        num_tokens=count * TOKENS_PER_BLOCK,
        first_block=0,
        keys=packed,
    )
    outcome = cache.handle(command, now)
    release(cache, lease.lease_id)
    return outcome


def write_through(cache: Cache, disk: Disk, num_blocks: int, first: int = 1) -> None:
    """Commit the blocks of documents of two each, and let them be written through."""
    for at in range(first, first + num_blocks, 2):
        disk.settle(commit(cache, doc(2, at), disk.now))


def test_sector_that_cannot_be_written_costs_its_slot() -> None:
    """A disk with much room goes off a few times, then has all blocks, and has retired no other slot."""
    cache = a_tiered_cache(16, 16, write_policy=WritePolicy.WRITE_THROUGH, num_disk_slots=16)
    disk = Disk(cache, 1)

    write_through(cache, disk, 14)

    assert cache.census().disk["ready"] == 14
    assert 1 <= disk.num_failures <= 6
    assert set(np.flatnonzero(records(cache).disk.state == State.BAD).tolist()) <= {1}


def test_bad_sector_of_a_full_disk_is_retired() -> None:
    """If no other slot is free, cached ones leave to find out; then the bad slot is retired, and the disk stays on."""
    cache = a_tiered_cache(32, 32, write_policy=WritePolicy.WRITE_THROUGH, num_disk_slots=8)
    adopt(cache, [0, 1, 2, 4, 5, 6, 7], labels_of(doc(7, 100)))
    disk = Disk(cache, 3)

    write_through(cache, disk, 8)
    num_failures = disk.num_failures
    write_through(cache, disk, 8, first=20)

    assert cache.census().disk == {**cache.census().disk, "bad": 1, "ready": 7}
    assert cache.census().counters["disk_failures"] == 1
    assert disk.num_failures == num_failures <= 6


def test_disk_that_takes_nothing_loses_nothing_for_good() -> None:
    """While every copy fails, no slot is to blame: none is retired, and few blocks leave."""
    cache = a_tiered_cache(32, 32, write_policy=WritePolicy.WRITE_THROUGH, num_disk_slots=24)
    adopt(cache, range(4, 24), labels_of(doc(20, 100)))
    disk = Disk(cache, *range(24))
    left = copies(commit(cache, doc(2), 0.0))
    for _ in range(100):
        left += disk.carry_out(left.pop(0)) or disk.wait()

    assert cache.census().disk["bad"] == 0
    assert cache.census().disk["ready"] >= 11
    disk.bad.clear()
    disk.settle(Outcome(effects=left))
    assert cache.census().disk["bad"] == 0
    assert cache.check() == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_slot_under_which_a_mover_dies_is_suspected(is_lost: bool) -> None:
    """A sector that hangs fails its copy only by the end of the mover, and the next copy goes to another slot."""
    cache = a_tiered_cache(16, 16, write_policy=WritePolicy.WRITE_THROUGH)
    store = the_copy(land(cache, the_copy(commit(cache, doc(1), 0.0))))
    if is_lost:
        cache.handle(c.CopyLost(copy_id=store.copy_id), 1.9)

    cache.handle(c.MoverDied(mover=Mover.DISK), 2.0)

    again = the_copy(tick(cache, 5.0))
    assert again.source_ids == store.source_ids
    assert again.target_ids != store.target_ids
    assert cache.check() == []


def test_next_copies_are_smaller_until_one_goes_well() -> None:
    """After a failure, copies have a fourth of its slots, down to one, and twice as many after each success."""
    suspects = Suspects()

    suspects.failed(np.arange(256))
    sizes = [suspects.most]
    suspects.failed(np.arange(3))
    sizes.append(suspects.most)
    for _ in range(2):
        suspects.wrote(np.arange(1))
        sizes.append(suspects.most)

    assert sizes == [64, 1, 2, 4]


def test_slot_that_went_well_is_forgotten() -> None:
    """A failure of a slot does not count any more once the slot was written."""
    suspects, slot = Suspects(), np.array([7])
    suspects.failed(slot)
    suspects.wrote(slot)

    assert suspects.num_kept_back == 0
    assert not len(suspects.failed(slot))
    assert suspects.num_kept_back == 1
    suspects.wrote(np.array([8]))
    assert suspects.failed(slot).tolist() == [7]
    assert suspects.num_kept_back == 0
