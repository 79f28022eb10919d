"""Laws of a restart: whole entries are believed, and all other blocks are free under a new generation."""

import numpy as np
import pytest

from kvlease.errors import IdReusedError
from kvlease.ids import Epoch, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.blocks.states import State
from kvleased.core.ids import Ids
from kvleased.core.lease.digests import asked_digest, request_digest
from kvleased.core.lease.kernel_table import KernelTable
from kvleased.core.lease.phases import MOVING, Phase
from kvleased.core.recovery import give_back_retired
from tests.unit.service.core.builders import (
    EPOCH,
    LEASE_SECONDS,
    MATE,
    OTHER_TENANT,
    SHAPE,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reserve,
    an_extend,
    cached,
    commit,
    committed,
    copies,
    evict,
    evicted,
    found,
    ids,
    keys,
    land,
    leases_of,
    on_host,
    records,
    reload,
    reload_keys,
    reloaded,
    reserve,
    states,
    the_copy,
    tick,
)

WORKERS = {WORKER: TENANT, MATE: TENANT, STRANGER: OTHER_TENANT}


def restarted(cache: Cache, workers: dict[WorkerId, int] | None = None) -> Cache:
    """Return the next life of a cache over the same records."""
    alive = WORKERS if workers is None else workers
    return Cache.recovered(cache.shape, records(cache), Epoch(EPOCH + 1), alive, 100.0)


# What is believed -----------------------------------------------------------------------------------------------------


def test_new_records_make_an_empty_cache() -> None:
    """Columns of zeros make a cache of free blocks."""
    cache = Cache.recovered(SHAPE, CacheRecords.plain(SHAPE), EPOCH, {}, 0.0)

    assert cache.census().device["free"] == SHAPE.num_blocks
    assert cache.check() == []


def test_leases_of_living_workers_go_on() -> None:
    """A lease keeps its id, row and blocks over a restart, and can be used at once."""
    cache = a_cache()
    lease = reserve(cache, 2)

    again = restarted(cache)

    repeated = reserve(again, 2)
    assert (repeated.lease_id, repeated.block_ids, repeated.row) == (
        lease.lease_id,
        lease.block_ids,
        lease.row,
    )
    again.handle(an_extend(lease.lease_id, 3), 100.0)
    assert again.check() == []


def test_repeated_request_is_told_of_its_prefix_after_a_restart() -> None:
    """A worker that never got the first answer must not compute, and overwrite, blocks that it shares with others."""
    cache = a_cache()
    committed(cache, keys(1, 2))
    lease = reserve(cache, 3, prefix=keys(1, 2))
    commit(cache, lease.lease_id, keys(1, 2, 3))

    repeated = reserve(restarted(cache), 3, prefix=keys(1, 2))

    assert (repeated.lease_id, repeated.device_hit_tokens) == (
        lease.lease_id,
        2 * TOKENS_PER_BLOCK,
    )


def test_leases_of_dead_workers_end() -> None:
    """The leases of a worker that died while the daemon was down end, for it writes no more."""
    cache = a_cache()
    reserve(cache, 2)
    other = reserve(cache, 1, worker_id=MATE)

    again = restarted(cache, {MATE: TENANT})

    assert leases_of(again, MATE) == [other.lease_id]
    assert again.census().device["free"] == 7
    assert again.check() == []


def test_cached_blocks_are_findable_again() -> None:
    """Committed blocks survive in both tiers, and each chain leaves from its end."""
    cache = a_cache(4)
    on_host(cache, keys(8, 9))
    cached(cache, keys(1, 2, 3))

    again = restarted(cache)

    assert found(again, keys(8, 9)) == (0, 2)
    assert found(again, keys(1, 2, 3)) == (3, 0)
    reserve(again, 2)
    assert found(again, keys(1, 2, 3)) == (2, 0)
    assert again.check() == []


def test_evicted_lease_can_be_reloaded() -> None:
    """A lease in the host pool is still there after a restart."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    cache.settle()

    again = restarted(cache)

    outcome = reload(again, lease.lease_id)
    assert reloaded(land(again, the_copy(outcome)), outcome.ticket).num_reloaded == 2
    assert again.check() == []


@pytest.mark.parametrize("phase", [Phase.EVICTING, Phase.RELOADING])
def test_lease_on_its_way_is_where_it_was(phase: Phase) -> None:
    """The mover died with the daemon, so a moving lease is where it was before."""
    cache = a_cache()
    if phase is Phase.EVICTING:
        lease = committed(cache, keys(1), more=1)
        evict(cache, lease.lease_id)
    else:
        lease = evicted(cache, keys(1), more=1)
        reload(cache, lease.lease_id)

    again = restarted(cache)

    assert leases_of(again) == [lease.lease_id]
    assert again.census().device["free"] + again.census().host["free"] == 14
    assert again.check() == []


def test_quarantined_lease_is_its_owners_again() -> None:
    """After a restart every lease has its whole lease time in which to be renewed."""
    cache = a_cache()
    lease = reserve(cache, 1)
    tick(cache, LEASE_SECONDS)

    again = restarted(cache)

    tick(again, 100.0 + LEASE_SECONDS - 1)
    assert states(again, lease.block_ids) == {State.RESERVED}
    assert again.check() == []


def test_retired_slot_is_free_again_in_another_container() -> None:
    """In another container's memory a retired slot is free again, and has no tenant's bytes."""
    cache = a_cache(num_blocks=4, num_slots=2)
    on_host(cache, keys(1))
    copy = the_copy(reload_keys(cache, keys(1)))
    land(cache, copy, failed=(0,))
    (slot,) = ids(copy.source_ids)
    assert records(cache).host.state[slot] == State.BAD
    generation = records(cache).host.generation[slot]

    give_back_retired(records(cache))
    again = restarted(cache)

    assert again.census().host["free"] == 2
    assert records(again).host.generation[slot] > generation
    assert again.check() == []


def test_retired_slot_stays_retired() -> None:
    """A slot that lost bytes once is not used after a restart either."""
    cache = a_cache()
    on_host(cache, keys(1))
    land(cache, the_copy(reload_keys(cache, keys(1))), failed=(0,))

    assert restarted(cache).census().host["bad"] == 1


# What is not ----------------------------------------------------------------------------------------------------------


def test_lease_that_was_loading_is_forgotten() -> None:
    """The worker of a loading lease never learned of it, and will ask again."""
    cache = a_cache()
    on_host(cache, keys(1))
    cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    again = restarted(cache)

    assert leases_of(again) == []
    assert again.census().device["free"] == 8
    assert found(again, keys(1)) == (0, 1)
    assert again.check() == []


def test_copies_in_flight_came_to_nothing() -> None:
    """Blocks that were being filled or scrubbed are free under a new generation."""
    cache = a_full_cache(2, num_slots=2)
    cache.handle(c.Evict(num_blocks=1), 0.0)
    target = int(np.flatnonzero(records(cache).host.state == State.FILLING)[0])

    again = restarted(cache)

    assert again.census().host["free"] == 2
    assert records(again).host.generation[target] == 1
    assert again.check() == []


def test_lost_copy_is_over() -> None:
    """The mover of the earlier life is dead, so the blocks of its lost copies are free."""
    cache = a_cache()
    on_host(cache, keys(1))
    copy = the_copy(reload_keys(cache, keys(1)))
    cache.handle(c.CopyLost(copy_id=copy.copy_id), 0.0)

    again = restarted(cache)

    assert again.census().device["free"] == 8
    assert again.check() == []


def test_pins_are_not_kept() -> None:
    """Pins end with the life of the daemon in which they were made."""
    cache = a_full_cache(2)
    cache.handle(c.Pin(keys=keys(0, 1)), 0.0)

    reserve(restarted(cache), 2)


def test_ids_of_the_earlier_life_are_not_issued_again() -> None:
    """Each life counts from its own epoch."""
    cache = a_cache()
    lease = reserve(cache, 1)

    again = restarted(cache)

    assert reserve(again, 1, "next").lease_id >> 20 == EPOCH + 1
    assert lease.lease_id >> 20 == EPOCH


def test_another_tenants_bytes_are_remembered() -> None:
    """A free block is scrubbed before it changes tenants, even if there is a restart in between."""
    cache = a_cache(1, num_slots=0)
    cached(cache, keys(1))

    again = restarted(cache)

    outcome = again.handle(a_reserve(1, worker_id=STRANGER, wait_ms=WAIT_MS), 0.0)
    assert len(copies(outcome)) == 1


# Records that a crash left half-written -------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["generation", "tenant", "checksum", "position", "key", "seal"])
def test_block_without_its_seal_is_not_believed(column: str) -> None:
    """An entry whose seal does not match is a miss, and its block is free under a new generation."""
    cache = a_cache()
    _, block = cached(cache, keys(1, 2))
    getattr(records(cache).device, column)[block] ^= 1
    before = records(cache).device.generation[block]

    again = restarted(cache)

    assert found(again, keys(1, 2)) == (1, 0)
    assert records(again).device.generation[block] == before + 1
    assert again.check() == []


def test_leased_block_without_its_seal_is_private() -> None:
    """A lease keeps a block whose commit was cut off, as a private one."""
    cache = a_cache()
    lease = committed(cache, keys(1, 2))
    records(cache).device.checksum[ids(lease.block_ids)[1]] ^= np.uint64(1)

    again = restarted(cache)

    assert found(again, keys(1, 2)) == (1, 0)
    assert states(again, lease.block_ids) == {State.READY, State.RESERVED}
    assert again.check() == []


def test_slot_without_its_seal_is_not_believed() -> None:
    """A slot whose seal does not match is a miss, too."""
    cache = a_cache()
    on_host(cache, keys(1))
    records(cache).host.checksum[:] ^= np.uint64(1)

    again = restarted(cache)

    assert found(again, keys(1)) == (0, 0)
    assert again.census().host["free"] == 8


def test_state_that_is_none_is_not_believed() -> None:
    """A block in an unknown state is free."""
    cache = a_cache()
    records(cache).device.state[3] = 77

    again = restarted(cache)

    assert again.census().device["free"] == 8
    assert again.check() == []


def test_key_is_found_at_one_block_only() -> None:
    """If a crash leaves two whole entries under one key, one of them is believed."""
    cache = a_cache()
    block, other = cached(cache, keys(1, 2))
    device = records(cache).device
    device.key[other] = device.key[block]
    device.position[other] = device.position[block]
    device.seal[other] = device.seal[block]

    again = restarted(cache)

    assert found(again, keys(1)) == (1, 0)
    assert again.census().device["free"] == 7
    assert again.check() == []


def test_keys_with_one_first_word_are_all_believed() -> None:
    """Keys that differ only in their last words are different keys."""
    cache = a_cache()
    alike = [number << 192 | 7 for number in (1, 2, 3)]
    cached(cache, keys(*alike))

    again = restarted(cache)

    assert found(again, keys(*alike)) == (3, 0)
    assert again.check() == []


@pytest.mark.parametrize("num_chains", [1, 4])
def test_chains_leave_deepest_blocks_first(num_chains: int) -> None:
    """After a restart the deepest blocks of all chains leave first, and those of equal depth by their ids."""
    cache = a_cache()
    chains = [[10 * chain + depth for depth in range(2)] for chain in range(1, num_chains + 1)]
    for chain in chains:
        cached(cache, keys(*chain))
    device = records(cache).device

    again = restarted(cache)

    in_order = sorted(
        np.flatnonzero(device.state == State.READY).tolist(),
        key=lambda block: (-int(device.position[block]), block),
    )
    assert list(again._state.device.order) == in_order


def test_block_in_two_rows_belongs_to_the_first() -> None:
    """If two rows name a private block, the first row has it, and the other row is not believed."""
    cache = a_cache()
    first, second = reserve(cache, 2, "a"), reserve(cache, 2, "b")
    rows = records(cache).rows
    rows.block_ids[second.row, 0] = rows.block_ids[first.row, 0]

    again = restarted(cache)

    assert leases_of(again) == [first.lease_id]
    assert again.census().device["free"] == 6
    assert again.check() == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param("phase", MOVING, id="being rewritten"),
        pytest.param("phase", Phase.LOADING, id="loading"),
        pytest.param("phase", 99, id="no phase"),
        pytest.param("worker_id", 99, id="unknown worker"),
        pytest.param("num_blocks", 0, id="no blocks"),
        pytest.param("num_blocks", -1, id="negative blocks"),
        pytest.param("block_ids", [0, 0], id="a block twice"),
        pytest.param("block_ids", [-1, 0], id="a block before the first"),
        pytest.param("block_ids", [0, 8], id="a block beyond the last"),
        pytest.param("block_ids", [0, 7], id="a free block"),
    ],
)
def test_half_written_row_is_not_believed(column: str, value: int | list[int]) -> None:
    """A row that no whole command writes is not believed, and its blocks are free."""
    cache = a_cache()
    lease = reserve(cache, 2)
    rows = records(cache).rows
    if isinstance(value, list):
        rows.block_ids[lease.row, :2] = value
    else:
        getattr(rows, column)[lease.row] = value

    again = restarted(cache)

    assert again.census().num_leases == 0
    assert again.census().device["free"] == 8
    assert not records(again).rows.lease_id.any()
    assert again.check() == []


def test_row_with_too_many_blocks_is_cut_to_its_width() -> None:
    """A row whose count is beyond its width names only as many blocks as it has places."""
    cache = a_cache(table_blocks=2)
    lease = reserve(cache, 2)
    records(cache).rows.num_blocks[lease.row] = 1000

    again = restarted(cache)

    assert again.census().num_leases == 1


def test_row_written_by_hand_is_a_lease() -> None:
    """A restart needs nothing to know a lease but its row and the states of its blocks."""
    written = CacheRecords.plain(SHAPE)
    written.device.state[[4, 2]] = State.RESERVED
    written.device.tenant[[4, 2]] = TENANT
    written.rows.block_ids[5, :2] = [4, 2]
    written.rows.num_blocks[5] = 2
    written.rows.num_tokens[5] = 8
    written.rows.worker_id[5] = WORKER
    written.rows.request_digest[5] = request_digest("request")
    written.rows.asked[5] = asked_digest(a_reserve(2, "request"))
    written.rows.phase[5] = Phase.ACTIVE
    written.rows.lease_id[5] = 77

    cache = Cache.recovered(SHAPE, written, EPOCH, WORKERS, 0.0)

    lease = reserve(cache, 2)
    assert (lease.lease_id, lease.row, ids(lease.block_ids)) == (77, 5, [4, 2])
    assert cache.check() == []


@pytest.mark.parametrize(("published", "expected"), [(0, 0), (1, 3)])
def test_row_is_published_whole_or_not_at_all(published: int, expected: int) -> None:
    """If a crash cut off the publication of an extended row, the whole row is published after the restart."""
    cache = a_cache()
    lease = reserve(cache, 3)
    records(cache).kernel_rows.num_published[lease.row, 0] = published

    again = restarted(cache)

    assert records(again).kernel_rows.num_published[lease.row, 0] == expected


def test_mapped_row_stays_mapped_while_the_daemon_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read during a recovery find every mapped lease mapped, and only the rows of no lease unmapped."""
    cache = a_cache()
    lease, gone = reserve(cache, 3), reserve(cache, 1, "gone", worker_id=MATE)
    records(cache).kernel_rows.num_published[[lease.row, gone.row], 0] = 3, 1
    reset, seen = KernelTable.reset, list[bool]()

    def watched(self: KernelTable, rows: Ids) -> None:
        reset(self, rows)
        seen.extend(self.published(np.array([lease.row, gone.row])).tolist())

    monkeypatch.setattr(KernelTable, "reset", watched)
    restarted(cache, {WORKER: TENANT})

    assert seen == [True, False]


def test_request_that_asks_for_something_else_is_refused_after_a_restart() -> None:
    """A request id that is used again for other tokens does not get the blocks of the first request."""
    cache = a_cache()
    committed(cache, keys(1, 2))
    lease = reserve(cache, 2, "request", keys(1, 2))
    again = restarted(cache)

    with pytest.raises(IdReusedError):
        reserve(again, 2, "request", keys(3, 4))

    assert reserve(again, 2, "request", keys(1, 2)).lease_id == lease.lease_id
    assert again.check() == []
