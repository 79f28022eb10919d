"""Laws of evict, of leases and of cached blocks: blocks are free only once their bytes are safe."""

import pytest

from kvlease.errors import (
    DeadlineError,
    InvalidError,
    NeverFitsError,
    NotYoursError,
    PoolFullError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import commands as c
from kvleased.core.effects import Evicted, Notice, Reloaded, Tier
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
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
    reload,
    reloaded,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)

# Evict a lease --------------------------------------------------------------------------------------------------------


def test_evicted_lease_frees_its_blocks_when_its_bytes_are_safe() -> None:
    """The device's blocks are free only once the copies are done, and the caller is answered then."""
    cache = a_cache()
    lease = committed(cache, keys(1), more=2)

    outcome = evict(cache, lease.lease_id)
    assert cache.census().device["free"] == 5
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=3, num_offloaded=3)
    assert cache.census().device["free"] == 8
    assert found(cache, keys(1)) == (0, 1)


def test_blocks_of_an_evicted_lease_are_freed_behind_the_answer() -> None:
    """The answer says how many blocks leave; the next command finds them free, and their notice comes with it."""
    cache = a_cache()
    lease = committed(cache, keys(1), more=2)
    outcome = evict(cache, lease.lease_id)
    landed = land(cache, the_copy(outcome))
    assert woken(landed, outcome.ticket, Evicted).num_evicted == 3
    assert not cache.is_settled

    cache.settle()

    assert cache.is_settled
    assert cache.take_effects() == [Notice(kind="blocks_evicted", num_blocks=1)]
    assert cache.check() == []


def test_repeated_reserve_of_an_evicted_lease_covers_nothing_until_it_is_reloaded() -> None:
    """A repeated reserve of an evicted lease learns which lease it is, and that it has no blocks to compute into."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=2)

    repeated = reserve(cache, 3, "evicted")
    outcome = reload(cache, lease.lease_id)
    woken(land(cache, the_copy(outcome)), outcome.ticket, Reloaded)
    again = reserve(cache, 3, "evicted")

    assert (lease.covered_tokens, again.covered_tokens) == (12, 12)
    assert repeated.lease_id == again.lease_id == lease.lease_id
    assert (repeated.block_ids, repeated.covered_tokens) == (b"", 0)
    assert len(ids(again.block_ids)) == 3


def test_evict_counts_no_block_that_another_lease_has() -> None:
    """A block that two leases share stays when one of them is evicted, and the answer does not count it."""
    cache = a_cache()
    lease = committed(cache, keys(1), more=1)
    assert reserve(cache, 2, "other", keys(1)).device_hit_tokens

    outcome = evict(cache, lease.lease_id)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=1, num_offloaded=2)
    assert cache.check() == []
    assert cache.check() == []


def test_evicted_lease_is_evicted_already() -> None:
    """A second evict of a lease is answered, and does nothing."""
    cache = a_cache()
    lease = evicted(cache, keys(1))

    again = answer(evict(cache, lease.lease_id), Evicted)

    assert again == Evicted(num_evicted=0, num_offloaded=0)


def test_evict_copies_only_what_the_host_pool_lacks() -> None:
    """If the host pool has a slot for some bytes already, the lease shares it."""
    cache = a_cache()
    on_host(cache, keys(1))
    lease = committed(cache, keys(1, 2))

    outcome = evict(cache, lease.lease_id)
    landed = land(cache, the_copy(outcome))

    assert len(ids(the_copy(outcome).source_ids)) == 1
    assert woken(landed, outcome.ticket, Evicted).num_offloaded == 1
    assert cache.census().host["ready_held"] == 2


def test_evict_of_what_the_host_pool_has_is_answered_at_once() -> None:
    """An evict that needs no copy is answered at once."""
    cache = a_cache()
    on_host(cache, keys(1))
    lease = committed(cache, keys(1))

    reply = answer(evict(cache, lease.lease_id), Evicted)

    assert reply == Evicted(num_evicted=1, num_offloaded=0)
    assert cache.check() == []


def test_evict_leaves_blocks_that_others_hold() -> None:
    """A shared prefix stays on the device for its other leases."""
    cache = a_cache()
    first = committed(cache, keys(1), more=1)
    reserve(cache, 1, "second", keys(1))

    outcome = evict(cache, first.lease_id)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=1, num_offloaded=2)
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_two_leases_of_one_prefix_are_evicted_side_by_side() -> None:
    """If two leases have the same bytes, those of the second stay private to it, and both come back whole."""
    cache = a_cache()
    first = committed(cache, keys(1))
    second = reserve(cache, 1, "second", keys(1))
    outcomes = [evict(cache, lease.lease_id) for lease in (first, second)]

    for outcome in outcomes:
        land(cache, the_copy(outcome))

    assert cache.census().host["ready"] == cache.census().host["reserved"] == 1
    for lease in (first, second):
        outcome = reload(cache, lease.lease_id)
        assert len(ids(reloaded(land(cache, the_copy(outcome)), outcome.ticket).block_ids)) == 1
    assert cache.check() == []


def test_later_evict_waits_in_the_place_of_the_first() -> None:
    """A repeated evict starts no second copy; the first caller is told that it was replaced."""
    cache = a_cache()
    lease = reserve(cache, 1)
    first = evict(cache, lease.lease_id)

    second = evict(cache, lease.lease_id)
    landed = land(cache, the_copy(first))

    assert copies(second) == []
    woken(second, first.ticket, WrongStateError)
    woken(landed, second.ticket, Evicted)


def test_lease_that_cannot_fit_in_the_host_pool_is_refused_for_good() -> None:
    """A lease larger than the host pool is never evicted; the refusal has both numbers."""
    cache = a_cache(4, num_slots=2)
    lease = reserve(cache, 3)

    with pytest.raises(NeverFitsError, match="host_bytes") as refusal:
        evict(cache, lease.lease_id)

    assert (refusal.value.resource, refusal.value.need) == ("host_slots", 3)
    assert (refusal.value.available, refusal.value.limit) == (2, 2)


def test_lease_that_does_not_fit_now_is_refused_until_later() -> None:
    """If other leases hold the slots, the lease stays on the device, and its worker is told when to ask again."""
    cache = a_cache(8, num_slots=4)
    evicted(cache, keys(1, 2))
    lease = reserve(cache, 3)

    with pytest.raises(PoolFullError) as refusal:
        evict(cache, lease.lease_id)

    assert (refusal.value.resource, refusal.value.need) == ("host_slots", 3)
    assert (refusal.value.available, refusal.value.limit) == (2, 4)
    assert refusal.value.retry_after_ms == 50
    assert cache.check() == []


def test_refusal_counts_no_parked_slots() -> None:
    """Slots that a resize took out of use are none that a lease could be moved to."""
    cache = a_cache(8, num_slots=8)
    cache.handle(c.Resize(tier=Tier.HOST, num_blocks=4), 0.0)
    evicted(cache, keys(1, 2))
    lease = reserve(cache, 3)

    with pytest.raises(PoolFullError, match="2 of 4 can be used now") as refusal:
        evict(cache, lease.lease_id)

    assert (refusal.value.available, refusal.value.limit) == (2, 4)


def test_evicted_lease_pushes_cached_slots_out() -> None:
    """The slots of an evicted lease take precedence over cached ones that nobody holds."""
    cache = a_cache(4, num_slots=2)
    on_host(cache, keys(1, 2))
    lease = reserve(cache, 1)

    land(cache, the_copy(evict(cache, lease.lease_id)))

    assert found(cache, keys(1)) == (0, 1)
    assert found(cache, keys(2)) == (0, 0)
    assert cache.census().counters["host_evictions"] == 1
    assert cache.census().counters["blocks_dropped"] == 1


def test_evict_does_not_push_its_own_slots_out() -> None:
    """A slot that a lease's eviction shares is not dropped to make room for the same lease."""
    cache = a_cache(4, num_slots=2)
    on_host(cache, keys(1))
    on_host(cache, keys(2))
    lease = committed(cache, keys(1), more=1)

    land(cache, the_copy(evict(cache, lease.lease_id)))

    assert found(cache, keys(1)) == (0, 1)
    assert cache.check() == []


@pytest.mark.parametrize("phase", ["loading", "reloading"])
def test_lease_on_its_way_up_is_not_evicted(phase: str) -> None:
    """Only a lease on the device can be moved down."""
    cache = a_cache()
    if phase == "loading":
        on_host(cache, keys(1))
        cache.handle(a_reserve(1, "r", keys(1), wait_ms=WAIT_MS), 0.0)
        lease_id = LeaseId(leases_of(cache)[0])
    else:
        lease_id = evicted(cache, keys(1)).lease_id
        reload(cache, lease_id)

    with pytest.raises(WrongStateError, match=phase):
        evict(cache, lease_id)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c.Evict(worker_id=WORKER), id="nothing"),
        pytest.param(c.Evict(keys=keys(1), num_blocks=1), id="keys and a number"),
        pytest.param(
            c.Evict(worker_id=WORKER, lease_id=LeaseId(5), num_blocks=1), id="a lease too"
        ),
        pytest.param(c.Reload(worker_id=WORKER), id="reload nothing"),
        pytest.param(c.Reload(lease_id=LeaseId(5), keys=keys(1)), id="reload both"),
    ],
)
def test_move_names_one_thing(command: c.Evict | c.Reload) -> None:
    """A call moves exactly one thing, and the refusal names the choices."""
    with pytest.raises(InvalidError, match="exactly one of lease_id, keys"):
        a_cache().handle(command, 0.0)


@pytest.mark.parametrize("command", [c.Evict, c.Reload])
@pytest.mark.parametrize("worker_id", [MATE, None], ids=["another worker", "an operator"])
def test_lease_is_moved_by_its_owner_alone(
    command: type[c.Evict | c.Reload], worker_id: WorkerId | None
) -> None:
    """Neither another worker nor an operator moves a worker's lease."""
    cache = a_cache()
    lease = reserve(cache)

    with pytest.raises(NotYoursError):
        cache.handle(command(worker_id=worker_id, lease_id=lease.lease_id), 0.0)


@pytest.mark.parametrize("command", [c.Evict, c.Reload])
def test_unknown_lease_is_not_moved(command: type[c.Evict | c.Reload]) -> None:
    """A lease that has ended goes nowhere."""
    with pytest.raises(UnknownLeaseError):
        a_cache().handle(command(worker_id=WORKER, lease_id=LeaseId(5)), 0.0)


@pytest.mark.parametrize("command", [c.Evict(keys=b"x" * 33), c.Reload(keys=b"x" * 33)])
def test_ragged_keys_are_refused(command: c.Evict | c.Reload) -> None:
    """Keys that are not whole are refused."""
    with pytest.raises(InvalidError, match="multiple of 32"):
        a_cache().handle(command, 0.0)


# Evict cached blocks --------------------------------------------------------------------------------------------------


def test_coldest_blocks_are_evicted() -> None:
    """An evict of a number of blocks takes those that would leave next, and copies them first."""
    cache = a_full_cache(4)

    outcome = cache.handle(c.Evict(num_blocks=2), 0.0)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=2, num_offloaded=2)
    assert found(cache, keys(0, 1, 2, 3)) == (2, 2)
    assert cache.check() == []


def test_more_than_there_is_evicts_what_there_is() -> None:
    """An operator that asks for more blocks than are evictable gets all of those."""
    cache = a_full_cache(4)

    outcome = cache.handle(c.Evict(num_blocks=99), 0.0)

    assert len(ids(the_copy(outcome).source_ids)) == 4


def test_named_blocks_are_evicted_unless_they_are_held() -> None:
    """An evict by keys takes only the named blocks, except held and absent ones."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    committed(cache, keys(3))

    outcome = cache.handle(c.Evict(keys=keys(2, 3, 4, 2)), 0.0)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted).num_evicted == 1
    assert found(cache, keys(1, 2)) == (1, 1)
    assert found(cache, keys(3)) == (1, 0)


def test_evicting_nothing_is_answered_at_once() -> None:
    """If no block can leave, there is no wait."""
    reply = answer(a_cache().handle(c.Evict(num_blocks=3), 0.0), Evicted)

    assert reply == Evicted(num_evicted=0, num_offloaded=0)


def test_blocks_without_a_slot_are_dropped() -> None:
    """Blocks that the host pool cannot take leave all the same; the answer has both numbers."""
    cache = a_full_cache(4, num_slots=1)

    outcome = cache.handle(c.Evict(num_blocks=3), 0.0)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=3, num_offloaded=1)
    assert cache.census().counters["blocks_dropped"] == 2


def test_evict_without_a_host_pool_drops() -> None:
    """Without a host tier cached blocks are dropped at once."""
    cache = a_full_cache(4, num_slots=0)

    reply = answer(cache.handle(c.Evict(num_blocks=3), 0.0), Evicted)

    assert reply == Evicted(num_evicted=3, num_offloaded=0)


def test_block_that_is_taken_up_while_it_is_copied_stays() -> None:
    """A block that a lease takes up while it is copied out is not evicted."""
    cache = a_full_cache(2)
    outcome = cache.handle(c.Evict(num_blocks=2), 0.0)
    reserve(cache, 1, "r", keys(0))

    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=1, num_offloaded=2)
    assert found(cache, keys(0, 1)) == (1, 1)
    assert cache.check() == []


@pytest.mark.parametrize(
    ("command", "deadline"),
    [(c.Evict(num_blocks=1), 30.0), (c.Evict(num_blocks=1, wait_ms=500), 0.5)],
    ids=["by default", "as told"],
)
def test_eviction_is_waited_for_until_its_deadline(command: c.Evict, deadline: float) -> None:
    """A caller waits no longer than it asked; the copy goes on without it."""
    cache = a_full_cache(1)
    outcome = cache.handle(command, 0.0)

    assert wakes(tick(cache, deadline - 0.1)) == []
    woken(tick(cache, deadline), outcome.ticket, DeadlineError)

    assert wakes(land(cache, the_copy(outcome))) == []
    assert found(cache, keys(0)) == (0, 1)


def test_eviction_whose_caller_has_gone_goes_on() -> None:
    """A cancelled call is not answered, but its blocks leave all the same."""
    cache = a_full_cache(1)
    outcome = cache.handle(c.Evict(num_blocks=1), 0.0)
    assert outcome.ticket is not None

    cache.handle(c.Cancel(ticket=outcome.ticket), 0.0)

    assert wakes(land(cache, the_copy(outcome))) == []
    assert found(cache, keys(0)) == (0, 1)


def test_lease_whose_caller_has_gone_is_evicted_all_the_same() -> None:
    """A cancelled call does not stop the copies; a later call learns where the lease is."""
    cache = a_full_cache(8)
    reserve(cache, 1, "other")
    lease = reserve(cache, 1)
    outcome = evict(cache, lease.lease_id)
    cache.handle(c.Evict(num_blocks=1), 0.0)
    assert outcome.ticket is not None

    cache.handle(c.Cancel(ticket=outcome.ticket), 0.0)

    assert wakes(land(cache, the_copy(outcome))) == []
    assert answer(evict(cache, lease.lease_id), Evicted).num_evicted == 0


def test_lease_that_moves_for_too_long_is_told_and_moves_on() -> None:
    """After its deadline a caller cannot know where its lease is; the copies go on."""
    cache = a_cache()
    lease = reserve(cache, 1)
    outcome = evict(cache, lease.lease_id)

    woken(tick(cache, LEASE_SECONDS), outcome.ticket, DeadlineError)

    assert wakes(land(cache, the_copy(outcome))) == []
    assert reload(cache, lease.lease_id).ticket is not None
    assert cache.check() == []
