"""Laws of the remote store: a call that may wait asks it before it is served, and only its bytes prove its answer."""

from collections.abc import Callable

import pytest

from kvlease.errors import (
    BusyError,
    DrainingError,
    IdReusedError,
    InvalidError,
    PoolFullError,
    UnknownWorkerError,
)
from kvlease.ids import WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Direction, Mover, Outcome, Reserved, Tier
from kvleased.core.verbs.asking import LABELS_MAX
from tests.unit.service.core.builders import (
    MATE,
    OTHER_TENANT,
    STRANGER,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_reserve,
    answer,
    cached,
    copies,
    fail,
    ids,
    keys,
    land,
    lose,
    on_host,
    records,
    release,
    reserve,
    the_copy,
    tick,
    wait_for,
    wakes,
    woken,
)
from tests.unit.service.core.grouped import FULL, WIDE, WINDOW, cache_of, chain, crossed
from tests.unit.service.core.rank_builders import LEFT, RIGHT, an_engine
from tests.unit.service.core.tier_builders import (
    a_patient_reserve,
    a_remote_cache,
    doc,
    label_keys,
    label_numbers,
    on_disk,
    probed,
    probes,
    the_copies,
    the_probe,
    turn,
)


def fetching(cache: Cache, packed: bytes, request_id: str = "r") -> tuple[Copy, int | None]:
    """Have a reserve fetch its prefix from the remote store; return the copy and the caller's ticket."""
    outcome = cache.handle(a_patient_reserve(packed, request_id), 0.0)
    answered = probed(cache, the_probe(outcome), *[1] * (len(packed) // 32))
    return the_copies(answered)[Direction.FETCH], outcome.ticket


# Asking ---------------------------------------------------------------------------------------------------------------


def test_patient_reserve_asks_for_what_nobody_has() -> None:
    """The store is asked for the blocks that no tier has, from the first of them on."""
    cache = a_remote_cache(num_disk_slots=4)
    cached(cache, keys(1, 3))

    outcome = cache.handle(a_patient_reserve(doc(4)), 0.0)

    probe = the_probe(outcome)
    assert label_keys(probe.labels) == keys(2, 4)
    assert label_numbers(probe.labels, "position") == [1, 3]
    assert label_numbers(probe.labels, "tenant") == [TENANT] * 2
    assert label_numbers(probe.labels, "generation") == [0, 0]
    assert outcome.ticket is not None
    assert cache.census().num_asking == 1
    assert cache.census().num_waiting == 0
    assert cache.check() == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(a_reserve(2, "r", doc(2)), id="impatient"),
        pytest.param(a_reserve(2, "r", wait_ms=WAIT_MS), id="no keys"),
        pytest.param(a_reserve(2, "r", keys(9), wait_ms=WAIT_MS), id="all there"),
    ],
)
def test_call_that_has_nothing_to_ask_for_is_served_at_once(command: c.Reserve) -> None:
    """Only a call that may wait, and whose prefix could be longer, asks the store."""
    cache = a_remote_cache()
    cached(cache, keys(9))

    outcome = cache.handle(command, 0.0)

    answer(outcome, Reserved)
    assert probes(outcome) == []


def test_nobody_asks_where_prefixes_are_not_shared() -> None:
    """A cache that shares no prefixes asks for none."""
    cache = a_remote_cache(shares_prefixes=False)

    answer(cache.handle(a_patient_reserve(doc(2)), 0.0), Reserved)


def test_nobody_asks_a_store_that_is_off() -> None:
    """While the store is off, calls are served without it."""
    cache = a_remote_cache()
    turn(cache, Tier.REMOTE, on=False)

    answer(cache.handle(a_patient_reserve(doc(2), "a"), 0.0), Reserved)
    turn(cache, Tier.REMOTE, on=True)

    assert len(probes(cache.handle(a_patient_reserve(doc(2), "b"), 0.0))) == 1


def test_no_more_is_asked_for_than_fits_one_question() -> None:
    """Blocks beyond the most that one question may name are computed."""
    cache = a_remote_cache(2 * LABELS_MAX, 8)

    outcome = cache.handle(a_patient_reserve(doc(LABELS_MAX + 5)), 0.0)

    assert label_keys(the_probe(outcome).labels) == doc(LABELS_MAX)


def test_malformed_call_does_not_ask() -> None:
    """A call that names a cached block twice, or asks for an invalid wait, is refused without a question."""
    cache = cache_of(FULL, WINDOW, uses_remote=True)
    cached(cache, keys(1))

    with pytest.raises(InvalidError, match="names a block twice"):
        cache.handle(a_reserve(3, "r", crossed(1) + keys(2), wait_ms=WAIT_MS), 0.0)
    with pytest.raises(InvalidError, match="wait_ms"):
        cache.handle(a_reserve(3, "r", keys(1, 2), wait_ms=-1), 0.0)
    assert cache.census().num_asking == 0


def test_keys_that_the_store_has_twice_are_refused() -> None:
    """Keys that name a block of the store twice are refused, in whichever groups those are."""
    cache = cache_of(FULL, WINDOW, uses_remote=True)
    outcome = cache.handle(a_reserve(2, "r", crossed(1), wait_ms=WAIT_MS), 0.0)

    answered = probed(cache, the_probe(outcome), 1, 1, 1, 1)

    woken(answered, outcome.ticket, InvalidError)
    assert cache.check() == []


# Fetching -------------------------------------------------------------------------------------------------------------


def test_reserve_fetches_what_is_there() -> None:
    """The prefix goes on with the blocks of the remote store, and ends where those do."""
    cache = a_remote_cache()
    on_host(cache, keys(2))
    cached(cache, keys(1))
    outcome = cache.handle(a_patient_reserve(doc(6)), 0.0)

    up = the_copies(probed(cache, the_probe(outcome), 1, 1, 0, 1))
    land(cache, up[Direction.RELOAD])
    landed = land(cache, up[Direction.FETCH])

    fetch, lease = up[Direction.FETCH], woken(landed, outcome.ticket, Reserved)
    assert (fetch.source_ids, fetch.checksums) == (b"", bytes(16))
    assert label_keys(fetch.labels) == keys(3, 4)
    assert label_numbers(fetch.labels, "position") == [2, 3]
    assert ids(fetch.target_ids) == ids(lease.block_ids)[2:4]
    assert (lease.device_hit_tokens, lease.host_hit_tokens, lease.disk_hit_tokens) == (4, 4, 0)
    assert lease.remote_hit_tokens == 8
    device = records(cache).device
    assert device.tenant[ids(fetch.target_ids)].tolist() == [TENANT] * 2
    assert device.position[ids(fetch.target_ids)].tolist() == [2, 3]
    assert device.checksum[ids(fetch.target_ids)].tolist() == [0, 0]
    counters = cache.census().counters
    assert (counters["prefix_tokens_remote"], counters["prefix_tokens_computed"]) == (8, 16)
    assert (counters["remote_asked"], counters["remote_present"], counters["remote_loads"]) == (
        4,
        3,
        2,
    )
    assert cache.check() == []


def test_fetched_block_keeps_the_checksum_that_was_taken() -> None:
    """A fetched block has the checksum that the store's mover took when it verified the bytes."""
    cache = a_remote_cache()
    copy, _ = fetching(cache, doc(1))

    cache.handle(c.CopyDone(copy_id=copy.copy_id, checksums=(7).to_bytes(8, "little")), 0.0)

    assert records(cache).device.checksum[ids(copy.target_ids)].tolist() == [7]


@pytest.mark.parametrize("present", [(), (0, 0), (0, 1)], ids=["unknown", "absent", "hole"])
def test_reserve_goes_on_without_what_is_not_there(present: tuple[int, ...]) -> None:
    """An empty answer is a miss."""
    cache = a_remote_cache()
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)

    answered = probed(cache, the_probe(outcome), *present)

    assert woken(answered, outcome.ticket, Reserved).remote_hit_tokens == 0
    assert copies(answered) == []
    assert cache.check() == []


def test_long_prefix_is_fetched() -> None:
    """A prefix of hundreds of blocks is fetched as a short one is."""
    cache = a_remote_cache(400, 8)
    outcome = cache.handle(a_patient_reserve(doc(300)), 0.0)

    answered = probed(cache, the_probe(outcome), *[1] * 250)

    assert len(ids(the_copy(answered).target_ids)) == 250


def test_two_reserves_share_one_fetch() -> None:
    """A reserve waits for bytes that are on their way from the remote store, and does not ask for them."""
    cache = a_remote_cache()
    copy, first = fetching(cache, doc(2), "a")
    second = cache.handle(a_reserve(3, "b", doc(2), worker_id=MATE, wait_ms=WAIT_MS), 0.0)

    landed = land(cache, copy)

    assert (copies(second), probes(second)) == ([], [])
    leases = [woken(landed, ticket, Reserved) for ticket in (first, second.ticket)]
    assert [one.remote_hit_tokens for one in leases] == [8, 0]
    assert cache.check() == []


def test_reserves_that_asked_at_once_share_one_fetch() -> None:
    """If two calls are told of the same blocks, the later one joins the copy of the earlier one."""
    cache = a_remote_cache()
    first = cache.handle(a_patient_reserve(doc(2), "a"), 0.0)
    second = cache.handle(a_patient_reserve(doc(2), "b", more=1), 0.0)

    copy = the_copy(probed(cache, the_probe(first), 1, 1))
    assert copies(probed(cache, the_probe(second), 1, 1)) == []
    landed = land(cache, copy)

    for ticket in (first.ticket, second.ticket):
        woken(landed, ticket, Reserved)
    assert cache.check() == []


def test_block_that_was_not_there_after_all_is_a_miss() -> None:
    """Blocks that the store has lost meanwhile are computed; nothing is retired, and the other blocks are kept."""
    cache = a_remote_cache()
    copy, ticket = fetching(cache, doc(3))

    landed = land(cache, copy, failed=(1,))

    lease = woken(landed, ticket, Reserved)
    assert (lease.device_hit_tokens, lease.remote_hit_tokens) == (0, 4)
    assert cache.census().counters["remote_misses"] == 1
    assert cache.census().device["bad"] == 0
    assert cache.check() == []


@pytest.mark.parametrize("end", [fail, lose], ids=["failed", "lost"])
def test_reserve_starts_over_without_the_remote_store(
    end: Callable[[Cache, Copy], Outcome],
) -> None:
    """If the fetch fails, the call computes the blocks, and does not ask again."""
    cache = a_remote_cache()
    copy, ticket = fetching(cache, doc(3))

    ended = end(cache, copy)

    assert woken(ended, ticket, Reserved).remote_hit_tokens == 0
    assert (copies(ended), probes(ended)) == ([], [])
    cache.handle(c.MoverDied(mover=Mover.REMOTE), 0.0)
    assert cache.check() == []


def test_tokens_found_by_a_first_try_count_where_they_came_from() -> None:
    """Blocks that a first try loaded count for the tier that had them; other calls' blocks count for their tier now."""
    cache = a_remote_cache(16, num_disk_slots=8)
    on_disk(cache, keys(1))
    outcome = cache.handle(a_patient_reserve(doc(3)), 0.0)
    up = the_copies(probed(cache, the_probe(outcome), 1, 0))
    cached(cache, keys(3))

    land(cache, up[Direction.LOAD])
    landed = fail(cache, up[Direction.FETCH])

    lease = woken(landed, outcome.ticket, Reserved)
    assert (lease.device_hit_tokens, lease.disk_hit_tokens, lease.remote_hit_tokens) == (0, 4, 0)
    assert cache.check() == []


# Groups ---------------------------------------------------------------------------------------------------------------


def reserve_tokens(num_tokens: int, packed: bytes, request_id: str = "r") -> c.Reserve:
    """Return the command of a reserve for tokens that may wait."""
    return c.Reserve(
        worker_id=WORKER,
        request_id=request_id,
        keys=packed,
        num_tokens=num_tokens,
        wait_ms=WAIT_MS,
    )


def test_groups_fetch_what_the_prefix_needs() -> None:
    """All groups' blocks are asked for, and those that the longest prefix needs are fetched."""
    cache = cache_of(FULL, WINDOW, WIDE, uses_remote=True)
    outcome = cache.handle(reserve_tokens(20, chain(16)), 0.0)
    probe = the_probe(outcome)
    positions = label_numbers(probe.labels, "position")
    assert positions == sorted([0, 1, 2, 3] * 2 + [1, 3])

    answered = probed(cache, probe, *[1] * len(positions))
    fetch = the_copy(answered)
    landed = land(cache, fetch)

    lease = woken(landed, outcome.ticket, Reserved)
    assert lease.remote_hit_tokens == 16
    # The first group's four, the window's last two, and the wide group's two.
    assert label_numbers(fetch.labels, "position") == [0, 1, 2, 3, 2, 3, 1, 3]
    assert cache.check() == []


def test_tokens_of_groups_found_by_a_first_try_count_where_they_came_from() -> None:
    """What came of a fetch of which some was missing counts for the remote store, in all groups."""
    cache = cache_of(FULL, WIDE, uses_remote=True)
    outcome = cache.handle(reserve_tokens(20, chain(16)), 0.0)
    fetch = the_copy(probed(cache, the_probe(outcome), *[1] * 6))

    landed = land(cache, fetch, failed=(3,))

    lease = woken(landed, outcome.ticket, Reserved)
    assert (lease.device_hit_tokens, lease.remote_hit_tokens) == (0, 8)
    assert cache.check() == []


def test_groups_ask_for_nothing_where_the_prefix_cannot_be_longer() -> None:
    """A call that finds all of its tokens asks for no block, for no group needs one."""
    cache = cache_of(FULL, WINDOW, uses_remote=True)
    outcome = cache.handle(reserve_tokens(20, chain(16)), 0.0)
    answered = probed(cache, the_probe(outcome), *[1] * 8)
    land(cache, the_copy(answered))

    again = cache.handle(reserve_tokens(20, chain(16), "again"), 0.0)

    assert probes(again) == []
    assert answer(again, Reserved).device_hit_tokens == 16


# Calls that wait to know ----------------------------------------------------------------------------------------------


def test_call_that_asks_goes_on_when_its_time_is_up() -> None:
    """A call without an answer in time is served without the store, if there is room."""
    cache = a_remote_cache()
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)

    assert wakes(tick(cache, 1.0)) == []
    woken(tick(cache, WAIT_MS / 1000), outcome.ticket, Reserved)

    assert probed(cache, the_probe(outcome), 1, 1).effects == ()
    assert cache.census().counters["probes_unknown"] == 1


def test_call_that_asked_is_refused_with_numbers_when_its_time_is_up() -> None:
    """A call without an answer in time, and without room, is refused like any other that waited."""
    cache = a_remote_cache(2)
    reserve(cache, 2, "all")
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)

    refused = woken(tick(cache, WAIT_MS / 1000), outcome.ticket, PoolFullError)

    assert refused.need == 2


def test_calls_go_on_when_the_store_turns_out_not_to_work() -> None:
    """When the store goes off, the calls that ask it are served without it."""
    cache = a_remote_cache()
    outcomes = [cache.handle(a_patient_reserve(doc(2), name), 0.0) for name in "ab"]

    off = turn(cache, Tier.REMOTE, on=False)

    for outcome in outcomes:
        woken(off, outcome.ticket, Reserved)
    assert cache.check() == []


def test_disk_that_goes_off_answers_nobody() -> None:
    """Only the remote store itself answers the calls that ask it; a disk that goes off does not."""
    cache = a_remote_cache(num_disk_slots=4)
    cache.handle(a_patient_reserve(doc(2)), 0.0)

    assert wakes(turn(cache, Tier.DISK, on=False)) == []


def test_cancelled_call_asks_no_more() -> None:
    """A cancelled call that asked is forgotten; it holds nothing."""
    cache = a_remote_cache()
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)

    cache.handle(c.Cancel(ticket=outcome.ticket or 0), 0.0)

    assert cache.census().num_asking == 0
    assert cache.census().device["free"] == 8


def test_end_of_a_worker_ends_its_questions() -> None:
    """When a worker ends, its calls that ask end, too."""
    cache = a_remote_cache()
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)
    cache.handle(a_reserve(1, "m", doc(1), worker_id=MATE, wait_ms=WAIT_MS), 0.0)

    ended = cache.handle(c.WorkerDied(worker_id=WORKER), 0.0)

    woken(ended, outcome.ticket, UnknownWorkerError)
    assert cache.census().num_asking == 1
    assert cache.check() == []


def test_drain_ends_the_questions() -> None:
    """When a drain begins, the calls that ask are refused."""
    cache = a_remote_cache()
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)

    woken(cache.handle(c.Drain(), 0.0), outcome.ticket, DrainingError)

    assert cache.check() == []


@pytest.mark.parametrize("wait_ms", [0, WAIT_MS], ids=["impatient", "patient"])
def test_later_call_of_a_request_takes_the_place_of_one_that_asks(wait_ms: int) -> None:
    """A later call of a request replaces one that asks, so the request has one lease."""
    cache = a_remote_cache()
    first = cache.handle(a_patient_reserve(doc(2)), 0.0)
    cache.handle(a_patient_reserve(doc(2), "other"), 0.0)

    second = cache.handle(a_reserve(2, "r", doc(2), wait_ms=wait_ms), 0.0)

    woken(second, first.ticket, BusyError)
    assert cache.census().num_asking == (2 if wait_ms else 1)
    assert cache.check() == []


def test_call_that_asks_takes_the_place_of_one_that_waits() -> None:
    """A call that asks replaces a waiting call of its request, so the request never has two leases."""
    cache = a_remote_cache(2)
    lease = reserve(cache, 2, "all", worker_id=MATE)
    first = cache.handle(a_patient_reserve(doc(2)), 0.0)
    probed(cache, the_probe(first))

    second = cache.handle(a_patient_reserve(doc(2)), 0.0)
    released = release(cache, lease.lease_id, worker_id=MATE)

    woken(second, first.ticket, BusyError)
    assert wakes(released) == []
    woken(probed(cache, the_probe(second)), second.ticket, Reserved)
    assert cache.census().num_leases == 1
    assert cache.check() == []


def test_refused_call_leaves_the_one_that_asks() -> None:
    """A refused call of a request leaves its call that asks as it is."""
    cache = a_remote_cache(2)
    cache.handle(a_patient_reserve(doc(2)), 0.0)
    reserve(cache, 2, "all", worker_id=MATE)

    with pytest.raises(PoolFullError):
        cache.handle(a_reserve(2, "r", doc(2)), 0.0)

    assert cache.census().num_asking == 1


def test_request_that_asks_is_not_forked_to() -> None:
    """A request that asks gets no lease by a fork."""
    cache = a_remote_cache()
    parent = reserve(cache, 1, "parent")
    cache.handle(a_patient_reserve(doc(2)), 0.0)

    command = c.Fork(
        worker_id=WORKER, lease_id=parent.lease_id, request_id="r", num_tokens=TOKENS_PER_BLOCK
    )
    with pytest.raises(IdReusedError):
        cache.handle(command, 0.0)


def test_calls_that_ask_take_places_to_wait() -> None:
    """Calls that ask and calls that wait share one limit; a call that finds no place does not ask the store."""
    cache = a_remote_cache(4, max_waiting=2)
    reserve(cache, 4, "all")
    wait_for(cache, 1, "waits")
    cache.handle(a_patient_reserve(doc(1), "asks"), 0.0)

    with pytest.raises(BusyError) as refused:
        cache.handle(a_patient_reserve(doc(1), "third"), 0.0)

    assert refused.value.resource == "waiting_calls"
    assert cache.census().num_asking == 1
    assert cache.check() == []


def test_call_that_asked_may_find_no_place_to_wait() -> None:
    """A tenant's calls that ask count among the places that it may have."""
    cache = a_remote_cache(4, max_waiting=4)
    reserve(cache, 4, "all")
    first = cache.handle(a_patient_reserve(doc(1), "a"), 0.0)
    for name in "bc":
        cache.handle(a_patient_reserve(doc(1), name), 0.0)

    answered = probed(cache, the_probe(first))

    woken(answered, first.ticket, BusyError)
    assert cache.check() == []


def test_store_is_asked_as_the_asking_tenant() -> None:
    """The store is asked under the tenant of the call."""
    cache = a_remote_cache()
    command = a_reserve(1, "s", keys(1), worker_id=STRANGER, wait_ms=WAIT_MS)

    outcome = cache.handle(command, 0.0)
    fetch = the_copy(probed(cache, the_probe(outcome), 1))

    assert label_numbers(fetch.labels, "tenant") == [OTHER_TENANT]
    assert records(cache).device.tenant[ids(fetch.target_ids)].tolist() == [OTHER_TENANT]


def test_blocks_that_the_store_has_are_left_alone_while_others_wait() -> None:
    """A call that was told of the store's blocks keeps that answer while it waits for room."""
    cache = a_remote_cache(2)
    lease = reserve(cache, 2, "all")
    outcome = cache.handle(a_patient_reserve(doc(2)), 0.0)
    assert wakes(probed(cache, the_probe(outcome), 1, 1)) == []

    released = cache.handle(c.Release(worker_id=WORKER, lease_id=lease.lease_id), 0.0)

    assert the_copy(released).direction is Direction.FETCH
    assert cache.check() == []


# Ranks that call apart ------------------------------------------------------------------------------------------------


def of_rank(worker_id: WorkerId, num_blocks: int = 2) -> c.Reserve:
    """Return the command by which a rank reserves the request of all ranks."""
    return a_reserve(num_blocks, "r", doc(2), worker_id=worker_id, wait_ms=WAIT_MS)


def test_ranks_that_ask_share_one_lease_and_one_fetch() -> None:
    """Each rank asks for itself; one whose answer comes later joins the lease of the first."""
    cache = an_engine(uses_remote=True)
    left = cache.handle(of_rank(LEFT), 0.0)
    right = cache.handle(of_rank(RIGHT), 0.0)

    fetch = the_copy(probed(cache, the_probe(left), 1, 1))
    assert copies(probed(cache, the_probe(right), 1, 1)) == []
    landed = land(cache, fetch)

    leases = [woken(landed, outcome.ticket, Reserved) for outcome in (left, right)]
    assert [one.remote_hit_tokens for one in leases] == [8, 8]
    assert leases[0].lease_id == leases[1].lease_id
    assert leases[0].block_ids == leases[1].block_ids
    assert cache.check() == []


def test_rank_that_asks_joins_a_lease_that_another_was_granted_meanwhile() -> None:
    """A rank that may not wait is granted the lease first, and the rank that asked joins it."""
    cache = an_engine(uses_remote=True)
    left = cache.handle(of_rank(LEFT), 0.0)
    command = a_reserve(2, "r", doc(2), worker_id=RIGHT)
    granted = answer(cache.handle(command, 0.0), Reserved)

    joined = woken(probed(cache, the_probe(left), 1, 1), left.ticket, Reserved)

    assert joined.block_ids == granted.block_ids
    assert cache.census().num_leases == 1
    assert cache.check() == []


def test_ranks_that_ask_must_ask_for_the_same() -> None:
    """All ranks must reserve the same, even while one of them asks the store."""
    cache = an_engine(uses_remote=True)
    cache.handle(of_rank(LEFT), 0.0)

    with pytest.raises(IdReusedError):
        cache.handle(of_rank(RIGHT, 3), 0.0)
