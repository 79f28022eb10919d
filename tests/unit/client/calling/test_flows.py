"""Laws of retries, attaching again and doubt, with time passed in and nothing sent."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlease import Client, PlanInputs
from kvlease._calling import calls, flows, late, operator_calls, steps, verbs
from kvlease._calling.link import Link
from kvlease._calling.session import Floor, Session
from kvlease.client import attach_request
from kvlease.errors import (
    DeadlineError,
    IdReusedError,
    InternalError,
    InvalidError,
    KVLeaseError,
    NotYoursError,
    PoolFullError,
    StaleEpochError,
    StartingError,
    UnavailableError,
    UnknownCacheError,
    UnknownLeaseError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.memory.mapped import Row
from kvlease.replies import Evicted, Explanation, Found, Pinned, Reloaded, ReserveSpec
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.played import (
    SPEC,
    Clock,
    Played,
    attached,
    granted,
    ids,
    leased,
    session_of,
)


@pytest.fixture
def clock() -> Clock:
    """Give a clock that stands still."""
    return Clock()


@pytest.fixture
def session(clock: Clock) -> Session:
    """Give a worker that turns failures into misses."""
    return session_of(clock, raises=False)


# Retries


def test_broken_connection_is_retried_with_the_same_key(session: Session, clock: Clock) -> None:
    """A retry repeats the call exactly, and two calls never share a key."""
    played = Played(
        session, clock, UnavailableError(), UnavailableError(), pb.ReleaseResponse(released=True)
    )

    played.run(flows.told(session.link, calls.release(3)))
    played.run(flows.told(session.link, calls.release(3)))

    first, second, third, other = (call.idempotency_key for call in played.sent)
    assert first == second == third != other
    assert len(played.pauses) == 1, (
        "the first retry does not wait: a kept-alive connection may just have ended"
    )


def test_retries_end_by_the_deadline(session: Session, clock: Clock) -> None:
    """However long the daemon is away, the call ends by its deadline."""
    with pytest.raises(UnavailableError):
        Played(session, clock, UnavailableError()).run(
            flows.told(session.link, calls.list_caches())
        )

    assert 4.5 < clock.now - 100 <= 5


def test_absent_daemon_is_not_waited_for_again(session: Session, clock: Clock) -> None:
    """After one call has waited in vain, later calls try only once, until a call is answered."""
    session.link.is_reached = False
    absent = Played(session, clock, UnavailableError())
    with pytest.raises(UnavailableError):
        absent.run(flows.told(session.link, calls.list_caches()))
    assert (len(absent.sent), absent.pauses) == (1, [])

    Played(session, clock, pb.ListCachesResponse()).run(
        flows.told(session.link, calls.list_caches())
    )
    assert session.link.is_reached


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    """Give the path of a socket at which nobody listens, as a killed daemon leaves it."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    return path


def test_first_call_waits_for_a_daemon_that_restarts(clock: Clock, socket_path: str) -> None:
    """A first call that finds the socket but no daemon tries again."""
    session = session_of(clock, raises=True)
    session.link = Link(deadline_seconds=5, clock=clock, socket_path=socket_path)
    away = [UnavailableError()] * 4
    played = Played(session, clock, *away, pb.ListCachesResponse())

    played.run(flows.told(session.link, calls.list_caches()))

    assert len(played.sent) == 5
    assert session.link.is_reached


def test_socket_that_a_dead_daemon_left_is_waited_for_once(clock: Clock, socket_path: str) -> None:
    """The first call waits two seconds for the daemon; later calls do not wait."""
    session = session_of(clock, raises=True)
    session.link = Link(deadline_seconds=5, clock=clock, socket_path=socket_path)
    absent = Played(session, clock, UnavailableError())

    for _ in range(3):
        with pytest.raises(UnavailableError):
            absent.run(flows.told(session.link, calls.list_caches()))

    assert 2 <= clock.now - 100 < 2.5


def test_starting_cache_is_waited_for(session: Session, clock: Clock) -> None:
    """A call to a cache whose memory is not ready yet is repeated, with growing pauses."""
    played = Played(
        session, clock, StartingError(), StartingError(), StartingError(), pb.LookupResponse()
    )

    played.run(flows.told(session.link, calls.lookup(b"")))

    assert len(played.pauses) == 3
    assert max(played.pauses) <= flows.LONGEST_PAUSE_SECONDS


def test_last_try_at_a_starting_cache_has_time_to_be_answered(session: Session) -> None:
    """A cache that is not ready by the deadline is reported as such: the deadline does not cut the last try off."""
    seconds_left = []
    for _ in range(100):
        clock = Clock()
        session.link = Link(deadline_seconds=5, clock=clock)
        played = Played(session, clock, StartingError())

        with pytest.raises(StartingError):
            played.run(flows.told(session.link, calls.lookup(b"")))

        seconds_left.append(played.sent[-1].deadline_at - clock.now)
    assert min(seconds_left) > flows.LONGEST_PAUSE_SECONDS / 2


@pytest.mark.parametrize(
    "error", [PoolFullError(), DeadlineError(), InternalError(), InvalidError()]
)
def test_other_failures_are_not_retried(
    session: Session, clock: Clock, error: KVLeaseError
) -> None:
    """A refusal is an answer, and a deadline that has passed leaves no time, so neither is retried."""
    played = Played(session, clock, error)

    with pytest.raises(type(error)):
        played.run(flows.told(session.link, calls.lookup(b"")))

    assert len(played.sent) == 1


def test_waiting_in_the_daemon_comes_on_top_of_the_deadline(session: Session, clock: Clock) -> None:
    """A call that may wait two seconds for blocks gets two seconds more than the deadline."""
    played = Played(session, clock, granted(1))

    played.run(verbs.reserve(session, SPEC, 2000))

    assert played.sent[0].deadline_at == clock.now + 7


# Restarts


def test_restart_attaches_again_and_repeats_the_call(session: Session, clock: Clock) -> None:
    """A call that meets a restarted daemon sends token and inventory, and then goes out again under its key."""
    grant = leased(session, clock, 5)
    played = Played(
        session,
        clock,
        StaleEpochError(),
        attached(epoch=2, lease_ids=(5,)),
        pb.CommitResponse(num_committed=1),
    )
    played.script[1] = Attached(played.script[1], [])

    committed = played.run(verbs.commit(session, grant, 16, bytes(32), 0))

    assert (played.attaches[0].resume_token, played.attaches[0].lease_ids) == (
        "token 1",
        np.int64(5).tobytes(),
    )
    assert [call.epoch for call in played.sent] == [1, 2]
    assert played.sent[0].idempotency_key == played.sent[1].idempotency_key
    assert (committed.num_committed, grant.is_live) == (1, True)


def test_leases_that_did_not_survive_are_lost(session: Session, clock: Clock) -> None:
    """After a restart exactly those leases that the daemon names are live."""
    kept, gone = leased(session, clock, 5), leased(session, clock, 6)

    session.adopt(Attached(attached(epoch=2, lease_ids=(5,)), []), resumed=True)

    assert (kept.is_live, gone.is_live) == (True, False)
    assert isinstance(gone.refusal, UnknownLeaseError)
    assert len(gone.block_ids) == 0


def test_unknown_token_attaches_afresh_and_loses_all(session: Session, clock: Clock) -> None:
    """A daemon that does not know the worker makes a new worker of it, and all old leases are lost."""
    grant = leased(session, clock, 5)
    played = Played(
        session,
        clock,
        UnknownWorkerError(),
        UnknownWorkerError(),
        Attached(attached(epoch=2), []),
        pb.LookupResponse(),
    )

    played.run(flows.told(session.link, calls.lookup(b"")))

    assert [request.resume_token for request in played.attaches] == ["token 1", ""]
    assert not grant.is_live


REGISTRATION = pb.RegisterCacheRequest(cache="demo")


def test_cache_that_ended_with_the_daemon_is_registered_again(
    session: Session, clock: Clock
) -> None:
    """A worker that knows how its cache was made registers it again, and goes on as another worker."""
    grant = leased(session, clock, 5)
    session.registration = REGISTRATION
    played = Played(
        session,
        clock,
        UnknownWorkerError(),
        UnknownCacheError(),
        pb.StatsResponse(epoch=2),
        pb.RegisterCacheResponse(created=True),
        StartingError(),
        Attached(attached(epoch=2), []),
        pb.LookupResponse(),
    )

    played.run(flows.told(session.link, calls.lookup(b"")))

    assert [call.verb for call in played.sent] == ["lookup", "stats", "register_cache", "lookup"]
    assert played.sent[2].request == REGISTRATION
    assert [request.resume_token for request in played.attaches] == ["token 1", "", ""]
    assert not grant.is_live


@pytest.mark.parametrize(
    ("registration", "told"),
    [
        pytest.param(None, (), id="another registers it"),
        pytest.param(REGISTRATION, (pb.StatsResponse(epoch=1),), id="deleted in this life"),
        pytest.param(REGISTRATION, (NotYoursError(),), id="may not look"),
    ],
)
def test_cache_that_is_not_ours_to_make_stays_unknown(
    session: Session,
    clock: Clock,
    registration: pb.RegisterCacheRequest | None,
    told: tuple[Any, ...],
) -> None:
    """A cache that an operator deleted, or that another program registers, is not made again behind their backs."""
    session.registration = registration
    played = Played(session, clock, UnknownWorkerError(), UnknownCacheError("gone"), *told)

    with pytest.raises(UnknownCacheError, match="gone"):
        played.run(flows.told(session.link, calls.lookup(b"")))

    assert "register_cache" not in [call.verb for call in played.sent]


def test_endless_restarts_end(session: Session, clock: Clock) -> None:
    """A daemon that calls every epoch stale is not asked for ever."""
    played = Played(session, clock, StaleEpochError())
    played._answer = lambda action: (  # type: ignore[method-assign]
        None if isinstance(action, flows.Reattach) else StaleEpochError()
    )

    with pytest.raises(StaleEpochError):
        played.run(flows.told(session.link, calls.lookup(b"")))


def test_reserve_that_restarts_overtake_keeps_its_one_deadline(
    session: Session, clock: Clock
) -> None:
    """If a heartbeat attaches again before the answer is taken over, the next try ends no later than the first."""
    played, sent = Played(session, clock), []

    def answer(action: Any) -> Any:
        sent.append(action)
        clock.now += 2.0
        session.link.epoch += 1
        return granted(1) if action.verb == "reserve" else pb.ReleaseResponse()

    played._answer = answer  # type: ignore[method-assign]

    grant = played.run(verbs.reserve(session, SPEC, 0))

    assert isinstance(grant.refusal, UnavailableError)
    assert len(sent) > 1
    assert {call.deadline_at for call in sent} == {100.0 + session.link.deadline_seconds}


def test_forked_child_is_refused(session: Session, clock: Clock) -> None:
    """A session belongs to the process that opened it, because the daemon watches the life of that process."""
    session.link.process_id -= 1

    with pytest.raises(InvalidError, match="forked"):
        Played(session, clock, granted(1)).run(verbs.reserve(session, SPEC, 0))


# Doubt


@pytest.mark.parametrize(
    "error",
    [PoolFullError(need=3, available=1), DeadlineError(), UnavailableError(), InternalError()],
)
def test_failed_reserve_is_a_miss(session: Session, clock: Clock, error: KVLeaseError) -> None:
    """A reserve that is refused or fails gives a lease that is not live and has the reason."""
    grant = Played(session, clock, error).run(verbs.reserve(session, SPEC, 0))

    assert (grant.is_live, grant.refusal, len(grant.block_ids)) == (False, error, 0)


def test_malformed_call_is_raised_even_so(session: Session, clock: Clock) -> None:
    """A miss stands for failures of the world; the caller's own mistake is always raised."""
    with pytest.raises(InvalidError):
        Played(session, clock, InvalidError()).run(verbs.reserve(session, SPEC, 0))


def test_errors_are_raised_when_asked_for(clock: Clock) -> None:
    """With on_doubt="raise" every failure reaches the caller, and so does the use of a lease that has ended."""
    session = session_of(clock, raises=True)
    grant = leased(session, clock, 5)

    with pytest.raises(PoolFullError):
        Played(session, clock, PoolFullError()).run(verbs.reserve(session, SPEC, 0))
    with pytest.raises(NotYoursError):
        Played(session, clock, NotYoursError()).run(verbs.map_row(session, grant))
    with pytest.raises(NotYoursError):
        Played(session, clock).run(verbs.map_row(session, grant))


def test_verbs_of_a_lease_that_ended_do_nothing(session: Session, clock: Clock) -> None:
    """A lease that is not live sends nothing; its methods answer as if there were nothing."""
    grant = leased(session, clock, 5)
    Played(session, clock, pb.ReleaseResponse(released=True)).run(verbs.release(session, grant))
    played = Played(session, clock)

    assert played.run(verbs.extend(session, grant, 64, 0)) is False
    assert played.run(verbs.explain(session, grant)) == Explanation()
    assert played.run(verbs.evict(session, grant, 0)) == Evicted()
    assert played.run(verbs.reload(session, grant, 0)) == Reloaded()
    assert played.run(verbs.release(session, grant)) is False
    assert played.sent == []


def test_refused_extend_keeps_the_lease(session: Session, clock: Clock) -> None:
    """A refusal changes nothing but the lease's reason, which the next successful call clears."""
    grant = leased(session, clock, 5, 0)

    assert Played(session, clock, PoolFullError()).run(verbs.extend(session, grant, 32, 0)) is False
    assert (grant.is_live, type(grant.refusal)) == (True, PoolFullError)

    assert (
        Played(session, clock, pb.ExtendResponse(block_ids=ids(3))).run(
            verbs.extend(session, grant, 32, 0)
        )
        is True
    )
    assert (grant.block_ids.tolist(), grant.refusal) == ([0, 3], None)


class Table:
    """The block table as the daemon has written it."""

    def __init__(self, *blocks: int) -> None:
        """Give every lease one row."""
        self.blocks = blocks

    def row(self, row: int, lease_id: int) -> Row:
        """Return the row of a lease on the device."""
        del row, lease_id
        return Row(
            is_active=True,
            block_ids=np.array(self.blocks, np.int32),
            num_blocks=np.array([len(self.blocks)], np.int32),
        )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_answers_to_extends_at_once_come_in_any_order(
    session: Session, clock: Clock, order: tuple[int, int]
) -> None:
    """Blocks that were read from the table for a later extend are not added again by the answer to an earlier one."""
    grant = leased(session, clock, 5, 0)
    session.memory = Table(0, 3, 4)  # type: ignore[assignment]  # of which the row alone is read
    answers = [(5, ids(3), (), 32, 32, ()), (5, ids(4), (), 48, 48, ())]

    for at in order:
        session.extended((answers[at],), session.link.epoch)

    assert (grant.block_ids.tolist(), grant.is_live) == ([0, 3, 4], True)


def test_extend_whose_answer_was_lost_is_never_papered_over(session: Session, clock: Clock) -> None:
    """Blocks that no answer named leave a hole in the list: without a table the lease is lost, not used."""
    grant = leased(session, clock, 5, 0)
    Played(session, clock, DeadlineError()).run(verbs.extend(session, grant, 32, 0))
    assert grant.is_live

    covers = Played(session, clock, pb.ExtendResponse(block_ids=ids(4))).run(
        verbs.extend(session, grant, 48, 0)
    )

    assert (covers, grant.is_live) == (False, False)


def test_lease_that_another_holds_is_lost(session: Session, clock: Clock) -> None:
    """A lease that the daemon grants to somebody else is lost at once."""
    grant = leased(session, clock, 5)

    Played(session, clock, UnknownLeaseError()).run(verbs.map_row(session, grant))

    assert (grant.is_live, session.grants) == (False, {})


def test_evict_in_doubt_takes_the_blocks_away(session: Session, clock: Clock) -> None:
    """An evict whose outcome is not known may be moving the blocks, so the lease no longer has them."""
    grant = leased(session, clock, 5)

    Played(session, clock, DeadlineError()).run(verbs.evict(session, grant, 0))

    assert (grant.is_live, grant.is_evicted, len(grant.block_ids)) == (True, True, 0)


def test_evict_and_reload_move_the_blocks(session: Session, clock: Clock) -> None:
    """An evicted lease has no blocks; a reloaded lease has the blocks that the daemon names."""
    grant = leased(session, clock, 5, 0, 1)

    assert Played(session, clock, pb.EvictResponse(num_evicted=2, num_offloaded=2)).run(
        verbs.evict(session, grant, 0)
    ) == Evicted(num_evicted=2, num_offloaded=2)
    assert grant.is_evicted
    back = pb.ReloadResponse(block_ids=ids(6, 7), num_reloaded=2, num_tokens=32, row=3)
    assert Played(session, clock, back).run(verbs.reload(session, grant, 0)).num_tokens == 32
    assert (grant.block_ids.tolist(), grant.row, grant.is_evicted) == ([6, 7], 3, False)


def test_reload_of_a_lease_elsewhere_in_its_life_loses_it(session: Session, clock: Clock) -> None:
    """Where the daemon and the client disagree about a lease's place, the lease is lost and computed again."""
    grant = leased(session, clock, 5)

    Played(session, clock, WrongStateError()).run(verbs.reload(session, grant, 0))

    assert not grant.is_live


@pytest.mark.parametrize(
    ("ask", "reply"),
    [
        pytest.param(calls.lookup(b""), Found, id="lookup"),
        pytest.param(calls.pin(b""), Pinned, id="pin"),
        pytest.param(calls.evict(num_blocks=1), Evicted, id="evict"),
        pytest.param(calls.reload_keys(b"", 0), Reloaded, id="reload"),
    ],
)
def test_failed_call_about_no_lease_is_a_miss_that_says_why(
    session: Session, clock: Clock, ask: Any, reply: Any
) -> None:
    """A refused call found, held and moved nothing, and its answer differs from that of a call that found nothing."""
    error = PoolFullError(need=3, available=1)

    missed = Played(session, clock, error).run(flows.missed(session, ask, reply))

    assert missed == reply(refusal=error)
    assert missed != reply()


def test_answer_that_came_has_no_refusal(session: Session, clock: Clock) -> None:
    """An answer that finds nothing cached is no refusal."""
    played = Played(session, clock, pb.PinResponse())

    assert played.run(flows.missed(session, calls.pin(b""), Pinned)) == Pinned()


@pytest.mark.parametrize(
    ("verb", "reply"),
    [
        pytest.param(verbs.evict, Evicted, id="evict"),
        pytest.param(verbs.reload, Reloaded, id="reload"),
    ],
)
def test_refused_move_of_a_lease_says_why(
    session: Session, clock: Clock, verb: Any, reply: Any
) -> None:
    """The reply to a refused call has the same reason as the lease."""
    grant, error = leased(session, clock, 5), PoolFullError(need=3, available=1)

    assert Played(session, clock, error).run(verb(session, grant, 0)) == reply(refusal=error)
    assert grant.refusal is error


def test_cancelled_verb_counts_as_doubtful(session: Session, clock: Clock) -> None:
    """A caller who is interrupted during an evict must not go on using the blocks."""
    grant = leased(session, clock, 5)
    flow = verbs.evict(session, grant, 0)
    next(flow)

    flow.close()

    assert grant.is_evicted


# Leases and inventory


def test_release_ends_a_lease_whatever_the_daemon_says(session: Session, clock: Clock) -> None:
    """A released lease leaves the inventory, so that the next heartbeat ends it even if the release is lost."""
    grant = leased(session, clock, 5)

    assert Played(session, clock, DeadlineError()).run(verbs.release(session, grant)) is False

    assert (grant.is_live, session.inventory()) == (False, (b"", 5))


def test_inventory_never_disowns_a_lease_on_its_way(session: Session, clock: Clock) -> None:
    """While a reserve has no answer, heartbeats tell only of ids that were known before it began."""
    leased(session, clock, 5)
    slow = verbs.reserve(session, ReserveSpec(request_id="slow", num_tokens=16), 0)
    next(slow)

    leased(session, clock, 9)

    assert session.inventory() == (np.array([5, 9], "<i8").tobytes(), 5)
    slow.close()
    assert session.inventory()[1] == 9


def test_leftover_of_a_lost_answer_is_released_first(session: Session, clock: Clock) -> None:
    """A lease that a heartbeat may be ending right now is not used: it is released and reserved anew."""
    leased(session, clock, 9)
    played = Played(session, clock, granted(5), pb.ReleaseResponse(released=True), granted(12))

    grant = played.run(verbs.reserve(session, ReserveSpec(request_id="again", num_tokens=16), 0))

    assert [call.verb for call in played.sent] == ["reserve", "release", "reserve"]
    assert grant.lease_id == 12


def test_lease_that_another_rank_was_granted_is_no_leftover(session: Session, clock: Clock) -> None:
    """What counts is the id under which this rank joined the lease, also in the inventories that it sends."""
    session.heard([], 20, session.link.epoch)
    answer = granted(15)
    answer.joined_id = 21

    grant = Played(session, clock, answer).run(verbs.reserve(session, SPEC, 0))

    assert (grant.lease_id, session.inventory()[1]) == (15, 21)


def test_heartbeat_disowns_a_lease_whose_answer_was_lost(session: Session, clock: Clock) -> None:
    """Once a heartbeat tells how far the daemon has granted ids, the next one tells of leases never heard of."""
    Played(session, clock, DeadlineError()).run(verbs.reserve(session, SPEC, 0))
    told = Played(session, clock, pb.HeartbeatResponse(newest_lease_id=50))

    for _ in range(2):
        told.run(flows.heartbeat(session))

    newest = [call.request.newest_lease_id for call in told.sent]  # type: ignore[attr-defined]  # heartbeats
    assert newest == [0, 50]


def test_disowning_ends_a_lease_whose_answer_was_lost(session: Session, clock: Clock) -> None:
    """A second heartbeat follows only where the first one tells of more leases."""
    told = Played(session, clock, pb.HeartbeatResponse(newest_lease_id=50))

    told.run(late.disowning(session))
    told.run(late.disowning(session))

    newest = [call.request.newest_lease_id for call in told.sent]  # type: ignore[attr-defined]  # heartbeats
    assert newest == [0, 50, 50]


def test_heartbeat_never_speaks_of_a_lease_on_its_way(session: Session, clock: Clock) -> None:
    """While a reserve has no answer, the inventory stays below any id that it may bring, however the reserve ends."""
    leased(session, clock, 5)
    session.begin_reserve(floor := Floor())
    session.heard([], 50, session.link.epoch)
    assert session.inventory()[1] == 5

    session.end_reserve(floor)

    assert session.inventory()[1] == 50


class Interrupting:
    """A lock that raises a signal's exception when it is let go for the first time."""

    def __init__(self) -> None:
        self.is_due = True

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt


def test_interrupted_reserve_does_not_stop_the_inventory(session: Session, clock: Clock) -> None:
    """A reserve that a signal ends just as it begins does not count as on its way for ever."""
    session.lock = Interrupting()  # type: ignore[assignment]  # as far as it is used
    with pytest.raises(KeyboardInterrupt):
        Played(session, clock, granted(5)).run(verbs.reserve(session, SPEC, 0))

    session.heard([], 50, session.link.epoch)

    assert session.inventory()[1] == 50


def test_floor_that_nobody_holds_is_gone(session: Session) -> None:
    """Wherever a reserve is interrupted, also at its end, its floor goes when nobody holds it any more."""
    session.begin_reserve(Floor())

    session.heard([], 50, session.link.epoch)

    assert session.inventory()[1] == 50


def test_lease_that_an_inventory_may_have_left_out_is_not_used(
    session: Session, clock: Clock
) -> None:
    """A lease whose answer was lost is released, not used, where a heartbeat may be ending it."""
    session.heard([], 20, session.link.epoch)
    played = Played(session, clock, granted(15), pb.ReleaseResponse(released=True), granted(21))

    grant = played.run(verbs.reserve(session, SPEC, 0))

    assert [call.verb for call in played.sent] == ["reserve", "release", "reserve"]
    assert grant.lease_id == 21


def test_lease_of_another_reserve_on_its_way_is_no_leftover(session: Session, clock: Clock) -> None:
    """Two callers who reserve one request at once share its lease, whoever is answered first."""
    session.begin_reserve(floor := Floor())
    session.heard([], 20, session.link.epoch)
    played = Played(session, clock, granted(15))

    grant = played.run(verbs.reserve(session, SPEC, 0))
    session.end_reserve(floor)

    assert [call.verb for call in played.sent] == ["reserve"]
    assert (grant.lease_id, grant.is_live) == (15, True)


def test_new_worker_knows_no_newest_lease(session: Session) -> None:
    """A worker that attached afresh may be in a cache whose ids begin anew."""
    session.heard([], 20, session.link.epoch)

    session.adopt(Attached(attached(epoch=1), []), resumed=False)

    assert session.inventory()[1] == 0


def test_request_is_not_reserved_twice_at_once(session: Session, clock: Clock) -> None:
    """The daemon takes a second reserve for a retry, so two callers here would write the same blocks."""
    first = leased(session, clock, 5)

    again = leased(session, clock, 5)

    assert isinstance(again.refusal, IdReusedError)
    assert not again.is_live
    assert (first.is_live, session.inventory()[0]) == (True, np.int64(5).tobytes())


def test_heartbeat_learns_of_leases_that_ended(session: Session, clock: Clock) -> None:
    """A lease that the daemon does not know is lost."""
    kept, gone = leased(session, clock, 5), leased(session, clock, 6)
    answer = pb.HeartbeatResponse(unknown_lease_ids=np.int64(6).tobytes())
    played = Played(session, clock, answer)

    played.run(flows.heartbeat(session))

    sent = played.sent[0].request
    assert isinstance(sent, pb.HeartbeatRequest)
    assert (sent.lease_ids, sent.newest_lease_id) == (np.array([5, 6], "<i8").tobytes(), 6)
    assert (kept.is_live, gone.is_live) == (True, False)


def test_detach_ends_every_lease(session: Session, clock: Clock) -> None:
    """A worker that has ended holds no lease."""
    grant = leased(session, clock, 5)

    assert Played(session, clock, pb.DetachResponse(num_leases=1)).run(flows.detach(session)) == 1

    assert not grant.is_live


def test_detach_waits_for_a_daemon_that_is_away(session: Session, clock: Clock) -> None:
    """A daemon that restarts is told of the end once it is back; a second detach need not ask it."""
    played = Played(session, clock, *[UnavailableError()] * 4, pb.DetachResponse(num_leases=2))

    assert played.run(flows.detach(session)) == 2

    assert (len(played.sent), len(played.pauses), session.link.has_ended) == (5, 3, True)
    again = Played(session, clock)
    assert (again.run(flows.detach(session)), again.sent) == (0, [])


def test_detach_whose_first_try_was_carried_out_is_done(session: Session, clock: Clock) -> None:
    """Where only the answer was lost, the daemon does not know the worker any more, and the detach is done."""
    session.raises = True
    played = Played(session, clock, UnavailableError(), UnknownWorkerError())

    assert played.run(flows.detach(session)) == 0

    assert session.link.has_ended


@pytest.mark.parametrize(("proof", "how"), [("pidfd", "7 --force"), ("none", "7")])
def test_worker_that_cannot_be_detached_is_warned_of(
    session: Session, clock: Clock, caplog: pytest.LogCaptureFixture, proof: str, how: str
) -> None:
    """A warning names the worker whose leases an absent daemon keeps, and what ends it; closing again tries again."""
    session.death_proof = proof

    assert Played(session, clock, UnavailableError()).run(flows.detach(session)) == 0

    assert clock.now == pytest.approx(105, abs=flows.LONGEST_PAUSE_SECONDS)
    assert "worker 7 of cache 'demo' could not be detached" in caplog.text
    assert f"kvlease detach {how} (" in caplog.text
    assert "if it is still running, the daemon gives its blocks to nobody else" in caplog.text
    assert not session.link.has_ended
    assert Played(session, clock, pb.DetachResponse(num_leases=1)).run(flows.detach(session)) == 1


@pytest.mark.parametrize("raises", [False, True], ids=["miss", "raise"])
def test_closed_worker_says_so_by_itself(session: Session, clock: Clock, raises: bool) -> None:
    """A closed worker answers every call itself: nothing is sent."""
    Played(session, clock, pb.DetachResponse()).run(flows.detach(session))
    session.raises = raises
    step = calls.step(
        verbs=[1], lease_ids=[5], num_tokens=[9], num_keys=None, first_blocks=None, keys=b"",
        reserves=[],
    )  # fmt: skip
    played = Played(session, clock)
    closed = "this worker was closed"

    if not raises:
        assert closed in str(played.run(verbs.reserve(session, SPEC, 0)).refusal)
        columns, _ = played.run(steps.step(session, step, []))
        assert closed in columns.errors[0].message
        assert played.run(flows.missed(session, calls.unpin(1), flows.not_there)) is False
    else:
        for flow in (
            verbs.reserve(session, SPEC, 0), steps.step(session, step, []), flows.detach(session),
            flows.missed(session, calls.unpin(1), flows.not_there), flows.heartbeat(session),
        ):  # fmt: skip
            with pytest.raises(UnknownWorkerError, match=closed):
                played.run(flow)
    assert played.sent == []


# Blocks


def test_blocks_are_in_token_order_however_they_came(session: Session, clock: Clock) -> None:
    """A lease that grows by many extends has every block once and in order, whether it was read in between or not."""
    grant = leased(session, clock, 5, 0)

    for block in range(1, 200):
        answer = pb.ExtendResponse(block_ids=ids(block))
        num_tokens = (block + 1) * 16
        Played(session, clock, answer).run(verbs.extend(session, grant, num_tokens, 0))
        if block % 50 == 0:
            assert grant.block_ids.tolist() == list(range(block + 1))

    assert grant.block_ids.tolist() == list(range(200))
    assert grant.num_blocks == 200


# Step


@pytest.fixture
def columns() -> dict[str, Any]:
    """Give the columns of a step of three operations."""
    verbs = np.array([pb.STEP_VERB_EXTEND, pb.STEP_VERB_COMMIT, pb.STEP_VERB_RELEASE], np.uint8)
    return {
        "verbs": verbs,
        "lease_ids": np.array([5, 6, 7]),
        "num_tokens": [32, 16, 0],
        "num_keys": [0, 1, 0],
        "first_blocks": None,
        "keys": bytes(32),
        "reserves": [SPEC],
    }


def test_step_moves_its_leases_along(
    session: Session, clock: Clock, columns: dict[str, Any]
) -> None:
    """Extended leases gain blocks, refused ones are lost where they must be, released ones end, and new ones begin."""
    extended, unknown, released = (leased(session, clock, lease_id, 0) for lease_id in (5, 6, 7))
    answer = pb.StepResponse(
        codes=ids(0, UnknownLeaseError.number, 0),
        num_blocks=ids(1, 0, 0),
        block_ids=ids(3),
        reserves=[pb.StepReserve(granted=granted(8, 4))],
    )
    played = Played(session, clock, answer)

    replies, grants = played.run(steps.step(session, calls.step(**columns), columns["reserves"]))

    assert extended.block_ids.tolist() == [0, 3]
    assert (extended.is_live, unknown.is_live, released.is_live) == (True, False, False)
    assert [grant.lease_id for grant in grants] == [8]
    assert replies.codes.tolist() == [0, UnknownLeaseError.number, 0]
    assert sorted(session.grants) == [5, 8]


def test_refused_operation_of_a_step_says_why(
    session: Session, clock: Clock, columns: dict[str, Any]
) -> None:
    """A lease keeps the reason, or at least the code, for which its operation was refused, until one succeeds."""
    one, two, _ = (leased(session, clock, lease_id, 0) for lease_id in (5, 6, 7))
    full = pb.Error(
        code="POOL_FULL", message="full", resource="device_blocks", need=3, available=1, limit=4
    )
    full.retry_after_ms = 40
    refused = pb.StepResponse(
        codes=ids(PoolFullError.number, PoolFullError.number, 0),
        num_blocks=ids(0, 0, 0),
        errors=[pb.StepError(index=0, error=full)],
    )
    step = calls.step(**(columns | {"reserves": []}))

    replies, _ = Played(session, clock, refused).run(steps.step(session, step, []))

    refusal = one.refusal
    assert isinstance(refusal, PoolFullError)
    assert (refusal.message, refusal.need, refusal.available, refusal.limit) == ("full", 3, 1, 4)
    assert (refusal.resource, refusal.retry_after_ms) == ("device_blocks", 40)
    assert replies.errors == {0: refusal}
    assert (type(two.refusal), two.is_live) == (PoolFullError, True)

    done = pb.StepResponse(codes=ids(0, 0, 0), num_blocks=ids(1, 0, 0), block_ids=ids(3))
    Played(session, clock, done).run(steps.step(session, step, []))
    assert (one.refusal, two.refusal, session.refused_in_steps) == (None, None, set())


def test_step_that_fails_is_a_miss_of_every_operation(
    session: Session, clock: Clock, columns: dict[str, Any]
) -> None:
    """A step in doubt counts as not done: its releases as ended, its extends as doubtful."""
    extended, _, released = (leased(session, clock, lease_id, 0) for lease_id in (5, 6, 7))

    replies, grants = Played(session, clock, DeadlineError()).run(
        steps.step(session, calls.step(**columns), columns["reserves"])
    )

    assert replies.codes.tolist() == [DeadlineError.number] * 3
    assert [type(grant.refusal) for grant in (*grants, extended)] == [DeadlineError] * 2
    assert [type(replies.errors[index]) for index in range(3)] == [DeadlineError] * 3
    assert (extended.is_live, released.is_live, session.doubtful) == (True, False, {5})


def test_doubtful_lease_is_checked_by_the_next_step(
    session: Session, clock: Clock, columns: dict[str, Any]
) -> None:
    """After a step in doubt, an extend that says "nothing to add" counts only if all blocks are here."""
    extended = leased(session, clock, 5, 0)
    step = calls.step(**(columns | {"reserves": []}))
    Played(session, clock, DeadlineError()).run(steps.step(session, step, []))

    nothing = pb.StepResponse(codes=ids(0, 0, 0), num_blocks=ids(0, 0, 0))
    Played(session, clock, nothing).run(steps.step(session, step, []))

    assert not extended.is_live


def test_refused_reserve_of_a_step_says_why(
    session: Session, clock: Clock, columns: dict[str, Any]
) -> None:
    """One reserve of a step may be refused while the rest of the step is done."""
    refused = pb.StepReserve(error=pb.Error(code="POOL_FULL", message="full", need=3))
    answer = pb.StepResponse(codes=ids(0, 0, 0), num_blocks=ids(0, 0, 0), reserves=[refused])

    _, grants = Played(session, clock, answer).run(
        steps.step(session, calls.step(**columns), columns["reserves"])
    )

    assert (grants[0].is_live, type(grants[0].refusal)) == (False, PoolFullError)


@pytest.mark.parametrize(
    "wrong",
    [
        {"verbs": [300]},
        {"lease_ids": [0.5]},
        {"num_tokens": [2**40]},
        {"num_tokens": ["many"]},
        {"keys": "text"},
    ],
)
def test_column_that_would_not_fit_is_refused(
    columns: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Numbers are never wrapped or cut to fit a column."""
    with pytest.raises(InvalidError):
        calls.step(**(columns | wrong))


INPUTS = PlanInputs(tokens_per_block=16)
NO_COLUMNS: dict[str, Any] = {
    "verbs": [], "lease_ids": [], "num_tokens": [], "num_keys": None, "first_blocks": None,
    "keys": b"", "reserves": [],
}  # fmt: skip


def a_reserve(**wrong: Any) -> object:
    """Ask for a lease with one argument changed."""
    return calls.reserve(**({"request_id": "r", "num_tokens": 1} | wrong))


def an_attach(**wrong: Any) -> object:
    """Ask to attach with one argument changed."""
    names = ("cache", "worker_name", "tenant", "layout_fingerprint", "engine", "magazine")
    return attach_request(**(dict.fromkeys(names, "name") | {"rank": 0} | wrong))


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda: calls.evict(num_blocks=2**40), "num_blocks must be from 0 to 2147483647"),
        (lambda: calls.evict(wait_ms=-1), "wait_ms must be 0 or more, not -1"),
        (lambda: calls.explain_lease(2**63), "lease_id must be from"),
        (lambda: calls.explain_lease(2**300), "lease_id must be from .* an integer of 301 bits"),
        (lambda: calls.fork(1, "r", 2**32, 0), "num_tokens must be from"),
        (lambda: calls.extend(1, 5, 2**32), "wait_ms must be from"),
        (lambda: calls.trim(1, -1), "num_tokens must be from"),
        (lambda: calls.detach(2**63), "worker_id must be from"),
        (
            lambda: calls.reserve(request_id="r", num_tokens=-1),
            "num_tokens must be from 1 to 2147483647, not -1",
        ),
        (
            lambda: calls.reserve(request_id="r", num_tokens=1, retain_seconds=-1),
            "retain_seconds must be from",
        ),
        (lambda: calls.reserve(request_id="\ud800", num_tokens=1), "request_id must be text"),
        (lambda: calls.reserve(request_id=5, num_tokens=1), "request_id must be a string"),  # type: ignore[arg-type]
        (lambda: calls.stats(7), "cache must be a string, not 7"),  # type: ignore[arg-type]
        (lambda: calls.pin("ab"), "keys must be bytes, such as an array's tobytes"),  # type: ignore[arg-type]
        (lambda: a_reserve(keys=np.zeros(32, np.uint8)), "keys must be bytes"),
        (lambda: a_reserve(keys=bytearray(32)), "keys must be bytes, .* not bytearray"),
        (lambda: a_reserve(token_ids=np.arange(32)), "token_ids must be bytes"),
        (
            lambda: a_reserve(num_tokens=3, token_ids=bytes(16)),
            "4 tokens, but num_tokens is 3; send",
        ),
        (
            lambda: a_reserve(token_ids=bytes(4) + b"\0\0\0\x80"),
            r"\[1\] is -2147483648; a token id",
        ),
        (lambda: a_reserve(num_tokens=True), "num_tokens must be an integer, not True"),
        (lambda: a_reserve(retain_priority="high"), "retain_priority must be an integer, or left"),
        (lambda: a_reserve(explain="no"), "explain must be true or false, not 'no'"),
        (lambda: an_attach(cache=3), "cache must be a string, not 3"),
        (lambda: an_attach(rank=-1), "rank must be 0 or more, not -1"),
        (lambda: calls.register("z", "{}", None), "inputs must be a PlanInputs"),  # type: ignore[arg-type]
        (
            lambda: calls.register("z", INPUTS, None),  # type: ignore[arg-type]
            "options must be a CacheOptions, not None",
        ),
        (lambda: calls.plan("{}"), "inputs must be a PlanInputs"),  # type: ignore[arg-type]
        (
            lambda: calls.explain(INPUTS, (["what=1"],)),  # type: ignore[arg-type]
            r"changes\[0\] must be a string",
        ),
        (
            lambda: operator_calls.set_tenant("t", {"min_percent": 4}, 5),  # type: ignore[arg-type]
            "limits must be a TenantLimits, not {'min_percent': 4}",
        ),
        (
            lambda: calls.step(**(NO_COLUMNS | {"reserves": [{}]})),
            "reserves must be a ReserveSpec, not {}",
        ),
        (lambda: calls.step(**(NO_COLUMNS | {"keys": []})), "keys must be bytes"),
        (lambda: calls.unpin(1.5), "pin_id must be an integer, not 1.5"),  # type: ignore[arg-type]
    ],
)
def test_number_that_no_field_carries_is_refused_by_its_name(
    ask: Callable[[], object], named: str
) -> None:
    """A wrong number or text is refused with the name of its argument and with what it may be."""
    with pytest.raises(InvalidError, match=named):
        ask()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e10, 1e300, 10**400, "1"])
def test_time_that_nobody_can_wait_is_refused(session: Session, seconds: Any) -> None:
    """Deadlines and silences are positive and small enough for a timer; only None waits for ever."""
    watch = calls.watch("", 0)
    with pytest.raises(InvalidError, match="idle_seconds must be"):
        flows.streamed(session.link, watch, seconds)
    with pytest.raises(InvalidError, match="deadline_seconds must be"):
        Client(deadline_seconds=seconds)

    assert flows.streamed(session.link, watch, None).verb == "watch"
    assert flows.streamed(session.link, watch, 1_000_000).verb == "watch"


def test_numbers_of_arrays_are_numbers() -> None:
    """Whatever Python takes for an integer is taken here."""
    assert calls.evict(num_blocks=np.int64(5)).request == pb.EvictRequest(num_blocks=5)  # type: ignore[arg-type]


def test_worker_that_is_closed_while_it_attaches_again_leaves_nobody_behind(
    session: Session, clock: Clock
) -> None:
    """A detach under the old token does not end the worker that a heartbeat has just made anew."""
    again = attached(epoch=2)
    again.worker_id, again.token = 9, "new"

    class Closing(Played):
        def _answer(self, action: Any) -> Any:
            if isinstance(action, flows.Attach):
                with pytest.raises(UnknownWorkerError):
                    Played(session, clock, UnknownWorkerError()).run(flows.detach(session))
            return super()._answer(action)

    session.raises = True
    played = Closing(
        session, clock, StaleEpochError(), Attached(again, []), pb.DetachResponse(num_leases=0)
    )
    with pytest.raises(UnknownWorkerError, match="detached"):
        played.run(flows.heartbeat(session))

    assert [call.token for call in played.sent] == ["token 1", "new"]
    assert played.sent[-1].verb == "detach"
