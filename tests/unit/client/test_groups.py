"""Laws of leases with several groups, of forks and of trims, with time passed in and nothing sent."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlease._calling import calls, steps, verbs
from kvlease._calling.grants import Grant
from kvlease._calling.session import Session
from kvlease.errors import (
    DeadlineError,
    InvalidError,
    PoolFullError,
    StaleEpochError,
    UnknownLeaseError,
)
from kvlease.memory.mapped import Row
from kvlease.plan import EngineInputs, PlanInputs
from kvlease.replies import ReserveSpec
from kvlease.spec import FullAttention, SlidingWindow, StateSpace
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.planning import plan
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

HYBRID = plan(
    PlanInputs(
        layers=(
            FullAttention(name="full", num_kv_heads=1, head_size=4, dtype="float32"),
            SlidingWindow(
                name="window", num_kv_heads=1, head_size=4, dtype="float32", window_tokens=32
            ),
        ),
        tokens_per_block=16,
        device_blocks=64,
        null_blocks=1,
        longest_request_tokens=256,
    )
)
"""A full group, and a group with a window of 32 tokens that holds as many blocks as a row has."""


@pytest.fixture
def clock() -> Clock:
    """Give a clock that stands still."""
    return Clock()


@pytest.fixture
def hybrid(clock: Clock) -> Session:
    """Give a worker of a cache with two groups."""
    return session_of(clock, raises=False, plan=HYBRID)


@pytest.fixture
def plain(clock: Clock) -> Session:
    """Give a worker of a cache with one group."""
    return session_of(clock, raises=False)


def reserved(session: Session, clock: Clock, lease_id: int = 5) -> Grant:
    """Reserve 32 tokens in both groups, without a hit."""
    answer = pb.ReserveResponse(
        lease_id=lease_id, block_ids=ids(1, 2, 3, 4), num_blocks=ids(2, 2), covered_tokens=32
    )
    grant: Grant = Played(session, clock, answer).run(
        verbs.reserve(session, ReserveSpec(request_id="r", num_tokens=32), 0)
    )
    return grant


def tables(grant: Grant) -> list[list[int]]:
    """Return the tables of both groups."""
    return [grant.blocks(group).tolist() for group in range(2)]


class Memory:
    """The block table of one lease."""

    def __init__(self, *tables: list[int], is_active: bool = True) -> None:
        flat = np.array([block for table in tables for block in table], np.int32)
        self._row = Row(is_active, flat, np.array([len(table) for table in tables], np.int32))
        self.identity = ()

    def row(self, row: int, lease_id: int) -> Row | None:
        """Return the row."""
        del row, lease_id
        return self._row


def test_reserve_fills_the_table_of_each_group(hybrid: Session, clock: Clock) -> None:
    """A prefix that is a hit leaves the places before the window empty."""
    answer = pb.ReserveResponse(
        lease_id=5,
        block_ids=ids(1, 2, 3, 4, 0, 0, 5, 6),
        num_blocks=ids(4, 4),
        device_hit_tokens=64,
        covered_tokens=64,
    )

    grant = Played(hybrid, clock, answer).run(verbs.reserve(hybrid, SPEC, 0))

    assert tables(grant) == [[1, 2, 3, 4], [0, 0, 5, 6]]
    assert (grant.num_blocks, grant.covered_tokens) == (6, 64)


def test_extend_of_groups_is_checked_by_what_is_covered(hybrid: Session, clock: Clock) -> None:
    """Where a window must move on first, an extend covers less than was asked for, and no block is lost."""
    grant = reserved(hybrid, clock)
    answer = pb.ExtendResponse(
        block_ids=ids(5, 6, 7), num_blocks=ids(2, 1), covered_tokens=48, num_places=ids(4, 3)
    )

    is_done = Played(hybrid, clock, answer).run(verbs.extend(hybrid, grant, 64, 0))

    assert is_done
    assert tables(grant) == [[1, 2, 5, 6], [3, 4, 7]]
    assert grant.covered_tokens == 48


def test_commit_empties_what_lies_before_the_window(hybrid: Session, clock: Clock) -> None:
    """The lease no longer has the blocks that a commit gives back."""
    grant = reserved(hybrid, clock)
    grant.add_unknown(ids(5, 6, 7, 8), [2, 2], 64, [4, 4])
    answer = pb.CommitResponse(num_committed=8, num_given_back=2)

    committed = Played(hybrid, clock, answer).run(verbs.commit(hybrid, grant, 64, bytes(128), 0))

    assert committed.num_given_back == 2
    assert tables(grant) == [[1, 2, 5, 6], [0, 0, 7, 8]]


def test_commit_in_doubt_gives_back_all_the_same(hybrid: Session, clock: Clock) -> None:
    """A commit in doubt gives back what no later token needs, whether the daemon carried it out or not."""
    grant = reserved(hybrid, clock)
    grant.add_unknown(ids(5, 6, 7, 8), [2, 2], 64, [4, 4])

    Played(hybrid, clock, DeadlineError()).run(verbs.commit(hybrid, grant, 64, bytes(128), 0))

    assert tables(grant)[1] == [0, 0, 7, 8]


def test_refused_commit_gives_nothing_back(hybrid: Session, clock: Clock) -> None:
    """A refusal changes nothing."""
    grant = reserved(hybrid, clock)

    Played(hybrid, clock, PoolFullError()).run(verbs.commit(hybrid, grant, 32, bytes(64), 0))

    assert tables(grant) == [[1, 2], [3, 4]]


def test_doubtful_lease_of_groups_is_read_from_its_row(hybrid: Session, clock: Clock) -> None:
    """After an extend whose answer was lost, the next extend reads all places from the table, and loses none."""
    grant = reserved(hybrid, clock)
    Played(hybrid, clock, DeadlineError()).run(verbs.extend(hybrid, grant, 48, 0))
    hybrid.memory = Memory([1, 2, 5, 7], [3, 4, 6, 8])  # type: ignore[assignment]  # a double

    answer = pb.ExtendResponse(block_ids=ids(7, 8), num_blocks=ids(1, 1), covered_tokens=64)
    is_done = Played(hybrid, clock, answer).run(verbs.extend(hybrid, grant, 64, 0))

    assert (is_done, tables(grant)) == (True, [[1, 2, 5, 7], [3, 4, 6, 8]])


GUESSING = plan(
    PlanInputs(
        layers=(
            FullAttention(name="full", num_kv_heads=1, head_size=4, dtype="float32"),
            StateSpace(
                name="state",
                shapes=((32,),),
                dtypes=("float32",),
                tokens_per_block=16,
                num_speculative_blocks=2,
            ),
        ),
        engine=EngineInputs(state_mode="align"),
        tokens_per_block=16,
        device_blocks=64,
        null_blocks=1,
        longest_request_tokens=256,
    )
)
"""A full group, and a group of recurrent states with two blocks for speculative tokens."""


@pytest.mark.parametrize(
    ("engine", "num_places", "expected"),
    [
        pytest.param("", (3, 5), [4, 0, 6, 5, 9], id="alone"),
        pytest.param("left", (3, 6), [4, 0, 6, 0, 5, 9], id="rank whose mate asked for more"),
    ],
)
def test_speculative_blocks_that_move_on_are_put_where_they_stand(
    clock: Clock, engine: str, num_places: tuple[int, ...], expected: list[int]
) -> None:
    """An extend names speculative blocks anew, and says at which places they end if other ranks ask for more, too."""
    session = session_of(clock, raises=False, plan=GUESSING)
    session.request.engine = engine
    reply = pb.ReserveResponse(
        lease_id=5, block_ids=ids(1, 4, 5, 6), num_blocks=ids(1, 3), covered_tokens=16
    )
    spec = ReserveSpec(request_id="r", num_tokens=16)
    grant = Played(session, clock, reply).run(verbs.reserve(session, spec, 0))

    answer = pb.ExtendResponse(
        block_ids=ids(2, 3, 5, 9),
        num_blocks=ids(2, 2),
        covered_tokens=44,
        num_places=ids(*num_places),
    )
    is_done = Played(session, clock, answer).run(verbs.extend(session, grant, 44, 0))

    assert (is_done, tables(grant)) == (True, [[1, 2, 3], expected])
    assert grant.num_blocks == 7


def test_doubtful_lease_of_groups_is_lost_without_a_table(hybrid: Session, clock: Clock) -> None:
    """Places may be empty, so a missing block would not be seen: without a table a doubtful lease is lost."""
    grant = reserved(hybrid, clock)
    Played(hybrid, clock, DeadlineError()).run(verbs.extend(hybrid, grant, 48, 0))

    answer = pb.ExtendResponse(block_ids=b"", covered_tokens=32)
    Played(hybrid, clock, answer).run(verbs.extend(hybrid, grant, 32, 0))

    assert not grant.is_live


@pytest.mark.parametrize(("is_active", "expected"), [(True, [[1, 2], [0, 4]]), (False, [[], []])])
def test_restart_brings_the_places_back(
    hybrid: Session,
    clock: Clock,
    is_active: bool,
    expected: list[list[int]],
) -> None:
    """A lease that survives a restart has the places of its row, and none while it is evicted."""
    grant = reserved(hybrid, clock)
    memory: Any = Memory([1, 2], [0, 4], is_active=is_active)
    hybrid.memory = memory

    hybrid.adopt(Attached(attached(epoch=2, lease_ids=(5,), plan=HYBRID), []), resumed=True)

    assert (tables(grant), grant.is_evicted) == (expected, not is_active)


def test_reload_brings_every_group_back(hybrid: Session, clock: Clock) -> None:
    """A reloaded lease has the places that the daemon names, empty ones among them."""
    grant = reserved(hybrid, clock)
    Played(hybrid, clock, pb.EvictResponse(num_evicted=3)).run(verbs.evict(hybrid, grant, 0))
    answer = pb.ReloadResponse(block_ids=ids(8, 9, 0, 7), num_blocks=ids(2, 2), num_tokens=32)

    Played(hybrid, clock, answer).run(verbs.reload(hybrid, grant, 0))

    assert tables(grant) == [[8, 9], [0, 7]]


# Steps


def step_of(session: Session, lease_ids: list[int], verbs: list[int], num_tokens: list[int]) -> Any:
    """Return the flow of a step that has no reserves."""
    ask = calls.step(
        verbs=np.array(verbs, np.uint8),
        lease_ids=np.array(lease_ids),
        num_tokens=num_tokens,
        num_keys=None,
        first_blocks=None,
        keys=b"",
        reserves=[],
    )
    return steps.step(session, ask, [])


def test_step_tells_groups_apart(hybrid: Session, clock: Clock) -> None:
    """The columns of a step have one number for each operation and group, and the step's leases follow them."""
    first, second = reserved(hybrid, clock, 5), reserved(hybrid, clock, 6)
    answer = pb.StepResponse(
        codes=ids(0, 0, 0),
        num_blocks=ids(1, 1, 0, 0, 1, 1),
        block_ids=ids(10, 11, 12, 13),
        num_places=ids(3, 3, 0, 0, 3, 3),
    )
    extend, commit = pb.STEP_VERB_EXTEND, pb.STEP_VERB_COMMIT
    flow = step_of(hybrid, [5, 6, 6], [extend, commit, extend], [48, 48, 48])

    columns, _ = Played(hybrid, clock, answer).run(flow)

    assert columns.num_blocks.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert tables(first) == [[1, 2, 10], [3, 4, 11]]
    assert tables(second) == [[1, 2, 12], [0, 4, 13]]


def test_block_that_a_commit_gives_back_may_come_again_in_the_same_step(
    hybrid: Session, clock: Clock
) -> None:
    """What a commit of a step gives back, an extend of the same lease may get: only its new place has it then."""
    grant = reserved(hybrid, clock)
    answer = pb.StepResponse(
        codes=ids(0, 0),
        num_blocks=ids(0, 0, 2, 2),
        block_ids=ids(10, 11, 3, 13),
        num_places=ids(0, 0, 4, 4),
    )
    flow = step_of(hybrid, [5, 5], [pb.STEP_VERB_COMMIT, pb.STEP_VERB_EXTEND], [48, 64])

    Played(hybrid, clock, answer).run(flow)

    assert tables(grant) == [[1, 2, 10, 11], [0, 4, 3, 13]]
    assert (grant.num_blocks, grant.covered_tokens) == (7, 64)


def test_step_that_fails_leaves_groups_doubtful(hybrid: Session, clock: Clock) -> None:
    """After a step that fails, extends are doubtful, what commits gave back is not used, and columns keep shape."""
    first, second = reserved(hybrid, clock, 5), reserved(hybrid, clock, 6)
    flow = step_of(hybrid, [5, 6], [pb.STEP_VERB_EXTEND, pb.STEP_VERB_COMMIT], [48, 48])

    columns, _ = Played(hybrid, clock, DeadlineError()).run(flow)

    assert columns.num_blocks.tolist() == [[0, 0], [0, 0]]
    assert hybrid.doubtful == {5}
    assert (tables(first), tables(second)[1]) == ([[1, 2], [3, 4]], [0, 4])


def test_step_that_brings_too_little_loses_the_lease(hybrid: Session, clock: Clock) -> None:
    """Where a group lacks a block, its table has a hole: the lease is lost, not used."""
    grant = reserved(hybrid, clock)
    answer = pb.StepResponse(codes=ids(0), num_blocks=ids(1, 0), block_ids=ids(10))

    Played(hybrid, clock, answer).run(step_of(hybrid, [5], [pb.STEP_VERB_EXTEND], [48]))

    assert not grant.is_live


# Priorities


def test_priority_travels_where_it_is_not_the_normal_one(plain: Session, clock: Clock) -> None:
    """A reserve says how soon it is served and how long its blocks stay; the normal case takes no byte."""
    played = Played(plain, clock, granted(1), granted(2))
    keen = ReserveSpec(request_id="s", num_tokens=16, priority="high", retain_seconds=9)

    for spec in (SPEC, keen):
        played.run(verbs.reserve(plain, spec, 0))

    sent = [call.request for call in played.sent]
    assert [(one.priority, one.retain_seconds) for one in sent] == [("", 0), ("high", 9)]  # type: ignore[attr-defined]


def test_retain_priority_travels_where_it_is_given(plain: Session, clock: Clock) -> None:
    """A retain priority of 0 is sent like any other number; none takes no byte."""
    played = Played(plain, clock, granted(1), granted(2))

    for number in (None, 0):
        played.run(verbs.reserve(plain, replace(SPEC, retain_priority=number), 0))

    sent = [call.request for call in played.sent]
    assert [one.HasField("retain_priority") for one in sent] == [False, True]


@pytest.mark.parametrize("number", [-1, 101, 2**64])
def test_retain_priority_out_of_range_is_refused(number: int) -> None:
    """A number that no wire can carry, or that the daemon would refuse, is refused with the bounds."""
    with pytest.raises(InvalidError, match=f"retain_priority must be from 0 to 100, not {number}"):
        calls.reserve(request_id="r", num_tokens=16, retain_priority=number)


def test_reserves_of_a_step_have_priorities() -> None:
    """The reserves of a step send the same priorities as single reserves."""
    keen = ReserveSpec(
        request_id="s", num_tokens=16, priority="low", retain_seconds=9, retain_priority=70
    )

    ask = calls.step(
        verbs=[], lease_ids=[], num_tokens=[], num_keys=None, first_blocks=None, keys=b"",
        reserves=[keen],
    )  # fmt: skip

    assert isinstance(ask.request, pb.StepRequest)
    assert ask.request.reserves[0] == pb.ReserveRequest(
        request_id="s", num_tokens=16, priority="low", retain_seconds=9, retain_priority=70
    )


# Forks


def forked(lease_id: int, *blocks: int) -> pb.ForkResponse:
    """Return the answer to a fork."""
    return pb.ForkResponse(lease=granted(lease_id, *blocks), num_shared=1, num_copied=1)


def test_fork_is_a_lease_of_its_own(plain: Session, clock: Clock) -> None:
    """A fork has its own id, request and blocks, and ends by itself."""
    source = leased(plain, clock, 5, 0, 1)
    played = Played(plain, clock, forked(6, 0, 2))

    fork = played.run(verbs.fork(plain, source, "twin", 32, 70))

    assert played.sent[0].request == pb.ForkRequest(
        lease_id=5, request_id="twin", num_tokens=32, wait_ms=70
    )
    assert played.sent[0].idempotency_key
    assert (fork.request_id, fork.block_ids.tolist()) == ("twin", [0, 2])
    assert sorted(plain.grants) == [5, 6]


def test_leftover_of_a_lost_fork_is_released_first(plain: Session, clock: Clock) -> None:
    """A fork that a heartbeat may be ending right now is not used: it is released and made anew."""
    source = leased(plain, clock, 5)
    plain.heard([], 20, plain.link.epoch)
    played = Played(plain, clock, forked(15), pb.ReleaseResponse(released=True), forked(21))

    fork = played.run(verbs.fork(plain, source, "twin", 16, 0))

    assert [call.verb for call in played.sent] == ["fork", "release", "fork"]
    assert fork.lease_id == 21


def test_heartbeat_never_speaks_of_a_fork_on_its_way(plain: Session, clock: Clock) -> None:
    """While a fork has no answer, the inventory stays below any id that it may bring."""
    source = leased(plain, clock, 5)
    flow = verbs.fork(plain, source, "twin", 16, 0)
    next(flow)

    plain.heard([], 50, plain.link.epoch)

    assert plain.inventory()[1] == 5
    flow.close()
    assert plain.inventory()[1] == 50


def test_refused_fork_leaves_its_source_alone(plain: Session, clock: Clock) -> None:
    """A refused fork is not live, and the lease that it would have gone on from stays as it is."""
    source = leased(plain, clock, 5)

    fork = Played(plain, clock, PoolFullError()).run(verbs.fork(plain, source, "twin", 16, 0))

    assert (fork.is_live, type(fork.refusal)) == (False, PoolFullError)
    assert (source.is_live, source.refusal) == (True, None)


def test_fork_that_succeeds_ends_the_refusal_of_its_source(plain: Session, clock: Clock) -> None:
    """It is a verb of its source, whose `refusal` is None after a verb that succeeded."""
    source = leased(plain, clock, 5)
    Played(plain, clock, PoolFullError()).run(verbs.extend(plain, source, 64, 0))
    assert isinstance(source.refusal, PoolFullError)

    Played(plain, clock, forked(6)).run(verbs.fork(plain, source, "twin", 16, 0))

    assert source.refusal is None


@pytest.mark.parametrize("raises", [False, True])
def test_fork_of_an_unknown_lease_loses_it(clock: Clock, raises: bool) -> None:
    """A lease that the daemon does not know is lost, and its forks are refused unsent."""
    session = session_of(clock, raises=raises)
    source = leased(session, clock, 5)
    played = Played(session, clock, UnknownLeaseError())

    for _ in range(2):
        if raises:
            with pytest.raises(UnknownLeaseError):
                played.run(verbs.fork(session, source, "twin", 16, 0))
        else:
            fork = played.run(verbs.fork(session, source, "twin", 16, 0))
            assert isinstance(fork.refusal, UnknownLeaseError)

    assert (source.is_live, len(played.sent)) == (False, 1)


def test_fork_goes_on_after_a_restart(plain: Session, clock: Clock) -> None:
    """A fork that meets a restarted daemon goes out again under its key, and its source survives."""
    source = leased(plain, clock, 5)
    back = Attached(attached(epoch=2, lease_ids=(5,)), [])
    played = Played(plain, clock, StaleEpochError(), back, forked(9))

    fork = played.run(verbs.fork(plain, source, "twin", 16, 0))

    first, second = (call.idempotency_key for call in played.sent)
    assert (first, fork.is_live) == (second, True)


# Trims


def test_trim_drops_blocks_behind_a_token(plain: Session, clock: Clock) -> None:
    """A trim gives the blocks behind the token back to the daemon."""
    grant = leased(plain, clock, 5, 0, 1, 2)

    left = Played(plain, clock, pb.TrimResponse(num_given_back=2)).run(verbs.trim(plain, grant, 16))

    assert (left, grant.block_ids.tolist()) == (2, [0])


def test_trim_in_doubt_is_made_up_for(plain: Session, clock: Clock) -> None:
    """Blocks that a trim may have taken back are not used, and an extend that counts on them loses the lease."""
    grant = leased(plain, clock, 5, 0, 1, 2)
    Played(plain, clock, DeadlineError()).run(verbs.trim(plain, grant, 16))
    assert (grant.block_ids.tolist(), grant.is_live) == ([0], True)

    Played(plain, clock, pb.ExtendResponse(covered_tokens=48)).run(
        verbs.extend(plain, grant, 48, 0)
    )

    assert not grant.is_live


def test_refused_trim_changes_nothing(plain: Session, clock: Clock) -> None:
    """A trim below the committed tokens is refused as the caller's mistake."""
    grant = leased(plain, clock, 5, 0, 1)

    with pytest.raises(InvalidError):
        Played(plain, clock, InvalidError()).run(verbs.trim(plain, grant, 1))

    assert grant.block_ids.tolist() == [0, 1]
