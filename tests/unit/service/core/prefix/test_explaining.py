"""Laws of the miss explainer: every block that was not found has a reason, which is the true one at the grant."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from kvlease.errors import NotYoursError, PoolFullError, UnknownLeaseError, WrongStateError
from kvlease.groups import GroupShape, Keeps, keeps_everything
from kvlease.ids import BYTES_PER_KEY, LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import (
    Copy,
    Direction,
    Explained,
    Missed,
    MissReason,
    Outcome,
    Reserved,
    Tier,
)
from kvleased.core.prefix.explaining import RUNS_MAX
from kvleased.core.untold import Silence
from kvleased.core.verbs.asking import LABELS_MAX
from tests.unit.service.core.builders import (
    EPOCH,
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reserve,
    answer,
    cached,
    commit,
    fail,
    keys,
    land,
    on_host,
    records,
    release,
    reserve,
    the_copy,
    woken,
)
from tests.unit.service.core.grouped import FULL, WINDOW, cache_of
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_remote_cache,
    a_tiered_cache,
    doc,
    on_disk,
    probed,
    the_copies,
    the_probe,
    turn,
)


def explain(cache: Cache, lease_id: LeaseId, worker_id: WorkerId | None = None) -> Explained:
    """Explain a lease."""
    command = c.Explain(worker_id=worker_id, lease_id=lease_id)
    return answer(cache.handle(command, 9.0), Explained)


def told(cache: Cache, num_blocks: int, prefix: bytes, **others: Any) -> tuple[Missed, ...]:
    """Reserve with an explanation, and return the misses."""
    command = replace(a_reserve(num_blocks, "asked", prefix, **others), explain=True)
    return answer(cache.handle(command, 8.0), Reserved).misses


def spans(misses: tuple[Missed, ...]) -> list[tuple[int, int, MissReason]]:
    """Return the place, length and reason of each run of misses."""
    return [(one.first_block, one.num_blocks, one.reason) for one in misses]


# One group ------------------------------------------------------------------------------------------------------------


def test_full_hit_has_no_misses() -> None:
    """If all blocks are found, there are no misses to explain."""
    cache = a_cache(8)
    cached(cache, keys(1, 2))

    assert told(cache, 2, keys(1, 2)) == ()


def test_reserve_tells_misses_only_where_asked() -> None:
    """A reserve that does not ask for misses is told none, and its lease can be explained later."""
    cache = a_cache(8)
    lease = reserve(cache, 2, prefix=keys(1, 2))

    assert lease.misses == ()
    assert spans(explain(cache, lease.lease_id).misses) == [(0, 2, MissReason.NEVER_COMMITTED)]


def test_repeated_reserve_tells_what_the_first_would_have_told() -> None:
    """A repeated reserve may ask for the misses although the first call did not."""
    cache = a_cache(8)
    first = reserve(cache, 2, "asked", keys(1, 2))
    commit(cache, first.lease_id, keys(1, 2))

    assert spans(told(cache, 2, keys(1, 2))) == [(0, 2, MissReason.NEVER_COMMITTED)]


def test_unknown_keys_tell_how_much_is_remembered() -> None:
    """The miss of an unknown key tells how far back the history goes."""
    cache = a_full_cache(4, num_slots=0)
    cache.handle(c.Evict(num_blocks=3), 5.0)

    (miss,) = told(cache, 2, keys(91, 92))

    assert (miss.reason, miss.num_remembered, miss.remembered_since) == (
        MissReason.NEVER_COMMITTED,
        3,
        5.0,
    )


def test_eviction_names_policy_tenant_and_time() -> None:
    """The miss of an evicted block names the tenant that needed its room, the policy, and the time."""
    cache = a_full_cache(8, num_slots=0)
    release(cache, reserve(cache, 2, worker_id=MATE, now=3.0).lease_id, worker_id=MATE)

    (miss,) = told(cache, 8, keys(*range(8)))

    assert (miss.first_block, miss.num_blocks, miss.reason) == (6, 2, MissReason.EVICTED)
    assert (miss.tier, miss.policy, miss.tenant) == (Tier.DEVICE, "leaf-lru", TENANT)
    assert (miss.first_left_at, miss.last_left_at) == (3.0, 3.0)
    assert miss.num_remembered == 0


def test_run_spans_the_times_of_its_blocks() -> None:
    """Blocks that left for one reason are one run, whatever times they left at."""
    cache = a_full_cache(8, num_slots=0)
    for second in (3.0, 4.0):
        lease = reserve(cache, int(second) - 1, f"at {second}", now=second)
        release(cache, lease.lease_id)

    (miss,) = told(cache, 8, keys(*range(8)))

    assert (miss.first_block, miss.num_blocks) == (5, 3)
    assert (miss.first_left_at, miss.last_left_at) == (3.0, 4.0)


def test_evict_call_has_no_policy() -> None:
    """No policy chose the blocks that an evict call names."""
    cache = a_full_cache(4, num_slots=0)
    cache.handle(c.Evict(keys=keys(3)), 5.0)

    (miss,) = told(cache, 4, keys(0, 1, 2, 3))

    assert (miss.reason, miss.tier, miss.policy, miss.tenant) == (
        MissReason.EVICTED,
        Tier.DEVICE,
        "",
        0,
    )


def test_cached_blocks_behind_a_miss_are_told_apart() -> None:
    """Cached blocks behind a miss have a reason of their own: they are of no use there."""
    cache = a_full_cache(4, num_slots=0)
    cache.handle(c.Evict(keys=keys(1)), 5.0)

    misses = told(cache, 3, keys(0, 1, 2))

    assert spans(misses) == [(1, 1, MissReason.EVICTED), (2, 1, MissReason.BEHIND_A_MISS)]
    assert misses[1].tier is None


def test_blocks_below_are_missed_by_who_cannot_wait() -> None:
    """A call without wait_ms is told that a lower tier has the blocks."""
    cache = a_cache(8)
    on_host(cache, keys(1, 2))

    (miss,) = told(cache, 2, keys(1, 2))

    assert (miss.reason, miss.tier, miss.is_below) == (MissReason.EVICTED, Tier.DEVICE, True)


def test_blocks_that_came_to_a_lower_tier_unseen_were_evicted_too() -> None:
    """After a restart, blocks of a lower tier count as evicted from the device, though that is not remembered."""
    cache = a_cache(8)
    on_host(cache, keys(1))
    workers = {WORKER: TENANT}
    after = Cache.recovered(cache.shape, records(cache), EPOCH, workers, 0.0)

    (miss,) = told(after, 1, keys(1))

    assert (miss.reason, miss.tier, miss.is_below) == (MissReason.EVICTED, Tier.DEVICE, True)
    assert miss.last_left_at is None


@pytest.mark.parametrize("is_on", [False, True], ids=["still off", "works again"])
def test_tier_that_is_off_is_named(is_on: bool) -> None:
    """Blocks of a tier that was off are missed for that reason, also if the tier works when somebody asks."""
    cache = a_cache(8)
    on_host(cache, keys(1, 2))
    turn(cache, Tier.HOST, on=False)
    command = a_reserve(3, "asked", keys(1, 2, 3), wait_ms=WAIT_MS)
    lease = answer(cache.handle(command, 0.0), Reserved)
    turn(cache, Tier.HOST, on=is_on)

    first, second = explain(cache, lease.lease_id).misses

    assert (first.reason, first.tier) == (MissReason.TIER_OFF, Tier.HOST)
    assert second.reason is MissReason.NEVER_COMMITTED


def test_tier_that_stops_after_the_grant_is_no_reason() -> None:
    """A block that its call could not wait for is told as such, also if its tier has stopped working meanwhile."""
    cache = a_cache(8)
    on_host(cache, keys(1, 2))
    lease = reserve(cache, 2, prefix=keys(1, 2))
    turn(cache, Tier.HOST, on=False)

    (miss,) = explain(cache, lease.lease_id).misses

    assert (miss.reason, miss.tier, miss.is_below) == (MissReason.EVICTED, Tier.DEVICE, True)


def test_blocks_of_the_host_pool_are_not_looked_for_in_the_remote_store() -> None:
    """A call that cannot wait is told of the host pool alone if that has the blocks, else of the remote store."""
    cache = a_remote_cache()
    on_host(cache, keys(1, 2))
    lease = reserve(cache, 3, prefix=keys(1, 2, 3))

    below, unknown = explain(cache, lease.lease_id).misses

    assert (below.is_below, below.remote_silence) == (True, None)
    assert (unknown.is_below, unknown.remote_silence) == (False, Silence.NO_WAIT)


@pytest.mark.parametrize(
    ("wait_ms", "is_on", "silence"),
    [
        pytest.param(WAIT_MS, False, Silence.OFF, id="would be asked"),
        pytest.param(0, False, Silence.NO_WAIT, id="no time to ask"),
        pytest.param(0, True, Silence.NO_WAIT, id="no time to ask, works again"),
        pytest.param(WAIT_MS, True, Silence.OFF, id="works again"),
    ],
)
def test_remote_store_that_is_off_is_told(
    wait_ms: int, is_on: bool, silence: Silence | None
) -> None:
    """Unknown blocks are told as possibly in a remote store that was off, or that the call had no time to ask."""
    cache = a_remote_cache()
    cached(cache, keys(1, 3))
    turn(cache, Tier.REMOTE, on=False)
    command = a_reserve(3, "asked", keys(1, 2, 3), wait_ms=wait_ms)
    lease = answer(cache.handle(command, 0.0), Reserved)
    turn(cache, Tier.REMOTE, on=is_on)

    unknown, behind = explain(cache, lease.lease_id).misses

    assert (unknown.reason, unknown.remote_silence) == (MissReason.NEVER_COMMITTED, silence)
    assert (behind.reason, behind.remote_silence) == (MissReason.BEHIND_A_MISS, None)


def ends_without_an_answer(cache: Cache, outcome: Outcome) -> Outcome:
    """Let the remote store give no answer."""
    return probed(cache, the_probe(outcome))


def ends_by_its_time(cache: Cache, outcome: Outcome) -> Outcome:
    """Let a call's time run out before there is an answer."""
    the_probe(outcome)
    return cache.handle(c.Tick(), WAIT_MS / 1000)


def ends_with_an_answer(cache: Cache, outcome: Outcome) -> Outcome:
    """Let the remote store answer that it has nothing."""
    return probed(cache, the_probe(outcome), 0, 0, 0)


@pytest.mark.parametrize(
    ("end", "silence"),
    [
        pytest.param(ends_without_an_answer, Silence.UNANSWERED, id="no answer"),
        pytest.param(ends_by_its_time, Silence.UNANSWERED, id="none in time"),
        pytest.param(ends_with_an_answer, None, id="answered"),
    ],
)
def test_remote_store_that_did_not_answer_is_told(
    end: Callable[[Cache, Outcome], Outcome], silence: Silence | None
) -> None:
    """If the remote store did not answer a call, its unknown blocks are told as possibly there, be it on or off."""
    cache = a_remote_cache()
    cached(cache, keys(1, 3))
    outcome = cache.handle(replace(a_patient_reserve(keys(1, 2, 3), "asked"), explain=True), 0.0)

    ended = end(cache, outcome)

    unknown, behind = woken(ended, outcome.ticket, Reserved).misses
    assert (unknown.reason, unknown.remote_silence) == (MissReason.NEVER_COMMITTED, silence)
    assert (behind.reason, behind.remote_silence) == (MissReason.BEHIND_A_MISS, None)


def test_blocks_that_the_remote_store_was_not_asked_for_are_told() -> None:
    """Of a prefix that is too long for one question, the blocks behind it are told as possibly in the remote store."""
    cache = a_remote_cache(2 * LABELS_MAX, 8)
    cached(cache, doc(LABELS_MAX + 8)[: 2 * BYTES_PER_KEY])
    asked = replace(a_patient_reserve(doc(LABELS_MAX + 8), "asked"), explain=True)
    outcome = cache.handle(asked, 0.0)

    ended = probed(cache, the_probe(outcome), *[0] * LABELS_MAX)

    told, untold = woken(ended, outcome.ticket, Reserved).misses
    assert (told.first_block, told.num_blocks, told.remote_silence) == (2, LABELS_MAX, None)
    assert (untold.first_block, untold.num_blocks) == (2 + LABELS_MAX, 6)
    assert untold.remote_silence is Silence.UNASKED


def test_blocks_behind_an_answer_that_came_in_part_are_told() -> None:
    """Of what the remote store told of in time, the unknown is told as such; of the rest, as possibly there."""
    cache = a_remote_cache()
    cached(cache, doc(2))
    outcome = cache.handle(replace(a_patient_reserve(doc(6), "asked"), explain=True), 0.0)

    ended = probed(cache, the_probe(outcome), 0, 0)

    told, untold = woken(ended, outcome.ticket, Reserved).misses
    assert (told.first_block, told.num_blocks, told.remote_silence) == (2, 2, None)
    assert (untold.first_block, untold.num_blocks) == (4, 2)
    assert untold.remote_silence is Silence.UNANSWERED


def test_keys_that_some_group_was_not_asked_for_are_told() -> None:
    """In a cache of several groups the question ends where the first block of any group found no room in it."""
    groups = [
        replace(one, table_blocks=LABELS_MAX, max_blocks=LABELS_MAX) for one in (FULL, WINDOW)
    ]
    cache = cache_of(*groups, num_blocks=4 * LABELS_MAX, uses_remote=True)
    asked = replace(a_patient_reserve(doc(LABELS_MAX), "asked"), explain=True)
    outcome = cache.handle(asked, 0.0)

    ended = probed(cache, the_probe(outcome), *[0] * LABELS_MAX)

    told, untold = woken(ended, outcome.ticket, Reserved).misses
    assert (told.first_block, told.num_blocks) == (0, LABELS_MAX // 2)
    assert [told.remote_silence, untold.remote_silence] == [None, Silence.UNASKED]


def test_who_starts_over_is_told_that_the_remote_store_did_not_answer() -> None:
    """The question is asked once, and a copy that fails does not change what is known of its answer."""
    cache = a_remote_cache()
    on_host(cache, keys(1))
    outcome = cache.handle(replace(a_patient_reserve(keys(1, 2), "asked"), explain=True), 0.0)
    loading = ends_without_an_answer(cache, outcome)

    ended = fail(cache, the_copy(loading))

    dropped, unknown = woken(ended, outcome.ticket, Reserved).misses
    assert (dropped.reason, dropped.tier) == (MissReason.DROPPED, Tier.HOST)
    assert (unknown.reason, unknown.remote_silence) == (
        MissReason.NEVER_COMMITTED,
        Silence.UNANSWERED,
    )


def test_cache_without_a_remote_store_tells_of_none() -> None:
    """After a restart the stores count as off until they report; a store that does not exist is not told of."""
    cache = a_cache(8)
    after = Cache.recovered(cache.shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0)
    command = replace(a_reserve(1, "asked", keys(1), wait_ms=WAIT_MS), explain=True)

    (miss,) = answer(after.handle(command, 0.0), Reserved).misses

    assert miss.remote_silence is None


def test_damaged_slot_is_a_checksum_miss() -> None:
    """The call that missed damaged bytes is told of them, and so are later ones."""
    cache = a_cache(8)
    on_host(cache, keys(1))
    command = replace(a_reserve(1, "asked", keys(1), wait_ms=WAIT_MS), explain=True)
    outcome = cache.handle(command, 0.0)

    ended = land(cache, the_copy(outcome), failed=(0,))

    (miss,) = woken(ended, outcome.ticket, Reserved).misses
    assert (miss.reason, miss.tier) == (MissReason.CHECKSUM, Tier.HOST)


@pytest.mark.parametrize(
    ("command", "reason", "tier"),
    [
        pytest.param(c.Clear(), MissReason.CLEARED, Tier.DISK, id="clear"),
        pytest.param(
            c.Resize(tier=Tier.DEVICE, num_blocks=1), MissReason.RESIZED, Tier.DEVICE, id="resize"
        ),
        pytest.param(
            c.Resize(tier=Tier.HOST, num_blocks=0),
            MissReason.RESIZED,
            Tier.HOST,
            id="resize of a host pool",
        ),
        pytest.param(
            c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True),
            MissReason.STORE_LOST,
            Tier.DISK,
            id="loss of a store",
        ),
    ],
)
def test_who_took_blocks_from_a_tier_is_told(
    command: c.Command, reason: MissReason, tier: Tier
) -> None:
    """What a clear, a resize or the loss of a store took has a reason of its own: no copy of it has failed."""
    cache = a_tiered_cache(2) if tier is Tier.DISK else a_cache(2)
    put = {Tier.DEVICE: cached, Tier.HOST: on_host, Tier.DISK: on_disk}[tier]
    put(cache, keys(1, 2))
    cache.handle(command, 0.0)

    (miss,) = told(cache, 1, keys(2))

    assert (miss.reason, miss.tier, miss.policy) == (reason, tier, "")
    assert miss.last_left_at is not None
    assert cache.check() == []


def test_failed_copy_makes_a_block_useless() -> None:
    """A call that starts over after a failed copy is told that the block's bytes were not available."""
    cache = a_cache(8)
    on_host(cache, keys(1))
    command = replace(a_reserve(1, "asked", keys(1), wait_ms=WAIT_MS), explain=True)
    outcome = cache.handle(command, 0.0)

    ended = fail(cache, the_copy(outcome))

    (miss,) = woken(ended, outcome.ticket, Reserved).misses
    assert (miss.reason, miss.tier, miss.is_below) == (MissReason.DROPPED, Tier.HOST, False)


def test_value_that_the_remote_store_did_not_give_is_told() -> None:
    """A call that starts over after a remote fetch is told of just those blocks that did not come as written."""
    cache = a_remote_cache()
    outcome = cache.handle(replace(a_patient_reserve(doc(3), "asked"), explain=True), 0.0)
    fetch = the_copies(probed(cache, the_probe(outcome), 1, 1, 0))[Direction.FETCH]

    ended = land(cache, fetch, failed=(0, 1))

    dropped, unknown = woken(ended, outcome.ticket, Reserved).misses
    assert (dropped.reason, dropped.tier, dropped.num_blocks) == (
        MissReason.DROPPED,
        Tier.REMOTE,
        2,
    )
    assert (unknown.reason, unknown.num_blocks) == (MissReason.NEVER_COMMITTED, 1)


@pytest.mark.parametrize("is_late", [False, True], ids=["at the grant", "after it left"])
def test_stolen_key_is_of_no_use(is_late: bool) -> None:
    """A call with another tenant's key is told that the key is another's, whenever it asks."""
    cache = a_cache(8, num_slots=0)
    cached(cache, keys(1))
    lease = reserve(cache, 1, prefix=keys(1), worker_id=STRANGER)
    if is_late:
        cache.handle(c.Evict(keys=keys(1)), 5.0)

    (miss,) = explain(cache, lease.lease_id).misses

    assert (miss.reason, miss.tier) == (MissReason.OTHER_TENANT, None)


@pytest.mark.parametrize(
    ("holder", "reason"), [(WORKER, MissReason.BEHIND_A_MISS), (STRANGER, MissReason.OTHER_TENANT)]
)
def test_slot_under_a_stolen_key_is_no_reason_where_ones_own_is_below(
    holder: WorkerId, reason: MissReason
) -> None:
    """What another tenant has in the host pool under a stolen key is the reason only of who has no block of its own."""
    cache = a_tiered_cache(16)
    on_host(cache, keys(2), worker_id=STRANGER)
    on_disk(cache, keys(2), TENANT if holder == WORKER else OTHER_TENANT)

    unknown, behind = told(cache, 2, keys(1, 2), wait_ms=WAIT_MS)

    assert (unknown.reason, behind.reason) == (MissReason.NEVER_COMMITTED, reason)


@pytest.mark.parametrize("put", [cached, on_host])
@pytest.mark.parametrize("is_late", [False, True], ids=["at the grant", "after it left"])
def test_departure_is_the_reason_though_another_tenant_stole_the_key(
    put: Callable[..., None], is_late: bool
) -> None:
    """Who had a block and lost it is told how, whatever another tenant keeps under its key, and until when."""
    cache = a_cache(8)
    cached(cache, keys(1))
    cache.handle(c.Clear(), 5.0)
    put(cache, keys(1), worker_id=STRANGER)
    command = a_reserve(1, "asked", keys(1), wait_ms=WAIT_MS)
    lease = answer(cache.handle(command, 6.0), Reserved)
    if is_late:
        cache.handle(c.Clear(), 7.0)

    (miss,) = explain(cache, lease.lease_id).misses

    assert (miss.reason, miss.tier, miss.last_left_at) == (MissReason.CLEARED, Tier.DEVICE, 5.0)


def test_eviction_of_another_tenants_block_is_no_reason() -> None:
    """What became of another tenant's block under a stolen key is not told."""
    cache = a_cache(8, num_slots=0)
    cached(cache, keys(1))
    cache.handle(c.Evict(keys=keys(1)), 5.0)
    lease = reserve(cache, 1, prefix=keys(1), worker_id=STRANGER)

    assert spans(explain(cache, lease.lease_id).misses) == [(0, 1, MissReason.NEVER_COMMITTED)]


@pytest.mark.parametrize(
    ("num_tokens", "num_keys", "span"),
    [
        pytest.param(3, 0, [(0, 1, 3)], id="no block at all"),
        pytest.param(10, 2, [(2, 1, 2)], id="tail"),
        pytest.param(8, 2, [], id="whole blocks"),
        pytest.param(20, 2, [], id="nobody looks for what has no key"),
    ],
)
def test_tail_that_fills_no_block_is_told(
    num_tokens: int, num_keys: int, span: list[tuple[int, int, int]]
) -> None:
    """The tokens at the end that do not fill a block are never found, and are told by their number."""
    cache = a_cache(8)
    cached(cache, keys(0, 1))
    command = replace(
        a_reserve(1, "asked", keys(*range(num_keys))), num_tokens=num_tokens, explain=True
    )

    misses = answer(cache.handle(command, 0.0), Reserved).misses

    assert [(one.first_block, one.num_blocks, one.num_tokens) for one in misses] == span
    assert {one.reason for one in misses} <= {MissReason.SHORTER_THAN_A_BLOCK}


def test_answer_has_so_many_runs_at_most() -> None:
    """The last run of an answer counts all blocks for which the answer has no room."""
    num_blocks = 2 * RUNS_MAX + 8
    cache = a_cache(num_blocks, num_slots=0)
    cached(cache, keys(*range(num_blocks)))
    cache.handle(c.Evict(keys=keys(*range(0, num_blocks, 2))), 5.0)

    misses = told(cache, 2 * RUNS_MAX + 3, keys(*range(2 * RUNS_MAX + 3)))

    assert len(misses) == RUNS_MAX
    assert (misses[-1].num_runs_left_out, misses[-1].num_blocks_left_out) == (
        RUNS_MAX + 3,
        RUNS_MAX + 3,
    )


# Whose leases ---------------------------------------------------------------------------------------------------------


def test_lease_is_explained_to_its_worker_and_to_operators() -> None:
    """A worker is told of its own leases only, and an operator of all."""
    cache = a_cache(8)
    cached(cache, keys(1))
    lease = reserve(cache, 2, prefix=keys(1))

    explained = explain(cache, lease.lease_id, WORKER)

    assert explained == explain(cache, lease.lease_id)
    assert explained.hit_tokens == {Tier.DEVICE: TOKENS_PER_BLOCK}
    assert explained.num_tokens == 2 * TOKENS_PER_BLOCK
    with pytest.raises(NotYoursError):
        explain(cache, lease.lease_id, MATE)
    with pytest.raises(UnknownLeaseError):
        explain(cache, LeaseId(1))


def test_fork_has_no_misses() -> None:
    """A fork looks for no prefix, so it has no misses."""
    cache = a_cache(8)
    lease = reserve(cache, 2)
    commit(cache, lease.lease_id, keys(1))
    command = c.Fork(worker_id=WORKER, lease_id=lease.lease_id, request_id="fork", num_tokens=4)
    fork = cache._state.leases.find(WORKER, "fork") if cache.handle(command, 0.0) else None

    assert fork is not None
    assert explain(cache, fork.lease_id).misses == ()


def test_lease_of_an_earlier_life_is_not_explained() -> None:
    """After a restart, nobody knows why an earlier lease was granted as it was."""
    cache = a_cache(8)
    lease = reserve(cache, 2, prefix=keys(1))
    after = Cache.recovered(cache.shape, records(cache), EPOCH, {WORKER: TENANT}, 0.0)

    with pytest.raises(WrongStateError, match="before the daemon restarted"):
        explain(after, lease.lease_id)


# Several groups -------------------------------------------------------------------------------------------------------

WINDOWED = (
    keeps_everything(TOKENS_PER_BLOCK, 8),
    GroupShape(
        keeps=Keeps.WINDOW,
        tokens_per_block=TOKENS_PER_BLOCK,
        keys_per_block=1,
        table_blocks=8,
        max_blocks=8,
        kept_tokens=2 * TOKENS_PER_BLOCK,
    ),
)


def windowed(**numbers: Any) -> Cache:
    """Return a cache with all keys cached, of a group that keeps everything and one that keeps two blocks."""
    cache = a_cache(32, num_slots=0, groups=WINDOWED, **numbers)
    cached(cache, keys(1, 2, 3, 4))
    cache.settle()
    return cache


def block_of(cache: Cache, group: int, place: int) -> bytes:
    """Return the key of a group's block that ends a prefix of `place` + 1 keys."""
    return cache._state.covering.every_key(keys(place + 1))[group * 32 :][:32]


def lose(cache: Cache, *found: bytes) -> None:
    """Evict blocks by the keys that they are kept under."""
    device = cache._state.device
    device.evict(device.index.find(b"".join(found)))


def test_group_that_limits_a_prefix_is_named() -> None:
    """The reason is the first missing block of those that a longer prefix needs in each group."""
    cache = windowed()
    lose(cache, block_of(cache, 1, 1), block_of(cache, 1, 3))

    misses = told(cache, 4, keys(1, 2, 3, 4))

    assert spans(misses) == [(1, 3, MissReason.EVICTED)]
    assert misses[0].group == 1


def test_groups_are_told_apart() -> None:
    """A missing block of a group that keeps everything is the reason once; cached blocks after it are behind a miss."""
    cache = windowed()
    lose(cache, block_of(cache, 0, 1), block_of(cache, 1, 3))

    misses = told(cache, 4, keys(1, 2, 3, 4))

    assert [(one.first_block, one.num_blocks, one.reason, one.group) for one in misses] == [
        (1, 1, MissReason.EVICTED, 0),
        (2, 1, MissReason.BEHIND_A_MISS, 0),
        (3, 1, MissReason.EVICTED, 1),
    ]


def test_prefix_ends_where_blocks_of_all_groups_do() -> None:
    """If a group's blocks are two keys long, a prefix of one key is too short for it."""
    wide = replace(keeps_everything(2 * TOKENS_PER_BLOCK, 8), keys_per_block=2)
    groups = (keeps_everything(TOKENS_PER_BLOCK, 8), wide)
    cache = a_cache(32, groups=groups, hit_tokens=2 * TOKENS_PER_BLOCK)

    misses = told(cache, 5, keys(1, 2, 3, 4, 5))

    assert spans(misses) == [
        (0, 4, MissReason.NEVER_COMMITTED),
        (4, 1, MissReason.SHORTER_THAN_A_BLOCK),
    ]


def test_drafted_group_needs_a_block_more() -> None:
    """If a draft model reads a group, the last block of a chain cannot be used."""
    groups = (replace(keeps_everything(TOKENS_PER_BLOCK, 8), is_drafted=True),)
    cache = a_cache(8, groups=groups)
    cached(cache, keys(1, 2))

    (miss,) = told(cache, 3, keys(1, 2))

    assert (miss.first_block, miss.num_blocks) == (1, 1)
    assert (miss.reason, miss.num_tokens) == (MissReason.SHORTER_THAN_A_BLOCK, TOKENS_PER_BLOCK)


def test_cache_that_shares_nothing_finds_nothing() -> None:
    """If prefixes are not shared, no block was ever committed."""
    cache = a_cache(8, shares_prefixes=False)
    cached(cache, keys(1, 2))

    assert spans(told(cache, 2, keys(1, 2))) == [(0, 2, MissReason.NEVER_COMMITTED)]


# A full log -----------------------------------------------------------------------------------------------------------

Leaving = tuple[MissReason, Tier, float]


@dataclass
class Log:
    """A cache, and a log of everything that ever left one of its tiers."""

    cache: Cache
    now: float = 0.0
    left: dict[int, Leaving] = field(default_factory=dict)
    chosen: dict[int, tuple[str, int] | None] = field(default_factory=dict)
    """The policy and the tenant of each last departure, if the command alone decides them."""
    copies: list[Copy] = field(default_factory=list)
    leases: dict[LeaseId, list[tuple[Any, ...]]] = field(default_factory=dict)
    """The expected reason of each block of a lease, as if all blocks had been missing."""

    def there(self) -> dict[Tier, set[int]]:
        """Return the keys that are in each tier."""
        found = {}
        for tier, column in (
            (Tier.DEVICE, records(self.cache).device),
            (Tier.HOST, records(self.cache).host),
        ):
            ready = column.key[column.state == State.READY]
            found[tier] = {int.from_bytes(key.tobytes(), "little") for key in ready}
        return found

    def send(self, command: c.Command) -> Outcome | None:
        """Carry out a command, and log what left because of it."""
        self.cache.settle()
        self.now += 1.0
        before, damaged = self.there(), self.damaged(command)
        try:
            outcome = self.cache.handle(command, self.now)
            effects = outcome.effects
        except PoolFullError:
            outcome, effects = None, self.cache.take_effects()
        self.copies += [effect for effect in effects if isinstance(effect, Copy)]
        after = self.there()
        # If a block leaves both tiers at once, its departure from the device is the last one.
        for tier in (Tier.HOST, Tier.DEVICE):
            for key in before[tier] - after[tier]:
                reason = (
                    MissReason.CHECKSUM
                    if tier is Tier.HOST and key in damaged
                    else MissReason.EVICTED
                )
                self.left[key] = (reason, tier, self.now)
                self.chosen[key] = _chosen(command, tier)
        return outcome

    def damaged(self, command: c.Command) -> set[int]:
        """Return the keys of the slots whose bytes are wrong."""
        if not isinstance(command, c.CopyDone):
            return set()
        (copy,) = [one for one in self.copies if one.copy_id == command.copy_id]
        column = records(self.cache).host.key
        slots = [int.from_bytes(copy.source_ids[4 * at :][:4], "little") for at in command.failed]
        return {int.from_bytes(column[slot].tobytes(), "little") for slot in slots}

    def expected(self, request: c.Reserve, numbers: list[int]) -> list[tuple[Any, ...]]:
        """Return the expected reason of each block of a request, as if all of them were missing."""
        there, found = self.there(), []
        for number in numbers:
            reason, tier, at = self.left.get(number, (MissReason.NEVER_COMMITTED, None, None))
            if number in there[Tier.DEVICE] or (number in there[Tier.HOST] and request.wait_ms):
                reason, tier, at = MissReason.BEHIND_A_MISS, None, None
            is_below = number in there[Tier.HOST] and reason is MissReason.EVICTED
            chosen = self.chosen.get(number) if reason is MissReason.EVICTED else None
            found.append((reason, tier, at, is_below, chosen))
        return found


def _chosen(command: c.Command, tier: Tier) -> tuple[str, int] | None:
    """Return the policy and the tenant of a command's departures from a tier, or None if those may differ."""
    if isinstance(command, c.Reserve):
        return "leaf-lru", TENANT
    if isinstance(command, c.Evict):
        return ("", 0) if tier is Tier.DEVICE else ("leaf-lru", 0)
    return None


KINDS = (
    "reserve",
    "reserve",
    "reserve",
    "end",
    "end",
    "evict",
    "coldest",
    "land",
    "damage",
    "explain",
)


def numbers_of(chain: int, num_blocks: int) -> list[int]:
    """Return the keys of a chain; all begin with the same two."""
    return [1, 2, *(100 * chain + at for at in range(3, 9))][:num_blocks]


def check(log: Log, lease_id: LeaseId) -> None:
    """Compare the explanation of a lease, now, with the log at its grant."""
    wanted = log.leases[lease_id]
    explained = explain(log.cache, lease_id)
    num_hits = sum(explained.hit_tokens.values()) // TOKENS_PER_BLOCK
    found = [
        (miss.reason, miss.tier, miss.is_below, (miss.policy, miss.tenant))
        for miss in explained.misses
        for _ in range(miss.num_blocks)
    ]
    assert len(found) == len(wanted[num_hits:])
    for one, (reason, tier, _, is_below, chosen) in zip(found, wanted[num_hits:], strict=True):
        assert one == (reason, tier, is_below, one[3] if chosen is None else chosen)
    times = [at for _, _, at, *_ in wanted[num_hits:] if at is not None]
    edges = [at for miss in explained.misses for at in (miss.first_left_at, miss.last_left_at)]
    told_at = [at for at in edges if at is not None]
    assert (min(told_at, default=0), max(told_at, default=0)) == (
        min(times, default=0),
        max(times, default=0),
    )


def ask(log: Log, chain: int, count: int, *, may_wait: bool) -> None:
    """Reserve the blocks of a chain, and commit all that is granted at once."""
    state, numbers = log.cache._state, numbers_of(chain, count)
    newest = state.id_count.newest
    request = a_reserve(count, f"at {log.now}", keys(*numbers), wait_ms=WAIT_MS if may_wait else 0)
    log.cache.settle()
    wanted = log.expected(request, numbers)
    outcome = log.send(request)
    lease_id = max(state.leases.by_id, default=LeaseId(0))
    if lease_id > newest:
        log.leases[lease_id] = wanted
        if count % 2:
            # The others are explained after much has happened.
            check(log, lease_id)
        if outcome is not None and outcome.reply is not None:
            log.send(a_commit(lease_id, request.keys))
    elif outcome is not None and outcome.ticket is not None:
        log.send(c.Cancel(ticket=outcome.ticket))


def a_commit(lease_id: LeaseId, packed: bytes) -> c.Commit:
    """Return the command that commits all blocks of a lease."""
    num_tokens = len(packed) // 32 * TOKENS_PER_BLOCK
    return c.Commit(
        worker_id=WORKER, lease_id=lease_id, num_tokens=num_tokens, first_block=0, keys=packed
    )


def act(log: Log, kind: str, chain: int, count: int, *, flag: bool) -> None:
    """Do one act other than a reserve."""
    if kind == "evict":
        last = count if flag else None
        log.send(c.Evict(keys=keys(*numbers_of(chain, 6)[count - 1 : last])))
    elif kind == "coldest":
        log.send(c.Evict(num_blocks=count))
    elif kind in ("land", "damage") and log.copies:
        copy = log.copies[chain % len(log.copies)]
        from_host = copy.direction.value == "host_to_device"
        failed = (0,) if kind == "damage" and from_host else ()
        log.send(c.CopyDone(copy_id=copy.copy_id, failed=failed))
        log.copies.remove(copy)
    living = sorted(log.leases.keys() & log.cache._state.leases.by_id.keys())
    if living and kind == "explain":
        check(log, living[chain % len(living)])
    if living and kind == "end":
        log.send(c.Release(worker_id=WORKER, lease_id=living[chain % len(living)]))


@pytest.mark.parametrize("seed", range(60))
def test_explanations_agree_with_a_full_log(seed: int) -> None:
    """For each block of each reserve the reason, the tier and the time are those of the log, whenever one asks."""
    draw = Random(seed)  # noqa: S311 - a history that can be had again
    log, sound = Log(a_cache(8, draw.choice((0, 3, 8)))), Sound()

    for _ in range(150):
        kind, chain, count = draw.choice(KINDS), draw.randrange(4), draw.randint(1, 6)
        flag = draw.random() < 0.5
        if kind == "reserve":
            ask(log, chain, count, may_wait=flag)
        else:
            act(log, kind, chain, count, flag=flag)
        assert log.cache.check(sound) == []

    assert len(log.leases) > 10
