"""Laws of the queues of waiting calls."""

from kvlease.ids import LeaseId
from kvleased.core import commands as c
from kvleased.core.waiting import Waitable, Waiter, WaitingRoom
from tests.unit.service.core.builders import WORKER, a_reload, a_reserve, an_extend

RESERVE, EXTEND, RELOAD = a_reserve(), an_extend(LeaseId(5), 2), a_reload(LeaseId(6))


def a_room(*commands: Waitable, max_waiting: int = 9) -> WaitingRoom:
    """Return a room in which commands wait under the tickets 0, 1, 2 and so on."""
    room = WaitingRoom(max_waiting)
    for ticket, command in enumerate(commands):
        room.join(a_waiter(ticket, command))
    return room


def a_waiter(ticket: int, command: Waitable) -> Waiter:
    """Return a call that waits."""
    return Waiter(ticket=ticket, command=command, worker_id=WORKER, deadline=1.0)


def test_running_requests_go_first() -> None:
    """Extends are served before everything else, and each kind in the order of arrival."""
    room = a_room(RESERVE, EXTEND, RELOAD, EXTEND)

    assert [waiter.ticket for waiter in room] == [1, 3, 0, 2]


def test_first_is_whom_to_serve_next() -> None:
    """The first of a room is the head of its order; nobody is the first of an empty one."""
    first = a_room(RESERVE, EXTEND).first()

    assert first is not None
    assert first.ticket == 1
    assert a_room().first() is None


def test_each_call_knows_who_is_ahead() -> None:
    """An extend waits behind extends only; everything else behind everybody."""
    room = a_room(RESERVE, EXTEND, RELOAD)

    assert room.num_ahead(EXTEND) == 1
    assert room.num_ahead(RESERVE) == room.num_ahead(RELOAD) == 3


def test_room_is_bounded() -> None:
    """A room is full when as many calls wait as may."""
    assert not a_room(RESERVE, max_waiting=2).is_full
    assert a_room(RESERVE, EXTEND, max_waiting=2).is_full


def test_rejoining_call_is_first_again() -> None:
    """A call that has to start over has not lost its turn."""
    room = a_room(RESERVE, RELOAD)

    room.rejoin(a_waiter(9, RESERVE))

    assert [waiter.ticket for waiter in room] == [9, 0, 1]


def test_leaving_is_told_once() -> None:
    """Who leaves is returned, and is not there a second time."""
    room = a_room(RESERVE, EXTEND)

    left = [room.leave(ticket) for ticket in (1, 1, 0, 0)]

    assert [waiter and waiter.ticket for waiter in left] == [1, None, 0, None]
    assert len(room) == 0


def test_waiting_call_knows_its_lease() -> None:
    """A call about a lease can be found by it; a new one has none."""
    leases = [a_waiter(0, command).lease_id for command in (RESERVE, EXTEND, RELOAD)]

    assert leases == [None, 5, 6]
    assert a_waiter(0, c.Reload(keys=b"k" * 32)).lease_id is None
