"""Laws of the queues of waiting calls: their order, whose turn is next, and that no call starves."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.ids import LeaseId
from kvleased.core import commands as c
from kvleased.core.waiting import PRIORITY_MAX, WAIT_SECONDS_DEFAULT, Waitable, Waiter, WaitingRoom
from tests.unit.service.core.builders import (
    OTHER_TENANT,
    TENANT,
    WAIT_MS,
    WORKER,
    a_reload,
    a_reserve,
    an_extend,
)

RESERVE, EXTEND = a_reserve(wait_ms=WAIT_MS), an_extend(LeaseId(5), 2, wait_ms=WAIT_MS)
RELOAD = a_reload(LeaseId(6))
AGEING_SECONDS = 5.0
_ENTRIES = count()


def a_room(*commands: Waitable, max_waiting: int = 9) -> WaitingRoom:
    """Return a room in which commands wait under tickets from 0 on."""
    room = WaitingRoom(max_waiting, AGEING_SECONDS)
    for ticket, command in enumerate(commands):
        room.join(a_waiter(ticket, command))
    return room


def a_waiter(
    ticket: int,
    command: Waitable = RESERVE,
    *,
    priority: int = 1,
    tenant: int = TENANT,
    cost: float = 1.0,
    since: float = 0.0,
) -> Waiter:
    """Return a call that waits."""
    if isinstance(command, c.Reserve):
        command = replace(command, priority=priority)
    deadline = since + WAIT_MS / 1000
    return Waiter(
        ticket=ticket,
        command=command,
        worker_id=WORKER,
        deadline=deadline,
        tenant=tenant,
        cost=cost,
    )


def order(room: WaitingRoom, now: float = 0.0) -> list[int]:
    """Return the tickets of a room in the order in which they are served."""
    return [waiter.ticket for waiter in room.ordered(now)]


# The order ------------------------------------------------------------------------------------------------------------


def test_running_requests_go_first() -> None:
    """Extends are served before reloads, reloads before new requests, and each kind in the order of arrival."""
    room = a_room(RESERVE, RELOAD, EXTEND, RESERVE, RELOAD, EXTEND)

    assert order(room) == [2, 5, 1, 4, 0, 3]


def test_higher_priority_goes_first() -> None:
    """New requests are served by priority, and within a priority in the order of arrival."""
    room = a_room()
    for ticket, priority in enumerate((0, 1, 2, 0, 1, 2)):
        room.join(a_waiter(ticket, priority=priority))

    assert order(room) == [2, 5, 1, 4, 0, 3]


def test_first_is_whom_to_serve_next() -> None:
    """The first call of a room is the head of its order; an empty room has none."""
    first = a_room(RESERVE, EXTEND).first(0.0)

    assert first is not None
    assert first.ticket == 1
    assert a_room().first(0.0) is None


@pytest.mark.parametrize(
    ("command", "priority", "num_ahead"),
    [
        pytest.param(EXTEND, 1, 1, id="extend"),
        pytest.param(RELOAD, 1, 2, id="reload"),
        pytest.param(RESERVE, 2, 3, id="high"),
        pytest.param(RESERVE, 1, 4, id="normal"),
        pytest.param(RESERVE, 0, 4, id="low"),
    ],
)
def test_each_call_knows_who_is_ahead(command: Waitable, priority: int, num_ahead: int) -> None:
    """A new call waits behind all calls of its own kind and class, and behind those that go before it."""
    room = a_room(RESERVE, EXTEND, RELOAD)
    room.rejoin(a_waiter(9))

    assert room.num_ahead(a_waiter(10, command, priority=priority), 0.0) == num_ahead


def test_room_is_bounded() -> None:
    """A room is full when as many calls wait as may wait."""
    assert not a_room(RESERVE, max_waiting=2).is_full
    assert a_room(RESERVE, EXTEND, max_waiting=2).is_full
    assert a_room(max_waiting=2).max_waiting == 2


def test_request_that_starts_over_is_first_again() -> None:
    """A request that starts over keeps its turn, and only running requests go before it."""
    room = a_room(RESERVE, RELOAD)

    room.rejoin(a_waiter(9, RESERVE))

    assert order(room) == [1, 9, 0]


def test_leaving_is_told_once() -> None:
    """A call that leaves is returned once."""
    room = a_room(RESERVE, EXTEND)

    left = [room.leave(ticket) for ticket in (1, 1, 0, 0)]

    assert [waiter and waiter.ticket for waiter in left] == [1, None, 0, None]
    assert len(room) == 0


def test_waiting_call_knows_its_lease() -> None:
    """A waiting call about a lease is found by that lease; a new request has none."""
    leases = [a_waiter(0, command).lease_id for command in (RESERVE, EXTEND, RELOAD)]

    assert leases == [None, 5, 6]
    assert a_waiter(0, c.Reload(keys=b"k" * 32)).lease_id is None


def test_waiting_call_knows_when_it_came() -> None:
    """A call arrived as long before its deadline as it may wait, even if it did not say how long."""
    patient = a_waiter(0, since=7.0)
    silent = Waiter(
        ticket=1, command=a_reload(LeaseId(6), wait_ms=0), worker_id=WORKER, deadline=31
    )

    assert patient.since == 7.0
    assert silent.since == 31 - WAIT_SECONDS_DEFAULT


# Ageing ---------------------------------------------------------------------------------------------------------------


def test_waiting_request_rises_with_time() -> None:
    """A request rises by one class every `ageing_seconds`, and becomes the last of its tenant's in the new class."""
    room = a_room()
    for ticket, (priority, since) in enumerate([(0, 0.0), (1, 4.0), (2, 4.5)]):
        room.join(a_waiter(ticket, priority=priority, since=since))

    for now, priorities in ((4.9, [0, 1, 2]), (5, [1, 1, 2]), (9, [1, 2, 2]), (10, [2, 2, 2])):
        assert order(room, now) == [2, 1, 0]
        assert sorted(waiter.priority for waiter in room) == priorities


def test_request_that_waited_for_long_rises_as_far_as_it_should() -> None:
    """However late it is looked at, a request is in the class that its wait has earned."""
    room = a_room()
    room.join(a_waiter(0, priority=0))

    order(room, 99.0)

    assert [waiter.priority for waiter in room] == [PRIORITY_MAX]


def test_aged_request_goes_before_later_ones_of_a_higher_class() -> None:
    """A low request that has waited for long enough goes before later high ones."""
    room = a_room()
    room.join(a_waiter(0, priority=0))
    room.ordered(2 * AGEING_SECONDS)

    room.join(a_waiter(1, priority=2, since=2 * AGEING_SECONDS))

    assert order(room, 2 * AGEING_SECONDS) == [0, 1]


def test_request_that_left_does_not_rise() -> None:
    """Time raises only the requests that still wait."""
    room = a_room()
    room.join(a_waiter(0, priority=0))
    room.leave(0)

    assert order(room, 99.0) == []


# Shares ---------------------------------------------------------------------------------------------------------------


def test_tenants_take_turns() -> None:
    """One tenant's many requests and another's later ones of equal size are served in turn."""
    room = a_room(max_waiting=99)
    for ticket in range(4):
        room.join(a_waiter(ticket))
    for ticket in range(4, 8):
        room.join(a_waiter(ticket, tenant=OTHER_TENANT))

    assert order(room) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_weight_is_a_larger_share() -> None:
    """A tenant of twice the weight gets twice the blocks."""
    room = a_room(max_waiting=99)
    for ticket in range(4):
        room.join(a_waiter(ticket))
    for ticket in range(4, 8):
        room.join(a_waiter(ticket, tenant=OTHER_TENANT, cost=0.5))

    assert order(room) == [4, 0, 5, 6, 1, 7, 2, 3]


def test_what_was_not_served_counts_to_nobody() -> None:
    """A tenant whose calls ended without blocks is served as early as if it had not asked."""
    room = a_room()
    room.join(a_waiter(0, tenant=OTHER_TENANT))
    room.join(a_waiter(1, cost=100))
    room.leave(1)

    assert room.num_ahead(a_waiter(2, cost=0.5), 0.0) == 0


def test_what_was_served_at_once_counts_too() -> None:
    """A call that was served without a wait counts towards its tenant's share."""
    room = a_room()
    room.join(a_waiter(0, cost=4))
    for ticket in range(1, 9):
        one = a_waiter(ticket, tenant=OTHER_TENANT)
        if room.num_ahead(one, 0.0):
            break
        room.serve(one)

    assert ticket == 4


@dataclass
class Past:
    """What has happened to a waiting request since it came to its present class."""

    waiter: Waiter
    priority: int
    bound: float
    entry: int
    served: dict[int, float] = field(default_factory=lambda: defaultdict(float))


acts = st.lists(
    st.one_of(
        st.just(None),
        st.floats(0.0, 3.0),
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, PRIORITY_MAX)),
    ),
    max_size=80,
)


@given(acts)
def test_no_request_is_bypassed_for_long(acts: list[float | tuple[int, int, int] | None]) -> None:
    """While a request is in a class, each other tenant's later requests there cost at most what its tag allows.

    A request is in the highest class after two times `ageing_seconds`; no request of a lower class is served before it.
    """
    room, now, tickets = WaitingRoom(10**6, AGEING_SECONDS), 0.0, count()
    past: dict[int, Past] = {}
    for act in acts:
        if isinstance(act, tuple):
            tenant, blocks, priority = act
            cost = blocks / (1 + tenant)
            room.join(
                a_waiter(next(tickets), priority=priority, tenant=tenant, cost=cost, since=now)
            )
        elif act is not None:
            now += act
        elif (served := room.first(now)) is not None:
            room.serve(served)
            _bypass(past, past.pop(served.ticket))
        room.ordered(now)
        _look(room, past, now)


def _look(room: WaitingRoom, past: dict[int, Past], now: float) -> None:
    """Record which requests came to which class, and the bound on what may be served before them there."""
    for waiter in room:
        known = past.get(waiter.ticket)
        if known is None or known.priority != waiter.priority:
            begin = room._classes[waiter.priority].virtual_time
            bound = waiter.tag - begin
            past[waiter.ticket] = Past(waiter, waiter.priority, bound, next(_ENTRIES))
        elapsed = now - waiter.since
        assert elapsed < 2 * AGEING_SECONDS + 1e-6 or waiter.priority == PRIORITY_MAX


def _bypass(past: dict[int, Past], served: Past) -> None:
    """Count what was served to requests that came to a class later, and compare it with the earlier ones' bounds."""
    for one in past.values():
        assert served.priority >= one.priority
        is_other = served.waiter.tenant != one.waiter.tenant
        if served.priority == one.priority and is_other and served.entry > one.entry:
            one.served[served.waiter.tenant] += served.waiter.cost
            assert one.served[served.waiter.tenant] <= one.bound + 1e-6
