"""Laws of forks: a fork has all that its parent has computed, committed blocks shared and the others copied."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import (
    CopyFailedError,
    DeadlineError,
    DrainingError,
    IdReusedError,
    InvalidError,
    KVLeaseError,
    NeverFitsError,
    NotYoursError,
    PoolFullError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.groups import GroupShape, Keeps, keeps_everything
from kvlease.ids import Epoch, LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Copy, Direction, Forked, Outcome, Reserved
from tests.unit.service.core.builders import (
    MATE,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    an_extend,
    answer,
    cached,
    copies,
    evict,
    fail,
    ids,
    keys,
    land,
    lose,
    records,
    release,
    reserve,
    started,
    states,
    the_copy,
    tick,
    wait_for,
    woken,
)

_WIDTH = 16


def computed(
    cache: Cache,
    num_tokens: int,
    num_computed: int,
    packed: bytes = b"",
    request_id: str = "parent",
) -> Reserved:
    """Return a lease that covers tokens, has computed some of them, and has committed those of the keys."""
    command = c.Reserve(worker_id=WORKER, request_id=request_id, keys=b"", num_tokens=num_tokens)
    lease = answer(cache.handle(command, 0.0), Reserved)
    compute(cache, lease.lease_id, num_computed, packed)
    return lease


def compute(cache: Cache, lease_id: LeaseId, num_computed: int, packed: bytes = b"") -> None:
    """Report tokens as computed, and give the keys of the first blocks."""
    cache.handle(
        c.Commit(
            worker_id=WORKER,
            lease_id=lease_id,
            num_tokens=num_computed,
            first_block=0,
            keys=packed,
        ),
        0.0,
    )


def a_fork(
    parent: Reserved,
    num_tokens: int,
    request_id: str = "child",
    *,
    worker_id: WorkerId = WORKER,
    wait_ms: int = 0,
) -> c.Fork:
    """Return the command that forks a lease."""
    return c.Fork(
        worker_id=worker_id,
        lease_id=parent.lease_id,
        request_id=request_id,
        num_tokens=num_tokens,
        wait_ms=wait_ms,
    )


def fork(cache: Cache, parent: Reserved, num_tokens: int, request_id: str = "child") -> Outcome:
    """Fork a lease."""
    return cache.handle(a_fork(parent, num_tokens, request_id), 0.0)


def forked(cache: Cache, parent: Reserved, num_tokens: int, request_id: str = "child") -> Forked:
    """Fork a lease, land its copies, and return it."""
    outcome = fork(cache, parent, num_tokens, request_id)
    if outcome.ticket is None:
        return answer(outcome, Forked)
    return woken(land(cache, the_copy(outcome)), outcome.ticket, Forked)


def pairs(copy: Copy) -> list[tuple[int, int]]:
    """Return the source and the target of each block that a copy duplicates."""
    assert copy.direction is Direction.DUPLICATE
    return list(zip(ids(copy.source_ids), ids(copy.target_ids), strict=True))


def free(cache: Cache) -> int:
    """Return how many blocks are free."""
    return cache.census().device["free"]


# What a fork has ------------------------------------------------------------------------------------------------------


def test_committed_blocks_are_shared_and_written_ones_copied() -> None:
    """Only blocks that the parent may still write are copied, and none beyond the computed tokens."""
    cache = a_cache(12)
    parent = computed(cache, 20, 10, keys(1, 2))
    block_ids = ids(parent.block_ids)

    outcome = fork(cache, parent, 18)
    copy = the_copy(outcome)
    done = woken(land(cache, copy), outcome.ticket, Forked)

    ((source, target),) = pairs(copy)
    child = ids(done.lease.block_ids)
    assert (done.num_shared, done.num_copied) == (2, 1)
    assert child[:2] == block_ids[:2]
    assert (source, target) == (block_ids[2], child[2])
    assert len(child) == 5
    assert not set(child[2:]) & set(block_ids)
    assert done.lease.device_hit_tokens == 10
    assert cache.check() == []


def test_fork_without_copies_is_answered_at_once() -> None:
    """If all that is computed is committed, a fork is answered at once."""
    cache = a_cache(12)
    parent = computed(cache, 12, 8, keys(1, 2))

    outcome = fork(cache, parent, 12)

    reply = answer(outcome, Forked)
    assert copies(outcome) == []
    assert (reply.num_shared, reply.num_copied) == (2, 0)
    assert states(cache, reply.lease.block_ids[8:]) == {State.RESERVED}
    assert cache.check() == []


def test_fork_of_full_committed_blocks_takes_none() -> None:
    """A fork of committed blocks alone is possible even if no block is free."""
    cache = a_cache(2)
    parent = computed(cache, 8, 8, keys(1, 2))

    reply = answer(fork(cache, parent, 8), Forked)

    assert reply.lease.block_ids == parent.block_ids
    assert cache.check() == []


def test_fork_of_nothing_computed_has_fresh_blocks_only() -> None:
    """A parent that has computed nothing has nothing to share."""
    cache = a_cache(12)
    parent = computed(cache, 12, 0)

    reply = answer(fork(cache, parent, 8), Forked)

    assert (reply.num_shared, reply.num_copied) == (0, 0)
    assert len(ids(reply.lease.block_ids)) == 2
    assert not set(ids(reply.lease.block_ids)) & set(ids(parent.block_ids))


@given(
    num_computed=st.integers(0, 20),
    num_committed=st.integers(0, 5),
    more=st.integers(0, 12),
    num_forks=st.integers(1, 3),
)
def test_forks_have_what_is_computed_and_nobody_elses_blocks(
    num_computed: int, num_committed: int, more: int, num_forks: int
) -> None:
    """However much is computed and committed, each fork has all of it, and shares just the committed blocks."""
    cache = a_cache(48, table_blocks=_WIDTH)
    num_shared = min(num_committed, num_computed // TOKENS_PER_BLOCK)
    parent = computed(cache, 20, num_computed, keys(*range(1, 1 + num_shared)))
    num_tokens = max(1, num_computed + more)

    forks = [forked(cache, parent, num_tokens, f"child {number}") for number in range(num_forks)]

    num_written = -(-num_computed // TOKENS_PER_BLOCK)
    rows = [ids(parent.block_ids), *(ids(one.lease.block_ids) for one in forks)]
    private = [block for row in rows for block in row[num_shared:]]
    assert all(row[:num_shared] == rows[0][:num_shared] for row in rows)
    assert len(set(private)) == len(private)
    assert {one.num_copied for one in forks} == {num_written - num_shared}
    assert {len(row) for row in rows[1:]} == {-(-num_tokens // TOKENS_PER_BLOCK)}
    assert cache.check() == []


def test_fork_can_be_forked_and_outlives_its_parent() -> None:
    """A fork is a lease like any other: it can be extended, committed and forked, and does not need its parent."""
    cache = a_cache(16)
    parent = computed(cache, 8, 6, keys(1))
    child = forked(cache, parent, 8)
    release(cache, parent.lease_id)

    compute(cache, child.lease.lease_id, 8, keys(1, 2))
    grandchild = forked(cache, child.lease, 12, "grandchild")

    assert (grandchild.num_shared, grandchild.num_copied) == (2, 0)
    assert cache.check() == []


def test_fork_makes_room_as_a_reserve_does() -> None:
    """Cached blocks that nobody holds leave to make room for a fork."""
    cache = a_cache(6, num_slots=0)
    cached(cache, keys(1, 2))
    parent = computed(cache, 12, 6)

    done = forked(cache, parent, 8)

    assert done.num_copied == 2
    assert cache.check() == []


# Groups ---------------------------------------------------------------------------------------------------------------


def grouped(*groups: GroupShape) -> Cache:
    """Return a cache with the given groups and one group that keeps everything."""
    return a_cache(
        32,
        groups=(keeps_everything(TOKENS_PER_BLOCK, _WIDTH), *groups),
        null_blocks=1,
        table_blocks=_WIDTH,
    )


def a_group(keeps: Keeps, max_blocks: int, kept_tokens: int = 0) -> GroupShape:
    """Return a group with blocks of the usual size."""
    return GroupShape(
        keeps=keeps,
        tokens_per_block=TOKENS_PER_BLOCK,
        keys_per_block=0 if keeps is Keeps.FIXED else 1,
        table_blocks=max_blocks if keeps is Keeps.FIXED else _WIDTH,
        max_blocks=max_blocks,
        kept_tokens=kept_tokens,
    )


def part(cache: Cache, reply: Reserved, group: int) -> list[int]:
    """Return the places of a lease's group, empty ones as -1."""
    rows = records(cache).rows
    end = int(rows.num_blocks[reply.row, group])
    start = sum(one.table_blocks for one in cache.shape.groups[:group])
    return [int(block) for block in rows.block_ids[reply.row, start : start + end]]


def test_fork_of_a_window_has_what_is_still_needed() -> None:
    """A fork does not have the blocks that its parent's window has given back."""
    cache = grouped(a_group(Keeps.WINDOW, 4, kept_tokens=8))
    parent = computed(cache, 16, 14, keys(1, 2))

    done = forked(cache, parent, 16)

    own, others = part(cache, done.lease, 1), part(cache, parent, 1)
    assert own[0] == others[0] == -1
    assert own[1] == others[1]
    assert not set(own[2:]) & set(others)
    assert len(own) == 4
    assert cache.check() == []


@pytest.mark.parametrize(
    ("num_computed", "packed", "place", "is_shared"),
    [
        pytest.param(6, b"", 1, False, id="in the midst of a block"),
        pytest.param(8, b"", 1, False, id="at its end"),
        pytest.param(8, keys(1, 2), 1, True, id="committed"),
    ],
)
def test_fork_has_the_newest_state(
    num_computed: int, packed: bytes, place: int, *, is_shared: bool
) -> None:
    """A fork of recurrent layers has only the newest state, shared if committed, and a fresh block for the next."""
    cache = grouped(a_group(Keeps.STATE, 3))
    parent = computed(cache, 8, num_computed, packed)

    done = forked(cache, parent, 16)

    own, others = part(cache, done.lease, 1), part(cache, parent, 1)
    assert (own[place] == others[place]) is is_shared
    assert [block >= 0 for block in own] == [False, True, False, True]
    assert cache.check() == []


def test_fork_finds_a_state_that_lies_ahead() -> None:
    """A state that is kept where the next one goes is copied to the fork's place for its next one."""
    cache = grouped(a_group(Keeps.STATE, 3))
    parent = computed(cache, 20, 6)
    (state,) = [block for block in part(cache, parent, 1) if block >= 0]

    outcome = fork(cache, parent, 12)
    done = woken(land(cache, the_copy(outcome)), outcome.ticket, Forked)

    own = part(cache, done.lease, 1)
    assert [block >= 0 for block in own] == [False, False, True]
    assert (state, own[2]) in pairs(the_copy(outcome))
    assert cache.check() == []


def test_fixed_blocks_are_copied_whole() -> None:
    """Fixed blocks count as written, however little is computed, so a fork copies all of them."""
    cache = grouped(a_group(Keeps.FIXED, 2))
    parent = computed(cache, 8, 0)

    outcome = fork(cache, parent, 8)

    assert [source for source, _ in pairs(the_copy(outcome))] == part(cache, parent, 1)
    done = woken(land(cache, the_copy(outcome)), outcome.ticket, Forked)
    assert (done.num_shared, done.num_copied) == (0, 2)
    assert cache.check() == []


# While copies are in flight -------------------------------------------------------------------------------------------


@dataclass
class Underway:
    """A fork whose copy is in flight."""

    cache: Cache
    parent: Reserved
    copy: Copy
    ticket: int | None


@pytest.fixture
def underway() -> Underway:
    """Return a fork with one shared block, and two blocks that are being copied."""
    cache = a_cache(16)
    parent = computed(cache, 12, 11, keys(1))
    outcome = fork(cache, parent, 16)
    return Underway(cache, parent, the_copy(outcome), outcome.ticket)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda one: release(one.cache, one.parent.lease_id), id="release"),
        pytest.param(lambda one: evict(one.cache, one.parent.lease_id), id="evict"),
    ],
)
def test_sources_are_kept_for_the_copy(
    underway: Underway, end: Callable[[Underway], object]
) -> None:
    """Whatever happens to the parent, nobody else gets the blocks that the copy reads."""
    cache, sources = underway.cache, underway.copy.source_ids
    end(underway)

    assert State.FREE not in states(cache, sources)
    done = woken(land(cache, underway.copy), underway.ticket, Forked)
    assert (done.num_shared, done.num_copied) == (1, 2)
    assert cache.check() == []


def test_dead_worker_leaves_nothing(underway: Underway) -> None:
    """When the worker dies its leases end, and the last of their blocks are free once the copy has ended."""
    cache = underway.cache
    cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)
    assert State.FREE not in states(cache, underway.copy.source_ids + underway.copy.target_ids)

    land(cache, underway.copy)

    assert free(cache) == 15
    assert cache.check() == []


@pytest.mark.parametrize("end", [pytest.param(fail, id="failed"), pytest.param(lose, id="lost")])
def test_fork_without_its_bytes_ends(
    underway: Underway, end: Callable[[Cache, Copy], Outcome]
) -> None:
    """A failed copy ends the fork but not the parent, and the caller is told."""
    cache = underway.cache

    woken(end(cache, underway.copy), underway.ticket, CopyFailedError)

    assert cache.num_leases_of(WORKER) == 1
    assert cache.check() == []
    cache.handle(c.MoverDied(), 0.0)
    assert free(cache) == 13
    assert cache.check() == []


def test_fork_ends_with_its_callers_patience(underway: Underway) -> None:
    """A fork ends when its caller stops waiting, for its answer would never be heard."""
    cache = underway.cache

    woken(tick(cache, 31.0), underway.ticket, DeadlineError)
    land(cache, underway.copy)

    assert cache.num_leases_of(WORKER) == 1
    assert cache.check() == []


def test_restart_in_between_leaves_the_parent_alone(underway: Underway) -> None:
    """A fork that was not answered before a crash does not exist after it; the parent goes on."""
    cache = Cache.recovered(
        underway.cache.shape, records(underway.cache), Epoch(2), {WORKER: TENANT}, 0.0
    )

    assert cache.num_leases_of(WORKER) == 1
    assert free(cache) == 13
    assert cache.check() == []


# Repeated -------------------------------------------------------------------------------------------------------------


def test_repeated_fork_has_the_same_answer() -> None:
    """A fork whose answer was lost can be repeated, even if its parent has ended meanwhile."""
    cache = a_cache(16)
    parent = computed(cache, 12, 6)
    first = forked(cache, parent, 12)
    release(cache, parent.lease_id)

    assert answer(fork(cache, parent, 12), Forked) == first


def test_repeated_fork_waits_for_the_first_ones_copies(underway: Underway) -> None:
    """A repeated call replaces the first one, and starts no second copy."""
    again = fork(underway.cache, underway.parent, 16)

    woken(again, underway.ticket, WrongStateError)
    assert copies(again) == []
    woken(land(underway.cache, underway.copy), again.ticket, Forked)
    assert underway.cache.num_leases_of(WORKER) == 2


def test_fork_is_known_after_a_restart() -> None:
    """The lease of an answered fork survives a restart, and a repeated call finds it."""
    cache = a_cache(16)
    parent = computed(cache, 12, 6)
    first = forked(cache, parent, 12)
    cache = Cache.recovered(cache.shape, records(cache), Epoch(2), {WORKER: TENANT}, 0.0)

    again = answer(fork(cache, parent, 12), Forked)

    assert (again.lease.lease_id, again.lease.block_ids) == (
        first.lease.lease_id,
        first.lease.block_ids,
    )
    assert cache.check() == []


def test_names_of_requests_are_used_once() -> None:
    """A request id in use by a fork, a reserve or a waiting call is refused for another fork."""
    cache = a_cache(8)
    parent, other = computed(cache, 8, 4), reserve(cache, 2, "other")
    forked(cache, parent, 8)

    for command in (
        a_fork(parent, 12),
        a_fork(other, 8),
        a_fork(parent, 8, "other"),
        a_reserve(2, "child"),
    ):
        with pytest.raises(IdReusedError):
            cache.handle(command, 0.0)
    wait_for(cache, 4, "waiting")
    with pytest.raises(IdReusedError):
        fork(cache, parent, 8, "waiting")
    assert cache.check() == []


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        pytest.param({"num_tokens": 5}, InvalidError, id="fewer tokens than computed"),
        pytest.param({"num_tokens": 0}, InvalidError, id="no tokens"),
        pytest.param({"num_tokens": 100}, NeverFitsError, id="more than ever fit"),
        pytest.param({"worker_id": MATE}, NotYoursError, id="another worker's"),
        pytest.param({"lease_id": LeaseId(1)}, UnknownLeaseError, id="unknown"),
    ],
)
def test_wrong_forks_change_nothing(changes: dict[str, int], error: type[KVLeaseError]) -> None:
    """An invalid fork is refused, and changes nothing."""
    cache = a_cache(8)
    parent = computed(cache, 8, 6)
    before = cache.census().device
    fields = {
        "worker_id": WORKER,
        "lease_id": parent.lease_id,
        "request_id": "child",
        "num_tokens": 8,
    }

    with pytest.raises(error):
        cache.handle(c.Fork(**(fields | changes)), 0.0)  # type: ignore[arg-type]  # of several types

    assert cache.census().device == before
    assert cache.check() == []


def test_only_active_leases_are_forked() -> None:
    """A lease in the host pool has no blocks to share."""
    cache = a_cache(8)
    parent = computed(cache, 8, 6)
    land(cache, the_copy(evict(cache, parent.lease_id)))

    with pytest.raises(WrongStateError, match="evicted"):
        fork(cache, parent, 8)


def test_draining_daemon_forks_nothing() -> None:
    """A fork is a new lease, and a draining daemon grants none."""
    cache = a_cache(8)
    parent = computed(cache, 8, 6)
    cache.handle(c.Drain(), 0.0)

    with pytest.raises(DrainingError):
        fork(cache, parent, 8)


def test_fork_waits_for_no_room() -> None:
    """Without room a fork is refused with numbers, even if it may wait, and it takes nothing."""
    cache = a_cache(5)
    parent = computed(cache, 12, 6)

    with pytest.raises(PoolFullError, match="the rest is held") as refused:
        cache.handle(a_fork(parent, 12, wait_ms=WAIT_MS), 0.0)

    assert (refused.value.need, refused.value.available, refused.value.limit) == (3, 2, 5)
    assert refused.value.retry_after_ms == 50
    assert cache.check() == []


def test_fork_never_sees_another_tenants_bytes() -> None:
    """Blocks with others' bytes are scrubbed first; the next try of the fork gets them."""
    cache = a_cache(4, num_slots=0)
    parent = computed(cache, 8, 6)
    others = reserve(cache, 2, "theirs", worker_id=STRANGER)
    release(cache, others.lease_id, worker_id=STRANGER)

    with pytest.raises(PoolFullError, match="once they are ready"):
        fork(cache, parent, 8)
    land(cache, started(cache))

    assert forked(cache, parent, 8).num_copied == 2
    assert cache.check() == []


def test_fork_overtakes_new_requests_until_one_has_waited_for_long() -> None:
    """A fork goes before new requests, but not once one of them has waited for too long."""
    cache = a_cache(6)
    parent = computed(cache, 8, 6)
    cache.handle(a_reserve(5, "first", wait_ms=60_000), 0.0)
    ageing_seconds = cache.shape.ageing_seconds

    granted = cache.handle(a_fork(parent, 8, "early"), ageing_seconds - 0.01)
    cache.handle(c.Tick(), ageing_seconds)
    with pytest.raises(PoolFullError, match="1 call waits") as refused:
        cache.handle(a_fork(parent, 8, "late"), ageing_seconds)

    assert copies(granted)
    assert refused.value.retry_after_ms == 100


def test_fork_overtakes_no_running_request() -> None:
    """A waiting extend gets its blocks before a fork, which is told how many calls are ahead of it."""
    cache = a_cache(6)
    parent = computed(cache, 8, 6)
    other = reserve(cache, 2, "other")
    cache.handle(an_extend(other.lease_id, 5, wait_ms=WAIT_MS), 0.0)

    with pytest.raises(PoolFullError, match="1 call waits") as refused:
        fork(cache, parent, 8)

    assert (refused.value.need, refused.value.remedies) == (2, ())


def test_fork_needs_a_row() -> None:
    """A fork takes a row like any lease, and is refused if there is none."""
    cache = a_cache(8, max_leases=1)
    parent = computed(cache, 8, 6)

    with pytest.raises(PoolFullError, match="all 1 lease is in use") as refused:
        fork(cache, parent, 8)

    assert (refused.value.resource, refused.value.limit) == ("leases", 1)


@pytest.mark.parametrize("max_leases", [1, 8], ids=["no row", "no block"])
def test_refused_fork_is_told_who_has_the_pool(max_leases: int) -> None:
    """The holdings of a refusal add up to all blocks that can be granted."""
    cache = a_cache(4, max_leases=max_leases)
    parent = reserve(cache, 3)

    with pytest.raises(PoolFullError) as refusal:
        fork(cache, parent, 2 * TOKENS_PER_BLOCK)

    assert [str(one) for one in refusal.value.holdings] == ["you leased 3", "nobody free 1"]
    assert refusal.value.rule == ("leases" if max_leases == 1 else "blocks")
