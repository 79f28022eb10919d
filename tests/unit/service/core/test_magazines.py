"""Laws of magazines: which blocks engines hold by block id, who shares them, and when a magazine ends."""

from typing import Any

import numpy as np
import pytest

from kvlease.errors import BusyError, IdReusedError, InvalidError, WrongStateError
from kvlease.ids import Epoch, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.records import MAGAZINES_MAX
from kvleased.core.blocks.states import State
from kvleased.core.effects import Direction, Outcome
from kvleased.core.limits import TenantLimits
from kvleased.core.magazine_replies import Exchanged, Inventoried
from kvleased.core.magazines import SHORT_SECONDS
from kvleased.core.shape import WritePolicy
from tests.unit.service.core.builders import (
    EPOCH,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    WORKER,
    a_cache,
    answer,
    cached,
    commit,
    committed,
    copies,
    ids,
    keys,
    land,
    on_host,
    records,
    reserve,
    states,
    the_copy,
)

ENGINE = WorkerId(11)
SECOND = WorkerId(12)
"""Another process of the same engine."""
OTHER = WorkerId(13)
"""A process of another engine of the same tenant."""
FOREIGN = WorkerId(14)
"""A process of an engine of another tenant."""
NAMES = {ENGINE: 21, SECOND: 21, OTHER: 22, FOREIGN: 23}
TENANTS = {ENGINE: TENANT, SECOND: TENANT, OTHER: TENANT, FOREIGN: OTHER_TENANT}


class Node:
    """A cache, and the engines that have magazines in it."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def attach(self, *workers: WorkerId) -> "Node":
        """Let processes attach, each with its magazine."""
        for one in workers:
            command = c.Attach(worker_id=one, tenant_digest=TENANTS[one], magazine=NAMES[one])
            self.cache.handle(command, 0.0)
        return self

    def handle(self, worker_id: WorkerId = ENGINE, *, now: float = 0.0, **columns: Any) -> Outcome:
        """Carry out an exchange under the next sequence, and check the cache."""
        sequence = self.inventory(worker_id).sequence + 1
        outcome = self.cache.handle(
            c.Exchange(worker_id=worker_id, sequence=sequence, **columns), now
        )
        assert self.cache.check() == []
        return outcome

    def exchange(
        self, worker_id: WorkerId = ENGINE, *, now: float = 0.0, **columns: Any
    ) -> Exchanged:
        """Return the answer to an exchange."""
        return answer(self.handle(worker_id, now=now, **columns), Exchanged)

    def take(self, count: int, worker_id: WorkerId = ENGINE) -> bytes:
        """Have an engine take blocks, which must all be there, and return them."""
        taken = self.exchange(worker_id, take_running=count).taken_blocks
        assert len(ids(taken)) == count
        return taken

    def publish(self, *numbers: int, worker_id: WorkerId = ENGINE) -> bytes:
        """Have an engine take blocks, publish them under keys made of numbers, and return them."""
        taken = self.take(len(numbers), worker_id)
        told = self.exchange(
            worker_id,
            publish_blocks=taken,
            publish_keys=keys(*numbers),
            publish_positions=np.arange(len(numbers), dtype=np.uint32).tobytes(),
        )
        assert told.published == bytes([1]) * len(numbers)
        return taken

    def inventory(self, worker_id: WorkerId = ENGINE) -> Inventoried:
        """Return the inventory of a magazine."""
        return answer(self.cache.handle(c.Inventory(worker_id=worker_id), 0.0), Inventoried)

    def restart(self, *living: WorkerId) -> "Node":
        """Restart the control process, with only the given processes alive."""
        workers = {one: TENANTS.get(one, TENANT) for one in living}
        self.cache = Cache.recovered(
            self.cache.shape,
            records(self.cache),
            Epoch(EPOCH + 1),
            workers,
            0.0,
            magazines={one: NAMES[one] for one in living if one in NAMES},
        )
        assert self.cache.check() == []
        return self


@pytest.fixture
def node() -> Node:
    """Return a node with one engine of two processes."""
    return Node(a_cache()).attach(ENGINE, SECOND)


def packed(*blocks: int) -> bytes:
    """Return block ids as they travel."""
    return np.array(blocks, np.int32).tobytes()


# Private blocks -------------------------------------------------------------------------------------------------------


def test_taken_blocks_are_private_to_the_magazine(node: Node) -> None:
    """Blocks for running requests come first; all are private, and all processes of the engine see them."""
    told = node.exchange(take_running=2, take_new=1)

    assert (len(ids(told.taken_blocks)), told.num_taken_running) == (3, 2)
    assert states(node.cache, told.taken_blocks) == {State.RESERVED}
    assert ids(node.inventory(SECOND).blocks) == sorted(ids(told.taken_blocks))
    assert node.inventory().keys == bytes(3 * 32)
    assert (told.num_available, told.num_magazines) == (5, 1)


def test_dropped_private_block_is_free_at_once(node: Node) -> None:
    """A block that is dropped and cannot be found is free at once, under a new generation."""
    blocks = node.take(2)

    told = node.exchange(drop_blocks=blocks + packed(7, -1, 99) + blocks[:4])

    assert told.dropped == bytes([1, 1, 3, 3, 3, 3])
    assert states(node.cache, blocks) == {State.FREE}
    assert set(records(node.cache).device.generation[ids(blocks)]) == {1}


def test_take_gives_what_there_is_or_nothing(node: Node) -> None:
    """A take gets fewer blocks than it wants if there are fewer, or none of that kind with all_or_nothing."""
    assert node.exchange(take_running=6, take_new=5, all_or_nothing=True).num_taken_running == 6
    assert len(ids(node.exchange(take_running=5).taken_blocks)) == 2
    assert node.exchange(take_running=1).taken_blocks == b""


def test_take_running_evicts_what_nobody_holds(node: Node) -> None:
    """For running requests, cached blocks that nobody holds are dropped at once."""
    cached(node.cache, keys(1, 2, 3, 4))

    assert len(ids(node.exchange(take_running=7).taken_blocks)) == 7
    assert node.cache.census().counters["evictions"] == 3


def test_take_new_writes_back_first() -> None:
    """For new requests, free blocks come at once, and dirty blocks are written back before they leave."""
    node = Node(a_cache(4)).attach(ENGINE)
    cached(node.cache, keys(1, 2, 3))

    outcome = node.handle(take_new=3)
    assert len(ids(answer(outcome, Exchanged).taken_blocks)) == 1
    land(node.cache, the_copy(outcome))

    assert len(ids(node.exchange(take_new=2).taken_blocks)) == 2
    assert node.cache.census().host["ready"] == 2


def test_take_new_as_a_whole_waits_for_its_copies() -> None:
    """With all_or_nothing, no block comes while copies make room."""
    node = Node(a_cache(4)).attach(ENGINE)
    cached(node.cache, keys(1, 2, 3))

    assert node.exchange(take_new=3, all_or_nothing=True).taken_blocks == b""


def test_take_gets_no_block_with_foreign_bytes() -> None:
    """Blocks with another tenant's bytes are scrubbed first, and come with a later exchange."""
    node = Node(a_cache(4)).attach(ENGINE, FOREIGN)
    node.exchange(FOREIGN, drop_blocks=node.take(4, FOREIGN))

    outcome = node.handle(take_running=2)
    assert answer(outcome, Exchanged).taken_blocks == b""
    land(node.cache, the_copy(outcome))

    assert len(ids(node.exchange(take_running=2).taken_blocks)) == 2


def test_take_heeds_the_tenants_maximum() -> None:
    """A magazine gets no more blocks than its tenant may have, however many are free."""
    limits = {TENANT: TenantLimits(max_blocks=3), OTHER_TENANT: TenantLimits(max_blocks=8)}
    node = Node(a_cache(tenants=limits)).attach(ENGINE, FOREIGN)
    node.exchange(FOREIGN, drop_blocks=node.take(8, FOREIGN))

    assert len(ids(node.exchange(take_running=5).taken_blocks)) == 0


def test_free_blocks_heed_the_tenants_maximum() -> None:
    """A tenant at its maximum gets no free blocks while its own cached ones are written back."""
    node = Node(a_cache(tenants={TENANT: TenantLimits(max_blocks=3)})).attach(ENGINE)
    cached(node.cache, keys(1, 2, 3))

    outcome = node.handle(take_new=2)

    assert answer(outcome, Exchanged).taken_blocks == b""
    assert len(copies(outcome)) == 1


def test_drain_leaves_engines_their_blocks(node: Node) -> None:
    """A drain grants no new lease, but an attached engine, which has no other memory, still takes blocks."""
    blocks = node.take(1)
    node.cache.handle(c.Drain(), 0.0)

    told = node.exchange(take_running=1, take_new=1, drop_blocks=blocks)

    assert (len(ids(told.taken_blocks)), told.dropped) == (2, b"\1")


# Findable blocks ------------------------------------------------------------------------------------------------------


def test_published_block_is_found_and_stays_in_the_magazine(node: Node) -> None:
    """Others find the blocks that an engine publishes; the engine holds them, and its inventory has their keys."""
    blocks = node.publish(1, 2)

    found = reserve(node.cache, 3, prefix=keys(1, 2))

    assert found.device_hit_tokens == 8
    assert ids(found.block_ids)[:2] == ids(blocks)
    assert node.inventory().keys == keys(1, 2)
    assert list(records(node.cache).device.position[ids(blocks)]) == [0, 1]


def test_publish_tells_of_each_entry(node: Node) -> None:
    """A key of another block, a key named twice, a foreign block and a block named twice have answers of their own."""
    cached(node.cache, keys(1))
    a, b, e = ids(node.take(3))

    told = node.exchange(publish_blocks=packed(a, b, e, 7, a), publish_keys=keys(1, 2, 2, 3, 4))

    assert told.published == bytes([2, 1, 2, 3, 3])
    assert node.exchange(publish_blocks=packed(b), publish_keys=keys(9)).published == b"\3"


def test_publish_goes_the_way_of_a_commit() -> None:
    """A published block counts as committed, and is written through."""
    shape = {"write_policy": WritePolicy.WRITE_THROUGH, "uses_remote": True}
    node = Node(a_cache(16, 16, **shape)).attach(ENGINE)
    blocks = node.take(2)

    outcome = node.handle(publish_blocks=blocks, publish_keys=keys(1, 2))

    assert ids(the_copy(outcome).source_ids) == ids(blocks)
    assert node.cache.census().counters["blocks_committed"] == 2


def test_key_on_its_way_is_published_once() -> None:
    """What is published while a copy brings its key to the device serves, and what the copy brings does not."""
    node = Node(a_cache(4, 4)).attach(ENGINE)
    on_host(node.cache, keys(1))
    block = node.take(1)
    copy = the_copy(node.handle(hold_keys=keys(1), brings=True))

    assert node.exchange(publish_blocks=block, publish_keys=keys(1)).published == b"\1"
    land(node.cache, copy)
    assert ids(node.exchange(hold_keys=keys(1)).held_blocks) == ids(block)
    assert node.cache.check() == []


def test_retracted_block_is_private_and_not_found(node: Node) -> None:
    """A retracted block that nobody else holds becomes private again, and a lookup no longer finds it."""
    blocks = node.publish(1, 2)

    told = node.exchange(retract_blocks=blocks[:4] + packed(7) + blocks[:4])

    assert told.retracted == bytes([1, 3, 3])
    assert states(node.cache, blocks[:4]) == {State.RESERVED}
    assert reserve(node.cache, 1, prefix=keys(1)).device_hit_tokens == 0
    assert node.exchange(publish_blocks=blocks[:4], publish_keys=keys(5)).published == b"\1"


def test_block_that_others_hold_is_not_retracted(node: Node) -> None:
    """A block that a lease, a pin or another magazine holds is not retracted."""
    blocks = node.publish(1)
    lease = reserve(node.cache, 2, prefix=keys(1))

    assert node.exchange(retract_blocks=blocks).retracted == b"\2"
    node.cache.handle(c.Release(worker_id=WORKER, lease_id=lease.lease_id), 0.0)
    assert node.exchange(retract_blocks=blocks).retracted == b"\1"


def test_dropped_findable_block_stays_cached(node: Node) -> None:
    """A dropped findable block stays cached until it is evicted, the last block of its chain first."""
    blocks = node.publish(1, 2, 3)

    node.exchange(drop_blocks=blocks)

    assert states(node.cache, blocks) == {State.READY}
    assert [*node.cache._state.device.order] == ids(blocks)[::-1]


# Holding --------------------------------------------------------------------------------------------------------------


def test_held_key_is_held_once(node: Node) -> None:
    """However often a key is held, its block is in the magazine once, and one drop lets go of it."""
    blocks = cached(node.cache, keys(1, 2))

    told = node.exchange(hold_keys=keys(1, 1, 2))

    assert ids(told.held_blocks) == [blocks[0], blocks[0], blocks[1]]
    assert node.exchange(hold_keys=keys(2)).held_blocks == packed(blocks[1])
    assert node.exchange(drop_blocks=packed(*blocks)).dropped == b"\1\1"
    assert not node.cache._state.device.holds.any()


@pytest.mark.parametrize(("stops", "third"), [(True, -1), (False, 1)], ids=["stops", "goes on"])
def test_miss_ends_holding_where_it_should(node: Node, *, stops: bool, third: int) -> None:
    """A key that is in no tier is -1, and so are those behind it if the exchange stops at a miss."""
    blocks = cached(node.cache, keys(1, 2))

    told = node.exchange(hold_keys=keys(1, 9, 2), stops_at_miss=stops)

    assert ids(told.held_blocks) == [blocks[0], -1, -1 if third < 0 else blocks[1]]


def test_other_tenants_block_is_not_held(node: Node) -> None:
    """A key of another tenant's block is -1."""
    node.attach(FOREIGN).publish(1, worker_id=FOREIGN)

    assert ids(node.exchange(hold_keys=keys(1)).held_blocks) == [-1]


def test_hold_counts_as_a_hit() -> None:
    """If blocks are copied down after some hits, each hold counts as a hit."""
    policy = {"write_policy": WritePolicy.AFTER_N_HITS, "write_after_hits": 1}
    node = Node(a_cache(**policy)).attach(ENGINE)
    blocks = cached(node.cache, keys(1))

    assert ids(the_copy(node.handle(hold_keys=keys(1))).source_ids) == blocks


def test_key_below_is_brought_where_that_is_wanted(node: Node) -> None:
    """A key in a lower tier alone is -2; with `brings` one copy brings it up, and a later exchange holds it."""
    on_host(node.cache, keys(1, 2))
    assert ids(node.exchange(hold_keys=keys(1)).held_blocks) == [-2]

    outcome = node.handle(hold_keys=keys(1, 2, 1), brings=True)
    again = node.handle(hold_keys=keys(1, 2), brings=True)
    land(node.cache, the_copy(outcome))

    assert ids(answer(outcome, Exchanged).held_blocks) == [-2, -2, -2]
    assert (ids(answer(again, Exchanged).held_blocks), copies(again)) == ([-2, -2], [])
    assert min(ids(node.exchange(hold_keys=keys(1, 2)).held_blocks)) >= 0


def test_whole_chain_is_brought_behind_the_first_miss(node: Node) -> None:
    """An exchange that stops at a miss tells cached keys behind it as -2, up to the first key that is in no tier."""
    on_host(node.cache, keys(2))
    blocks = cached(node.cache, keys(1, 3))
    node.handle(hold_keys=b"")

    outcome = node.handle(hold_keys=keys(1, 2, 3, 9, 3), stops_at_miss=True, brings=True)

    assert ids(answer(outcome, Exchanged).held_blocks) == [blocks[0], -2, -2, -1, -1]
    assert len(ids(the_copy(outcome).target_ids)) == 1


def test_nothing_is_brought_under_keys_of_another_tenants_blocks(node: Node) -> None:
    """A key that another tenant has on the device, which stole it, is a miss: no second block can come under it."""
    on_host(node.cache, keys(1, 2))
    committed(node.cache, keys(1), worker_id=STRANGER)

    outcome = node.handle(hold_keys=keys(1, 2), brings=True)

    assert ids(answer(outcome, Exchanged).held_blocks) == [-1, -2]
    assert len(ids(the_copy(outcome).target_ids)) == 1


def test_nothing_is_brought_without_room() -> None:
    """As many keys are brought up as there is room for."""
    node = Node(a_cache(2, 4)).attach(ENGINE, FOREIGN)
    on_host(node.cache, keys(1, 2))
    node.take(1)

    assert len(ids(the_copy(node.handle(hold_keys=keys(1, 2), brings=True)).target_ids)) == 1
    assert copies(node.handle(hold_keys=keys(2), brings=True)) == []


def test_nothing_is_brought_while_blocks_are_scrubbed() -> None:
    """Free blocks with another tenant's bytes are scrubbed before keys are brought up to them."""
    node = Node(a_cache(4)).attach(ENGINE)
    cached(node.cache, keys(5, 6, 7), worker_id=STRANGER)
    on_host(node.cache, keys(1))
    land(node.cache, the_copy(node.cache.handle(c.Evict(num_blocks=3), 0.0)))
    node.take(1)

    outcome = node.handle(hold_keys=keys(1), brings=True)

    assert ids(answer(outcome, Exchanged).held_blocks) == [-2]
    assert [one.direction for one in copies(outcome)] == [Direction.SCRUB]


def test_magazine_takes_over_all_that_is_found(node: Node) -> None:
    """With holds_all a magazine holds all findable blocks of its tenant, the coldest first, except those in use."""
    node.attach(FOREIGN)
    first = cached(node.cache, keys(1))
    second = cached(node.cache, keys(2))
    used = ids(reserve(node.cache, 1, "other").block_ids)

    told = node.exchange(holds_all=True)

    assert ids(told.held_all_blocks) == first + second
    assert told.held_all_keys == keys(1, 2)
    assert not set(used) & set(ids(node.inventory().blocks))
    assert node.exchange(SECOND, holds_all=True).held_all_keys == keys(1, 2)


def test_one_of_several_magazines_cannot_hold_all(node: Node) -> None:
    """While another magazine has blocks, holds_all is refused, and nothing of the exchange is carried out."""
    node.attach(OTHER).take(1, OTHER)

    with pytest.raises(WrongStateError, match="1 block, so"):
        node.handle(holds_all=True, take_running=1)

    assert node.inventory().blocks == b""


# Sequences and columns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [0, 1, 3], ids=["before", "again", "beyond"])
def test_exchange_out_of_sequence_changes_nothing(node: Node, sequence: int) -> None:
    """An exchange that repeats or skips a sequence is refused as stale, and changes nothing."""
    node.exchange()
    command = c.Exchange(worker_id=SECOND, sequence=sequence, take_running=1)

    with pytest.raises(IdReusedError, match="inventory") as refused:
        node.cache.handle(command, 0.0)

    assert (refused.value.rule, refused.value.need) == ("sequence", 2)
    assert node.inventory().blocks == b""


@pytest.mark.parametrize(
    "columns",
    [
        {"publish_blocks": b"123"},
        {"retract_blocks": b"12345"},
        {"drop_blocks": b"1"},
        {"hold_keys": bytes(31)},
        {"publish_blocks": packed(1), "publish_keys": bytes(64)},
        {"publish_keys": bytes(32)},
        {"publish_blocks": packed(1), "publish_keys": bytes(32), "publish_positions": bytes(8)},
        {"publish_positions": bytes(4)},
        {"publish_blocks": packed(1, 2), "publish_keys": keys(1, 0)},
    ],
    ids=" ".join,
)
def test_torn_columns_change_nothing(node: Node, columns: dict[str, bytes]) -> None:
    """Columns that are torn, or do not fit each other, are refused, and the sequence is not used up."""
    with pytest.raises(InvalidError):
        node.handle(**columns, take_running=1)

    assert (node.inventory().sequence, node.inventory().blocks) == (0, b"")


def test_worker_without_a_magazine_exchanges_nothing(node: Node) -> None:
    """A worker that attached without a magazine is told that it has none."""
    with pytest.raises(WrongStateError, match="without a magazine"):
        node.cache.handle(c.Inventory(worker_id=WORKER), 0.0)


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [c.Detach, c.WorkerDied])
def test_magazine_ends_with_its_last_process(node: Node, end: type[c.Detach]) -> None:
    """Only when the last process ends, private blocks are free and findable ones can be evicted."""
    private, ready = node.take(1), node.publish(1, 2)

    node.cache.handle(end(worker_id=SECOND), 0.0)
    assert states(node.cache, private) == {State.RESERVED}
    node.cache.handle(end(worker_id=ENGINE), 0.0)

    assert node.cache.check() == []
    assert (states(node.cache, private), states(node.cache, ready)) == ({State.FREE}, {State.READY})
    assert [*node.cache._state.device.order] == ids(ready)[::-1]
    assert len(node.cache._state.magazines) == 0


def test_time_ends_no_magazine(node: Node) -> None:
    """A magazine whose engine is stopped keeps its blocks, however long."""
    blocks = node.take(2)

    node.cache.handle(c.Tick(), 1e6)

    assert node.inventory().blocks == blocks


def test_there_are_no_more_magazines_than_places() -> None:
    """One magazine too many is refused, and leaves nothing behind; another process of a present one is not."""
    node = Node(a_cache())
    for number in range(MAGAZINES_MAX):
        attach = c.Attach(worker_id=WorkerId(100 + number), tenant_digest=7, magazine=number + 100)
        node.cache.handle(attach, 0.0)

    with pytest.raises(BusyError, match="32 magazines"):
        node.attach(ENGINE)
    same = c.Attach(worker_id=WorkerId(500), tenant_digest=7, magazine=105)
    node.cache.handle(same, 0.0)

    assert node.cache.check() == []
    assert repr(node.cache._state.magazines) == "<MagazineBook 32 of 32 magazines>"


def test_place_of_an_ended_magazine_is_given_again(node: Node) -> None:
    """A new magazine gets the first free place, with no blocks and no exchanges."""
    node.attach(OTHER).take(2)
    for one in (ENGINE, SECOND):
        node.cache.handle(c.WorkerDied(worker_id=one), 0.0)

    node.attach(FOREIGN)

    assert node.cache._state.magazines.of(FOREIGN).place == 0
    assert (node.inventory(FOREIGN).sequence, node.inventory(FOREIGN).blocks) == (0, b"")


# Restarts -------------------------------------------------------------------------------------------------------------


def test_magazine_with_a_living_process_survives_a_restart(node: Node) -> None:
    """One living process is enough: private blocks stay private, findable ones held, and the sequence goes on."""
    private, ready = node.take(2), node.publish(1)
    sequence = node.inventory().sequence

    node.restart(SECOND)

    told = node.inventory(SECOND)
    assert (set(ids(told.blocks)), told.sequence) == ({*ids(private), *ids(ready)}, sequence)
    assert states(node.cache, private) == {State.RESERVED}
    assert node.exchange(SECOND, drop_blocks=private + ready).dropped == bytes([1, 1, 1])


def test_magazine_of_the_dead_does_not_survive_a_restart(node: Node) -> None:
    """The private blocks are free; the findable ones are lost, for nobody knows what was written to them meanwhile."""
    private, ready = node.take(1), node.publish(1, 2)
    node.attach(OTHER).exchange(OTHER, hold_keys=keys(2))

    node.restart(OTHER)

    assert states(node.cache, private + ready[:4]) == {State.FREE}
    assert states(node.cache, ready[4:]) == {State.READY}
    assert node.inventory(OTHER).keys == keys(2)


@pytest.mark.parametrize("speaks", [True, False], ids=["vouched for", "not vouched for"])
def test_only_what_was_vouched_for_since_a_restart_stays_cached(
    node: Node, *, speaks: bool
) -> None:
    """If a magazine ends before its first exchange after a restart, its findable blocks are lost."""
    ready = node.publish(1)
    node.restart(ENGINE)
    if speaks:
        node.inventory()

    node.cache.handle(c.WorkerDied(worker_id=ENGINE), 0.0)

    assert states(node.cache, ready) == {State.READY if speaks else State.FREE}
    assert node.cache.check() == []


def test_block_in_two_magazines_is_believed_only_if_findable(node: Node) -> None:
    """A crash may leave impossible bits, private in two magazines or of a free block; they are not believed."""
    node.attach(OTHER)
    shared, private = node.publish(1), node.take(1)
    node.exchange(OTHER, hold_keys=keys(1))
    held_by = records(node.cache).magazines.held_by
    held_by[ids(private)] |= 2
    held_by[7] |= 1

    node.restart(ENGINE, OTHER)

    assert states(node.cache, private) == {State.FREE}
    assert node.inventory().blocks == node.inventory(OTHER).blocks == shared


def test_private_block_of_a_magazine_is_in_no_lease_after_a_restart(node: Node) -> None:
    """A lease's row that lists a private block of a magazine is not believed."""
    private = node.take(1)
    lease = reserve(node.cache, 1)
    records(node.cache).rows.block_ids[lease.row, 0] = ids(private)[0]

    node.restart(ENGINE, WORKER)

    assert not node.cache.has_lease(lease.lease_id)
    assert node.inventory().blocks == private


def test_null_block_is_in_no_magazine() -> None:
    """A magazine's bit for a null block is not believed."""
    node = Node(a_cache(null_blocks=1)).attach(ENGINE)
    records(node.cache).magazines.held_by[0] = 1
    records(node.cache).device.state[0] = State.RESERVED

    node.restart(ENGINE)

    assert node.inventory().blocks == b""


# Fair shares ----------------------------------------------------------------------------------------------------------


def _two_engines() -> Node:
    """Return a node whose first engine has more than its share, and whose second one is short."""
    node = Node(a_cache()).attach(ENGINE, OTHER)
    node.take(7)
    node.exchange(OTHER, take_new=3)
    blocks = ids(node.inventory().blocks)
    node.exchange(drop_blocks=packed(*blocks[:3]))
    return node


def test_nobody_goes_above_its_share_while_another_is_short() -> None:
    """Free blocks are left to a magazine below its share that got fewer than it wanted."""
    node = _two_engines()

    assert node.exchange(take_new=2).taken_blocks == b""
    assert len(ids(node.exchange(OTHER, take_new=3).taken_blocks)) == 3


def test_up_to_its_share_a_magazine_gets_new_blocks() -> None:
    """A magazine below its share gets the blocks up to it, or none of a request for all or nothing that is larger."""
    node = _two_engines()
    node.exchange(drop_blocks=packed(ids(node.inventory().blocks)[0]))

    assert node.exchange(take_new=2, all_or_nothing=True).taken_blocks == b""
    assert len(ids(node.exchange(take_new=2).taken_blocks)) == 1


def test_running_requests_go_above_the_share() -> None:
    """Blocks for running requests are given even if another magazine is short."""
    node = _two_engines()

    assert len(ids(node.exchange(take_running=2).taken_blocks)) == 2


def test_shortness_is_forgotten() -> None:
    """A short magazine that does not ask again, or asks for less, does not keep others waiting."""
    node = _two_engines()
    assert len(ids(node.exchange(now=SHORT_SECONDS, take_new=1).taken_blocks)) == 1

    node = _two_engines()
    node.exchange(OTHER)
    assert len(ids(node.exchange(take_new=1).taken_blocks)) == 1


def test_who_wants_all_of_more_than_its_share_holds_nobody_up() -> None:
    """A magazine that asks for all or nothing, beyond its share, gets nothing, and does not keep others waiting."""
    node = _two_engines()
    assert node.exchange(OTHER, take_new=7, all_or_nothing=True).taken_blocks == b""
    assert len(ids(node.exchange(take_new=1).taken_blocks)) == 1

    node = Node(a_cache()).attach(ENGINE, OTHER)
    blocks = ids(node.take(7))
    assert node.exchange(OTHER, take_new=3, all_or_nothing=True).taken_blocks == b""
    node.exchange(drop_blocks=packed(*blocks[:2]))
    assert node.exchange(take_new=1).taken_blocks == b""


def test_who_has_what_its_tenant_may_have_holds_nobody_up() -> None:
    """A magazine that is short only because of its tenant's maximum does not keep others waiting."""
    node = Node(a_cache(tenants={OTHER_TENANT: TenantLimits(max_blocks=2)}))
    node.attach(ENGINE, FOREIGN).take(4)

    assert len(ids(node.exchange(FOREIGN, take_new=3).taken_blocks)) == 2
    assert len(ids(node.exchange(take_new=2).taken_blocks)) == 2


def test_calls_that_wait_come_before_new_requests(node: Node) -> None:
    """While a call waits for blocks, no magazine takes any for new requests."""
    blocks = node.take(6)
    waiting = c.Reserve(worker_id=WORKER, request_id="r", keys=b"", num_tokens=16, wait_ms=1_000)
    node.cache.handle(waiting, 0.0)

    assert node.exchange(take_new=1).taken_blocks == b""
    assert len(ids(node.exchange(take_running=1).taken_blocks)) == 1
    node.exchange(drop_blocks=blocks)
    assert node.cache.census().num_leases == 1


# Being seen -----------------------------------------------------------------------------------------------------------


def test_census_tells_what_magazines_have(node: Node) -> None:
    """The private and the findable blocks of each magazine are counted by place; the text of a magazine shows them."""
    node.attach(OTHER).take(2)
    node.publish(1)

    assert node.cache.census().magazines == ((0, 2, 1), (1, 0, 0))
    assert repr(node.cache._state.magazines.of(ENGINE)) == "<Magazine 0: 3 blocks, 2 processes>"


def test_magazines_are_listed(node: Node) -> None:
    """The list has each magazine's processes, blocks, exchanges and last exchange, of which a new life knows none."""
    node.attach(OTHER).take(2)
    node.publish(1)

    first, second = node.cache.list_magazines(5.0)
    assert (first.magazine_id, first.worker_ids) == (1, (ENGINE, SECOND))
    assert (first.num_private, first.num_held, first.sequence) == (2, 1, 3)
    assert (first.age_seconds, first.name, first.tenant_digest) == (5.0, 21, TENANT)
    assert (second.magazine_id, second.sequence, second.age_seconds) == (2, 0, None)
    assert node.restart(ENGINE).cache.list_magazines(9.0)[0].age_seconds is None


def test_keys_are_counted_by_what_became_of_them(node: Node) -> None:
    """Each time that a key is asked for, it counts as held or as missed."""
    node.publish(1, 2)

    node.exchange(hold_keys=keys(1, 2))
    node.exchange(hold_keys=keys(1, 9))

    counters = node.cache.census().counters
    assert (counters["magazine_keys_held"], counters["magazine_keys_missed"]) == (3, 1)


def test_keys_that_nobody_was_asked_for_are_counted_as_missed(node: Node) -> None:
    """Misses that the worker knew of by itself count as if it had asked; keys that are not whole are refused."""
    node.exchange(missed_keys=keys(1, 2, 3))

    assert node.cache.census().counters["magazine_keys_missed"] == 3
    with pytest.raises(InvalidError, match="missed_keys"):
        node.exchange(missed_keys=b"half a key")


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda book: book.held_by.__setitem__(7, 1), "neither private nor findable"),
        (lambda book: book.held_by.__setitem__(0, 3), "somewhere else"),
        (lambda book: book.held_by.__setitem__(0, 9), "magazine that does not exist"),
        (lambda book: book.held_by.__setitem__(0, 0), "blocks, but 2 are counted"),
        (lambda book: book.name.__setitem__(0, 5), "names in the records"),
    ],
    ids=["free", "twice", "nobody's", "lost", "misnamed"],
)
def test_broken_records_are_found(node: Node, break_it: Any, text: str) -> None:
    """Each damage to the records of magazines is noticed."""
    node.attach(OTHER).take(2)

    break_it(records(node.cache).magazines)

    assert any(text in found for found in node.cache.check())


def test_broken_books_are_found(node: Node) -> None:
    """Absent processes, magazines without processes, and blocks with another tenant's bytes are noticed."""
    blocks = node.take(1)
    records(node.cache).device.tenant[ids(blocks)] = OTHER_TENANT
    book = node.cache._state.magazines
    book.by_worker.pop(SECOND)
    assert {*node.cache.check()} >= {
        "magazine 0 has a block of another tenant",
        "the recorded processes of the magazines are not those that exist",
    }

    book.of(ENGINE).workers.clear()

    assert "a magazine has no process" in node.cache.check()


def test_lease_and_magazine_share_no_private_block(node: Node) -> None:
    """A private block of a magazine that a lease lists, too, is noticed."""
    block = ids(node.take(1))[0]
    lease = reserve(node.cache, 1)
    records(node.cache).rows.block_ids[lease.row, 0] = block

    assert any("somewhere else" in found for found in node.cache.check())


def test_refusal_says_what_magazines_have(node: Node) -> None:
    """The holdings of a refusal count the blocks in magazines, whoever else holds them."""
    from kvlease.errors import PoolFullError  # noqa: PLC0415

    node.take(4)
    node.publish(1)
    lease = reserve(node.cache, 2, prefix=keys(1))
    commit(node.cache, lease.lease_id, keys(1, 2))
    node.exchange(hold_keys=keys(2))

    with pytest.raises(PoolFullError) as refused:
        reserve(node.cache, 3, "second")

    told = {(one.owner, one.state): one.num_blocks for one in refused.value.holdings}
    assert told == {("you", "in_magazine"): 4, ("you", "leased"): 2, ("nobody", "free"): 2}
