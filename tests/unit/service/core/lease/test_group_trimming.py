"""Laws of grouped leases that are trimmed or moved: a trim takes the end back, and a reload restores every place."""

import pytest

from kvlease.errors import InvalidError, WrongStateError
from kvlease.groups import GroupShape
from kvlease.ids import LeaseId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Evicted, Reloaded, Trimmed
from kvleased.core.lease.phases import Phase
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    WORKER,
    a_cache,
    answer,
    evict,
    ids,
    land,
    records,
    reload,
    reloaded,
    the_copy,
    tick,
    woken,
)
from tests.unit.service.core.grouped import (
    CHUNK,
    FIXED,
    FULL,
    GUESSING,
    STATE,
    WIDE,
    WINDOW,
    cache_of,
    chain,
    commit_tokens,
    extend_tokens,
    filled,
    map_lease,
    places,
    reserve_tokens,
)


def trim(cache: Cache, lease_id: LeaseId, num_tokens: int) -> int:
    """Trim a lease, and return how many blocks it has left."""
    command = c.Trim(worker_id=WORKER, lease_id=lease_id, num_tokens=num_tokens)
    return answer(cache.handle(command, 0.0), Trimmed).num_given_back


# Trimming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param((FULL,), [[0, 1, 2]], id="simple"),
        pytest.param((FULL, WINDOW), [[0, 1, 2], [0, 1, 2]], id="full and window"),
        pytest.param((WIDE, CHUNK), [[0, 1], [0, 1, 2]], id="wide and chunk"),
        pytest.param((STATE,), [[2]], id="state"),
        pytest.param((GUESSING,), [[2, 3, 4]], id="guessing"),
        pytest.param((FIXED, FULL), [[0, 1], [0, 1, 2]], id="fixed and full"),
    ],
)
def test_trim_takes_back_what_lies_behind(
    groups: tuple[GroupShape, ...], expected: list[list[int]]
) -> None:
    """Blocks of rejected tokens are free again, and the block of a state moves to the place where it is looked for."""
    cache = cache_of(*groups)
    lease = reserve_tokens(cache, 30)
    map_lease(cache, lease.lease_id)
    before = cache.census().device["reserved"]

    num_given_back = trim(cache, lease.lease_id, 10)

    assert filled(cache, lease.row) == expected
    assert num_given_back == before - cache.census().device["reserved"]
    assert cache.check() == []


def test_trim_leaves_what_is_computed() -> None:
    """A trim cannot take back states that are written."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 14)
    commit_tokens(cache, lease.lease_id, 9, b"")

    with pytest.raises(InvalidError, match="num_tokens is 8, but the states of 9"):
        trim(cache, lease.lease_id, 8)

    assert trim(cache, lease.lease_id, 9) == 2


def test_refused_trim_leaves_a_lease_in_quarantine() -> None:
    """A trim that makes no sense does not prove that its caller is alive."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 14)
    commit_tokens(cache, lease.lease_id, 9, b"")
    tick(cache, LEASE_SECONDS + 1)

    with pytest.raises(InvalidError):
        trim(cache, lease.lease_id, 8)

    assert records(cache).rows.phase[lease.row] == Phase.QUARANTINED


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_trim_leaves_one_token(num_tokens: int) -> None:
    """A trim leaves at least one token; only a release ends a lease."""
    cache = a_cache()
    lease = reserve_tokens(cache, 8)

    with pytest.raises(InvalidError, match="at least 1"):
        trim(cache, lease.lease_id, num_tokens)


def test_trim_to_more_than_there_is_changes_nothing() -> None:
    """A trim to more tokens than there are changes nothing; an extend is what makes a lease longer."""
    cache = a_cache()
    lease = reserve_tokens(cache, 8)

    assert trim(cache, lease.lease_id, 100) == 0


def test_evicted_lease_is_not_trimmed() -> None:
    """Only a lease on the device can be trimmed."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 8)
    land(cache, the_copy(evict(cache, lease.lease_id)))

    with pytest.raises(WrongStateError, match="evicted") as raised:
        trim(cache, lease.lease_id, 4)

    assert raised.value.resource == "lease"


# Moving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups", [(FULL, WINDOW), (STATE,), (CHUNK, FIXED), (WIDE, GUESSING)], ids=str
)
def test_evicted_lease_comes_back_as_it_was(groups: tuple[GroupShape, ...]) -> None:
    """A reloaded lease has the same places filled, and the same places empty, in all groups."""
    cache = cache_of(*groups)
    lease = reserve_tokens(cache, 12)
    commit_tokens(cache, lease.lease_id, 10, chain(8))
    extend_tokens(cache, lease.lease_id, 14)
    before = filled(cache, lease.row)

    woken(land(cache, the_copy(outcome := evict(cache, lease.lease_id))), outcome.ticket, Evicted)
    assert (filled(cache, lease.row), cache.check()) == (before, [])
    outcome = reload(cache, lease.lease_id)
    reply = (
        reloaded(land(cache, the_copy(outcome)), outcome.ticket)
        if outcome.ticket
        else outcome.reply
    )

    assert isinstance(reply, Reloaded)
    assert (filled(cache, lease.row), cache.check()) == (before, [])
    assert len(ids(reply.block_ids)) == sum(len(part) for part in places(cache, lease.row))


def test_quarantined_lease_may_give_back_by_a_late_commit() -> None:
    """A late commit of a quarantined lease counts: the blocks that its owner no longer needs are free."""
    cache = cache_of(WINDOW)
    lease = reserve_tokens(cache, 16)
    tick(cache, LEASE_SECONDS)

    assert commit_tokens(cache, lease.lease_id, 16).num_given_back == 2
    assert cache.check() == []
