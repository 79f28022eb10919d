"""Laws of evict and reload, of leases and of cached blocks: bytes move, and nothing is lost on the way."""

import pytest

from kvlease.errors import (
    CopyFailedError,
    DeadlineError,
    InvalidError,
    NeverFitsError,
    NotYoursError,
    PoolFullError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Evicted, Outcome, Reloaded, Reserved
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reload,
    a_reserve,
    answer,
    cached,
    committed,
    copies,
    evict,
    evicted,
    fail,
    found,
    ids,
    keys,
    land,
    leases_of,
    on_host,
    records,
    release,
    reload,
    reload_keys,
    reloaded,
    reserve,
    the_copy,
    tick,
    wakes,
    woken,
)

# Evict a lease --------------------------------------------------------------------------------------------------------


def test_evicted_lease_frees_its_blocks_when_its_bytes_are_safe() -> None:
    """The device's blocks are free only when the copies are done; then the caller is answered."""
    cache = a_cache()
    lease = committed(cache, keys(1), more=2)

    outcome = evict(cache, lease.lease_id)
    assert cache.census().device["free"] == 5
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=3, num_offloaded=3)
    assert cache.census().device["free"] == 8
    assert found(cache, keys(1)) == (0, 1)
    assert cache.check() == []


def test_evicted_lease_is_evicted_already() -> None:
    """To evict once more is an answered no-op."""
    cache = a_cache()
    lease = evicted(cache, keys(1))

    again = answer(evict(cache, lease.lease_id), Evicted)

    assert again == Evicted(num_evicted=0, num_offloaded=0)


def test_evict_copies_only_what_the_host_pool_lacks() -> None:
    """Bytes that have a slot already are shared with it."""
    cache = a_cache()
    on_host(cache, keys(1))
    lease = committed(cache, keys(1, 2))

    outcome = evict(cache, lease.lease_id)
    landed = land(cache, the_copy(outcome))

    assert len(ids(the_copy(outcome).source_ids)) == 1
    assert woken(landed, outcome.ticket, Evicted).num_offloaded == 1
    assert cache.census().host["ready_held"] == 2


def test_evict_of_what_the_host_pool_has_is_answered_at_once() -> None:
    """Without anything to copy there is nothing to wait for."""
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
    """The bytes that come second stay private to their lease, and both leases come back whole."""
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
    """A repeated evict does not copy twice; the first caller is told."""
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
    """When other leases hold the slots, the lease stays on the device and its worker is told when to ask again."""
    cache = a_cache(8, num_slots=4)
    evicted(cache, keys(1, 2))
    lease = reserve(cache, 3)

    with pytest.raises(PoolFullError) as refusal:
        evict(cache, lease.lease_id)

    assert (refusal.value.resource, refusal.value.need) == ("host_slots", 3)
    assert (refusal.value.available, refusal.value.limit) == (2, 4)
    assert refusal.value.retry_after_ms == 50
    assert cache.check() == []


def test_evicted_lease_pushes_cached_slots_out() -> None:
    """A running request's bytes are worth more than cached ones that nobody holds."""
    cache = a_cache(4, num_slots=2)
    on_host(cache, keys(1, 2))
    lease = reserve(cache, 1)

    land(cache, the_copy(evict(cache, lease.lease_id)))

    assert found(cache, keys(1)) == (0, 1)
    assert found(cache, keys(2)) == (0, 0)
    assert cache.census().counters["host_evictions"] == 1
    assert cache.census().counters["blocks_dropped"] == 1


def test_evict_does_not_push_its_own_slots_out() -> None:
    """A slot that a lease's eviction shares is not dropped to make room for the same eviction."""
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
    """Exactly one thing is moved by a call, and the refusal names the choices."""
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
    """Keys are whole."""
    with pytest.raises(InvalidError, match="multiple of 32"):
        a_cache().handle(command, 0.0)


# Evict cached blocks --------------------------------------------------------------------------------------------------


def test_coldest_blocks_are_evicted() -> None:
    """A number of blocks takes those that would have left next, and copies them first."""
    cache = a_full_cache(4)

    outcome = cache.handle(c.Evict(num_blocks=2), 0.0)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted) == Evicted(num_evicted=2, num_offloaded=2)
    assert found(cache, keys(0, 1, 2, 3)) == (2, 2)
    assert cache.check() == []


def test_more_than_there_is_evicts_what_there_is() -> None:
    """An operator who asks for more than is evictable gets all of that."""
    cache = a_full_cache(4)

    outcome = cache.handle(c.Evict(num_blocks=99), 0.0)

    assert len(ids(the_copy(outcome).source_ids)) == 4


def test_named_blocks_are_evicted_unless_they_are_held() -> None:
    """Keys take just their own blocks, and none that somebody uses or that are not there."""
    cache = a_cache()
    cached(cache, keys(1, 2))
    committed(cache, keys(3))

    outcome = cache.handle(c.Evict(keys=keys(2, 3, 4, 2)), 0.0)
    landed = land(cache, the_copy(outcome))

    assert woken(landed, outcome.ticket, Evicted).num_evicted == 1
    assert found(cache, keys(1, 2)) == (1, 1)
    assert found(cache, keys(3)) == (1, 0)


def test_evicting_nothing_is_answered_at_once() -> None:
    """Where nothing can leave, nothing is waited for."""
    reply = answer(a_cache().handle(c.Evict(num_blocks=3), 0.0), Evicted)

    assert reply == Evicted(num_evicted=0, num_offloaded=0)


def test_blocks_without_a_slot_are_dropped() -> None:
    """What the host pool cannot take leaves all the same, and both numbers are told."""
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
    """A block that a lease comes to hold during its eviction is not taken from it."""
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
    """A caller does not wait longer than told; the copy goes on without it."""
    cache = a_full_cache(1)
    outcome = cache.handle(command, 0.0)

    assert wakes(tick(cache, deadline - 0.1)) == []
    woken(tick(cache, deadline), outcome.ticket, DeadlineError)

    assert wakes(land(cache, the_copy(outcome))) == []
    assert found(cache, keys(0)) == (0, 1)


def test_eviction_whose_caller_has_gone_goes_on() -> None:
    """A cancelled call is not answered, and its blocks leave all the same."""
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
    """After its deadline a caller does not know where its lease is; the copies go on."""
    cache = a_cache()
    lease = reserve(cache, 1)
    outcome = evict(cache, lease.lease_id)

    woken(tick(cache, LEASE_SECONDS), outcome.ticket, DeadlineError)

    assert wakes(land(cache, the_copy(outcome))) == []
    assert reload(cache, lease.lease_id).ticket is not None
    assert cache.check() == []


# Reload a lease -------------------------------------------------------------------------------------------------------


def test_reloaded_lease_has_its_bytes_in_token_order() -> None:
    """A lease comes back to blocks that follow its slots in their order."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2), more=1)
    outcome = reload(cache, lease.lease_id)

    reply = reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert ids(reply.block_ids) == ids(the_copy(outcome).target_ids)
    assert (reply.num_reloaded, reply.num_tokens, reply.row) == (
        3,
        3 * TOKENS_PER_BLOCK,
        lease.row,
    )
    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.census().host["free"] == 6
    assert cache.check() == []


def test_reload_uses_what_is_on_the_device() -> None:
    """Blocks that came back meanwhile are shared, not copied again."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1))))

    outcome = reload(cache, lease.lease_id)
    reply = reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert (reply.num_reloaded, len(ids(reply.block_ids))) == (1, 2)
    assert cache.check() == []


def test_reload_of_what_is_all_on_the_device_is_answered_at_once() -> None:
    """Without anything to copy there is nothing to wait for."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1, 2))))

    reply = answer(reload(cache, lease.lease_id), Reloaded)

    assert (reply.num_reloaded, len(ids(reply.block_ids))) == (0, 2)
    assert cache.check() == []


def test_reload_joins_copies_in_flight() -> None:
    """A lease comes back when its own copy and those that it joined are done."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    prefetch = reload_keys(cache, keys(1))
    outcome = reload(cache, lease.lease_id)

    own = land(cache, the_copy(outcome))
    joined = land(cache, the_copy(prefetch))

    assert outcome.ticket not in wakes(own)
    assert len(ids(reloaded(joined, outcome.ticket).block_ids)) == 2
    assert cache.check() == []


def test_reload_of_a_lease_on_the_device_names_its_blocks() -> None:
    """A worker that does not know whether its lease was evicted may ask for it."""
    cache = a_cache()
    lease = reserve(cache, 2)

    reply = answer(reload(cache, lease.lease_id), Reloaded)

    assert (reply.block_ids, reply.num_reloaded) == (lease.block_ids, 0)


def test_later_reload_waits_in_the_place_of_the_first() -> None:
    """A repeated reload does not copy twice; the first caller is told."""
    cache = a_cache()
    lease = evicted(cache, keys(1))
    first = reload(cache, lease.lease_id)

    second = reload(cache, lease.lease_id)
    landed = land(cache, the_copy(first))

    assert copies(second) == []
    woken(second, first.ticket, WrongStateError)
    reloaded(landed, second.ticket)


def test_reload_while_evicting_is_refused() -> None:
    """A lease goes one way at a time."""
    cache = a_cache()
    lease = reserve(cache, 1)
    evict(cache, lease.lease_id)

    with pytest.raises(WrongStateError, match="evicting"):
        reload(cache, lease.lease_id)


def test_reload_waits_for_room() -> None:
    """A lease comes back when there are blocks for it, not sooner."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2))
    other = reserve(cache, 3, "other")
    outcome = reload(cache, lease.lease_id)

    released = release(cache, other.lease_id)
    landed = land(cache, the_copy(released))

    assert copies(outcome) == []
    reloaded(landed, outcome.ticket)


def test_impatient_reload_without_room_is_refused() -> None:
    """A reload that may not wait for room is told what it lacked."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2))
    reserve(cache, 3, "other")

    with pytest.raises(PoolFullError) as refusal:
        cache.handle(a_reload(lease.lease_id, wait_ms=0), 0.0)

    assert (refusal.value.need, refusal.value.available) == (2, 1)


def test_reload_writes_back_what_it_pushes_out() -> None:
    """A lease that comes back costs nobody cached bytes."""
    cache = a_cache(2)
    lease = evicted(cache, keys(1, 2))
    cached(cache, keys(3, 4))
    outcome = reload(cache, lease.lease_id)

    written = land(cache, the_copy(outcome))
    landed = land(cache, the_copy(written))

    reloaded(landed, outcome.ticket)
    assert found(cache, keys(3, 4)) == (0, 2)
    assert cache.check() == []


def test_reload_does_not_evict_its_own_blocks() -> None:
    """Blocks that the lease will share are no room for its other blocks."""
    cache = a_cache(2)
    lease = evicted(cache, keys(1, 2))
    land(cache, the_copy(reload_keys(cache, keys(1))))
    reserve(cache, 1, "other")

    with pytest.raises(PoolFullError):
        cache.handle(a_reload(lease.lease_id, wait_ms=0), 0.0)

    assert found(cache, keys(1)) == (1, 0)


def test_reload_renews_its_lease() -> None:
    """A lease that came back has its whole lease time before it."""
    cache = a_cache()
    lease = evicted(cache, keys(1))
    copy = the_copy(cache.handle(a_reload(lease.lease_id), 20.0))

    land(cache, copy, now=25.0)
    tick(cache, 25.0 + LEASE_SECONDS - 1)

    assert "leases_expired" not in cache.census().counters


# Reload cached blocks -------------------------------------------------------------------------------------------------


def test_named_blocks_come_back_for_whoever_asks_next() -> None:
    """Keys in the host pool are brought to the device and held by nobody there."""
    cache = a_cache()
    on_host(cache, keys(1, 2))

    outcome = reload_keys(cache, keys(1, 2, 1))
    reply = reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert reply.num_reloaded == 2
    assert found(cache, keys(1, 2)) == (2, 0)
    assert cache.census().device["ready_held"] == 0


@pytest.mark.parametrize("where", ["nowhere", "on the device", "on their way"])
def test_blocks_that_need_no_copy_are_not_copied(where: str) -> None:
    """Keys that are unknown, on the device or on their way are answered at once."""
    cache = a_cache()
    if where == "on the device":
        cached(cache, keys(1))
    if where == "on their way":
        on_host(cache, keys(1))
        reload_keys(cache, keys(1))

    reply = answer(reload_keys(cache, keys(1)), Reloaded)

    assert reply == Reloaded(block_ids=b"", num_reloaded=0, num_tokens=0, row=0)


def test_blocks_without_room_are_not_brought_back() -> None:
    """Leases are not disturbed for cached bytes; the refusal has all numbers."""
    cache = a_cache(4)
    on_host(cache, keys(1, 2))
    reserve(cache, 3)

    with pytest.raises(PoolFullError) as refusal:
        reload_keys(cache, keys(1, 2))

    assert (refusal.value.resource, refusal.value.need) == ("device_blocks", 2)
    assert (refusal.value.available, refusal.value.limit) == (1, 4)
    assert refusal.value.retry_after_ms == 50


def test_more_blocks_than_the_device_has_never_come_back() -> None:
    """A call that no waiting can serve is refused for good."""
    cache = a_cache(2)
    on_host(cache, keys(1, 2))
    on_host(cache, keys(3))

    with pytest.raises(NeverFitsError) as refusal:
        reload_keys(cache, keys(1, 2, 3))

    assert (refusal.value.need, refusal.value.limit) == (3, 2)


def test_cached_blocks_make_room_for_named_ones() -> None:
    """Whoever names blocks wants them more than what nobody holds."""
    cache = a_cache(2)
    on_host(cache, keys(1, 2))
    cached(cache, keys(3, 4))

    outcome = reload_keys(cache, keys(1, 2))
    reloaded(land(cache, the_copy(outcome)), outcome.ticket)

    assert found(cache, keys(1, 2)) == (2, 0)


# Failures in every phase ----------------------------------------------------------------------------------------------


def end_of(outcome: Outcome, end: str, cache: Cache) -> Outcome:
    """Let a copy fail, be lost, or die with its mover."""
    copy_id = the_copy(outcome).copy_id
    command: c.Command = c.MoverDied()
    if end == "failed":
        command = c.CopyFailed(copy_id=copy_id)
    if end == "lost":
        command = c.CopyLost(copy_id=copy_id)
    return cache.handle(command, 0.0)


ENDS = pytest.mark.parametrize("end", ["failed", "lost", "mover died"])


@ENDS
@pytest.mark.parametrize("is_below", [False, True], ids=["new slots", "shared slot"])
def test_eviction_that_comes_to_nothing_leaves_the_lease_on_the_device(
    end: str, is_below: bool
) -> None:
    """The lease has its blocks as before, its caller is told, and it may be evicted again."""
    cache = a_cache()
    if is_below:
        on_host(cache, keys(1))
    lease = committed(cache, keys(1), more=1)
    outcome = evict(cache, lease.lease_id)

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert reserve(cache, 2, "committed", b"").block_ids == lease.block_ids
    assert cache.check() == []
    land(cache, the_copy(evict(cache, lease.lease_id)))
    assert cache.check() == []


@ENDS
def test_reload_that_comes_to_nothing_leaves_the_lease_in_the_host_pool(end: str) -> None:
    """The bytes are still below, the caller is told, and the lease may be reloaded again."""
    cache = a_cache()
    lease = evicted(cache, keys(1), more=1)
    outcome = reload(cache, lease.lease_id)

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert cache.check() == []
    again = reload(cache, lease.lease_id)
    assert reloaded(land(cache, the_copy(again)), again.ticket).num_reloaded == 2
    assert cache.check() == []


@ENDS
def test_prefetch_that_comes_to_nothing_is_told(end: str) -> None:
    """Whoever asked for blocks learns that they did not come; they are still below."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = reload_keys(cache, keys(1))

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert found(cache, keys(1)) == (0, 1)
    assert cache.check() == []


@ENDS
def test_displacing_that_comes_to_nothing_is_told(end: str) -> None:
    """Cached blocks that could not be copied stay where they are."""
    cache = a_full_cache(1)
    outcome = cache.handle(c.Evict(num_blocks=1), 0.0)

    woken(end_of(outcome, end, cache), outcome.ticket, CopyFailedError)

    assert found(cache, keys(0)) == (1, 0)
    assert cache.check() == []


@ENDS
def test_load_that_comes_to_nothing_lets_the_request_compute(end: str) -> None:
    """A request whose prefix did not come gets fresh blocks, without another try from below."""
    cache = a_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(a_reserve(2, "r", keys(1), wait_ms=WAIT_MS), 0.0)

    lease = woken(end_of(outcome, end, cache), outcome.ticket, Reserved)

    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (0, 0)
    assert records(cache).rows.num_blocks[lease.row] == 2
    assert cache.check() == []


@ENDS
def test_write_back_that_comes_to_nothing_is_tried_again(end: str) -> None:
    """The call that needs room goes on waiting, and another copy makes room for it."""
    cache = a_full_cache(2)
    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    ended = end_of(outcome, end, cache)

    assert outcome.ticket not in wakes(ended)
    assert outcome.ticket in wakes(land(cache, the_copy(ended)))
    assert cache.check() == []


def test_lease_with_several_copies_is_parted_from_all_by_one_failure() -> None:
    """A reload of which one copy failed is over; the other copies only bring cached blocks."""
    cache = a_cache()
    lease = evicted(cache, keys(1, 2))
    prefetch = reload_keys(cache, keys(1))
    outcome = reload(cache, lease.lease_id)

    failed = fail(cache, the_copy(prefetch))
    land(cache, the_copy(outcome))

    woken(failed, outcome.ticket, CopyFailedError)
    assert found(cache, keys(1, 2)) == (1, 1)
    assert cache.check() == []


def test_block_whose_write_back_failed_is_the_next_to_leave() -> None:
    """A copy that failed makes no block warmer than it was."""
    cache = a_full_cache(2)
    outcome = cache.handle(a_reserve(1, wait_ms=WAIT_MS), 0.0)

    failed = fail(cache, the_copy(outcome))

    assert the_copy(failed).source_ids == the_copy(outcome).source_ids


def test_committed_bytes_survive_a_lease_that_moves() -> None:
    """What was committed under a key is found after any number of moves, and copied down only once."""
    cache = a_cache()
    lease = committed(cache, keys(1, 2))
    land(cache, the_copy(evict(cache, lease.lease_id)))
    land(cache, the_copy(reload(cache, lease.lease_id)))

    again = answer(evict(cache, lease.lease_id), Evicted)
    land(cache, the_copy(reload(cache, lease.lease_id)))
    release(cache, lease.lease_id)

    assert again == Evicted(num_evicted=2, num_offloaded=0)
    assert found(cache, keys(1, 2)) == (2, 0)
