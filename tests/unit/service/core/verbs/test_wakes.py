"""Laws of waking: an event that makes room, or changes who is next, at once serves the calls that can now be served."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvlease.errors import PoolFullError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Outcome, Pinned, Wake
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    SHAPE,
    STRANGER,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    answer,
    cached,
    committed,
    copies,
    evict,
    fail,
    keys,
    land,
    lose,
    on_host,
    release,
    reload_keys,
    reserve,
    the_copy,
    tick,
    wait_for,
    wakes,
)

Waiting = tuple[Cache, int | None, Callable[[], Outcome]]
"""A cache, the ticket of a call that waits in it, and the event that must wake that call."""

PATIENT = 60_000


def patient(cache: Cache, num_blocks: int, prefix: bytes = b"") -> int | None:
    """Have a reserve wait for a minute, and return its ticket."""
    command = a_reserve(num_blocks, "patient", prefix, wait_ms=PATIENT)
    return cache.handle(command, 0.0).ticket


def released() -> Waiting:
    """A lease ends by its owner's word."""
    cache = a_cache(4)
    lease = reserve(cache, 4)
    return cache, patient(cache, 2), lambda: release(cache, lease.lease_id)


def released_in_a_step() -> Waiting:
    """A lease ends within a scheduler's step."""
    cache = a_cache(4)
    lease_ids = reserve(cache, 4).lease_id.to_bytes(8, "little")
    command = c.Step(worker_id=WORKER, verbs=b"\3", lease_ids=lease_ids, num_tokens=bytes(4))
    return cache, patient(cache, 2), lambda: cache.handle(command, 0.0)


def died() -> Waiting:
    """A worker dies."""
    cache = a_cache(4)
    reserve(cache, 4, worker_id=MATE)
    return cache, patient(cache, 2), lambda: cache.handle(c.WorkerDied(worker_id=MATE), 0.0)


def detached() -> Waiting:
    """A worker detaches."""
    cache = a_cache(4)
    reserve(cache, 4, worker_id=MATE)
    return cache, patient(cache, 2), lambda: cache.handle(c.Detach(worker_id=MATE), 0.0)


def disowned() -> Waiting:
    """A heartbeat ends a lease that its worker has lost."""
    cache = a_cache(4)
    lease_id = reserve(cache, 4).lease_id
    beat = c.Heartbeat(worker_id=WORKER, lease_ids=(), newest_lease_id=lease_id)
    return cache, patient(cache, 2), lambda: cache.handle(beat, LEASE_SECONDS - 1)


def quarantine_ended() -> Waiting:
    """The owner of a quarantined lease calls at last, and releases it."""
    cache = a_cache(4)
    lease = reserve(cache, 4)
    ticket = patient(cache, 2)
    tick(cache, LEASE_SECONDS)
    return cache, ticket, lambda: release(cache, lease.lease_id)


def quarantined_died() -> Waiting:
    """The worker of a quarantined lease is proven dead."""
    cache = a_cache(4)
    reserve(cache, 4, worker_id=MATE)
    ticket = patient(cache, 2)
    tick(cache, LEASE_SECONDS)
    return cache, ticket, lambda: cache.handle(c.WorkerDied(worker_id=MATE), 0.0)


def unpinned() -> Waiting:
    """A pin ends."""
    cache = a_cache(4, 0)
    cached(cache, keys(1, 2, 3, 4))
    pin_id = answer(cache.handle(c.Pin(keys=keys(1, 2, 3, 4)), 0.0), Pinned).pin_id
    return cache, patient(cache, 2), lambda: cache.handle(c.Unpin(pin_id=pin_id), 0.0)


def lease_evicted() -> Waiting:
    """A lease is moved to the host pool, which has its bytes already."""
    cache = a_cache(4)
    lease = committed(cache, keys(1, 2, 3, 4))
    land(cache, the_copy(evict(cache, lease.lease_id)))
    land(cache, the_copy(cache.handle(a_reload(lease.lease_id), 0.0)))
    return cache, patient(cache, 2), lambda: evict(cache, lease.lease_id)


def eviction_landed() -> Waiting:
    """The copy that takes a lease to the host pool ends."""
    cache = a_cache(4)
    copy = the_copy(evict(cache, reserve(cache, 4).lease_id))
    return cache, patient(cache, 2), lambda: land(cache, copy)


def write_back_landed() -> Waiting:
    """The copy that writes cached blocks back for the call ends."""
    cache, ticket, copy = _writing_back()
    return cache, ticket, lambda: land(cache, copy)


def write_back_failed() -> Waiting:
    """A write-back failed; the call is served by the next one."""
    cache, ticket, copy = _writing_back()

    def go_on() -> Outcome:
        (again,) = copies(fail(cache, copy))
        return land(cache, again)

    return cache, ticket, go_on


def mover_died() -> Waiting:
    """The mover dies in the middle of a copy to the device."""
    cache, ticket, _ = _prefetching()
    return cache, ticket, lambda: cache.handle(c.MoverDied(), 0.0)


def scrubbed() -> Waiting:
    """Blocks that another tenant had are scrubbed."""
    cache = a_cache(4)
    release(cache, reserve(cache, 4, worker_id=STRANGER).lease_id, worker_id=STRANGER)
    outcome = cache.handle(a_reserve(2, "patient", wait_ms=PATIENT), 0.0)
    return cache, outcome.ticket, lambda: land(cache, the_copy(outcome))


def lost_copy_ended() -> Waiting:
    """A lost copy ends at last, and lets go of its target."""
    cache, ticket, copy = _prefetching()
    lose(cache, copy)
    return cache, ticket, lambda: land(cache, copy)


def prefetch_failed() -> Waiting:
    """A copy to the device fails, and its targets are free again."""
    cache, ticket, copy = _prefetching()
    return cache, ticket, lambda: fail(cache, copy)


def load_lost() -> Waiting:
    """The load of a lease of the other blocks is lost, and the lease starts over behind a smaller running request."""
    cache = a_cache(4)
    on_host(cache, keys(1))
    lease = reserve(cache, 1, "runs")
    loading = cache.handle(a_reserve(3, "loads", keys(1), wait_ms=PATIENT), 0.0)
    ticket = cache.handle(an_extend(lease.lease_id, 2, wait_ms=PATIENT), 0.0).ticket
    return cache, ticket, lambda: lose(cache, the_copy(loading))


def committed_prefix() -> Waiting:
    """A commit makes a prefix of the waiting call findable, so that the call needs fewer blocks."""
    cache = a_cache(4)
    lease = reserve(cache, 3)
    ticket = patient(cache, 3, keys(1, 2, 3))
    lease_id = lease.lease_id
    command = c.Commit(
        worker_id=WORKER, lease_id=lease_id, num_tokens=12, first_block=0, keys=keys(1, 2, 3)
    )
    return cache, ticket, lambda: cache.handle(command, 0.0)


def head_cancelled() -> Waiting:
    """The call at the head is cancelled."""
    cache, head, ticket = _behind_a_large_one()
    return cache, ticket, lambda: cache.handle(c.Cancel(ticket=head), 0.0)


def head_timed_out() -> Waiting:
    """The time of the call at the head is up."""
    cache, _, ticket = _behind_a_large_one()
    return cache, ticket, lambda: tick(cache, WAIT_MS / 1000)


def heads_worker_died() -> Waiting:
    """The worker of the call at the head dies."""
    cache, _, ticket = _behind_a_large_one()
    return cache, ticket, lambda: cache.handle(c.WorkerDied(worker_id=MATE), 0.0)


def head_repeated() -> Waiting:
    """The call at the head is repeated, and joins the end."""
    cache, _, ticket = _behind_a_large_one()
    again = a_reserve(4, "large", worker_id=MATE, wait_ms=WAIT_MS)
    return cache, ticket, lambda: cache.handle(again, 0.0)


def heads_lease_ended() -> Waiting:
    """The lease that the call at the head would extend ends."""
    cache = a_cache(4)
    lease = reserve(cache, 1, "a", worker_id=MATE)
    reserve(cache, 1, "b")
    cache.handle(an_extend(lease.lease_id, 4, worker_id=MATE, wait_ms=PATIENT), 0.0)
    return cache, patient(cache, 2), lambda: release(cache, lease.lease_id, worker_id=MATE)


def head_evicted() -> Waiting:
    """The lease that the call at the head would extend leaves for the host pool."""
    cache = a_cache(4)
    lease = reserve(cache, 1, "a", worker_id=MATE)
    reserve(cache, 1, "b")
    cache.handle(an_extend(lease.lease_id, 4, worker_id=MATE, wait_ms=PATIENT), 0.0)
    return cache, patient(cache, 2), lambda: evict(cache, lease.lease_id, worker_id=MATE)


def row_freed() -> Waiting:
    """A row of the block table comes free; there were enough blocks already."""
    cache = a_cache(4, max_leases=1)
    lease = reserve(cache, 1)
    return cache, patient(cache, 2), lambda: release(cache, lease.lease_id)


def aged() -> Waiting:
    """With time, a small request of low priority comes before another tenant's large one."""
    cache = a_cache(4)
    reserve(cache, 2)
    wait_for(cache, 4, "large")
    small = replace(a_reserve(2, "small", worker_id=STRANGER, wait_ms=PATIENT), priority=0)
    ticket = cache.handle(small, 0.0).ticket
    cache.handle(a_reserve(4, "large", wait_ms=PATIENT), 0.0)
    return cache, ticket, lambda: tick(cache, 2 * SHAPE.ageing_seconds)


# Scenes that several begin with ---------------------------------------------------------------------------------------


def _prefetching() -> tuple[Cache, int | None, Copy]:
    cache = a_cache(4)
    on_host(cache, keys(1, 2, 3))
    copy = the_copy(reload_keys(cache, keys(1, 2, 3)))
    return cache, patient(cache, 2), copy


def _writing_back() -> tuple[Cache, int | None, Copy]:
    cache = a_cache(4)
    cached(cache, keys(1, 2, 3, 4))
    outcome = cache.handle(a_reserve(2, "patient", wait_ms=PATIENT), 0.0)
    return cache, outcome.ticket, the_copy(outcome)


def _behind_a_large_one() -> tuple[Cache, int, int | None]:
    cache = a_cache(4)
    reserve(cache, 2)
    head = wait_for(cache, 4, "large", worker_id=MATE)
    return cache, head, patient(cache, 2)


SCENES = [
    released, released_in_a_step, died, detached, disowned, quarantine_ended, quarantined_died, unpinned,
    lease_evicted, eviction_landed, write_back_landed, write_back_failed, mover_died, scrubbed, lost_copy_ended,
    prefetch_failed, load_lost, committed_prefix, head_cancelled, head_timed_out, heads_worker_died, head_repeated,
    heads_lease_ended, head_evicted, row_freed, aged,
]  # fmt: skip


@pytest.mark.parametrize("scene", [pytest.param(scene, id=scene.__name__) for scene in SCENES])
def test_event_serves_whom_it_can(scene: Callable[[], Waiting]) -> None:
    """A call waits while it cannot be served, and the very event that changes that answers it."""
    cache, ticket, event = scene()
    assert ticket is not None
    assert ticket in [one.call_id for one in cache.list_waiting(0, 9, 0.0)]

    outcome = event()

    assert ticket in wakes(outcome)
    assert cache.check() == []


def test_refused_call_leaves_its_room_to_those_that_wait() -> None:
    """Blocks that a call evicts for itself in vain serve a call that waits behind it, at once."""
    cache = a_cache(6)
    cached(cache, keys(1, 2))
    release(cache, reserve(cache, 4, "old", worker_id=STRANGER).lease_id, worker_id=STRANGER)
    patient = replace(a_reserve(2, "patient", wait_ms=WAIT_MS), priority=0)
    ticket = cache.handle(patient, 0.0).ticket

    with pytest.raises(PoolFullError, match="once they are ready"):
        cache.handle(replace(a_reserve(4, "eager", worker_id=MATE), priority=2), 0.0)

    effects = cache.take_effects()
    assert ticket in [effect.ticket for effect in effects if isinstance(effect, Wake)]
    assert cache.check() == []
