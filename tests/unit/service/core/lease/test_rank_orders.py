"""Laws of ranks that call separately, over all orders of their calls."""

from collections.abc import Callable, Sequence
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import KVLeaseError
from kvlease.ids import Epoch, LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.checks.sound import Sound
from kvleased.core.effects import Copy, Reserved
from tests.unit.service.core.builders import (
    EPOCH,
    TENANT,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    answer,
    found,
    keys,
    land,
    records,
)
from tests.unit.service.core.rank_builders import PLACES, an_attach

RANKS: Final = tuple(PLACES)
NUM_BLOCKS: Final = 12
KEYS: Final = keys(1, 2, 3, 4)

_Act = Callable[[WorkerId, LeaseId], c.Command]


def _extend(num_blocks: int) -> _Act:
    return lambda worker, lease: an_extend(lease, num_blocks, worker_id=worker, wait_ms=WAIT_MS)


def _commit(first: int, last: int) -> _Act:
    return lambda worker, lease: c.Commit(
        worker_id=worker,
        lease_id=lease,
        num_tokens=last * TOKENS_PER_BLOCK,
        first_block=first,
        keys=KEYS[first * 32 : last * 32],
    )


def _trim(num_blocks: int) -> _Act:
    return lambda worker, lease: c.Trim(
        worker_id=worker, lease_id=lease, num_tokens=num_blocks * TOKENS_PER_BLOCK
    )


def _map(worker: WorkerId, lease: LeaseId) -> c.Map:
    return c.Map(worker_id=worker, lease_id=lease)


def _release(worker: WorkerId, lease: LeaseId) -> c.Release:
    return c.Release(worker_id=worker, lease_id=lease)


RUN: Final[tuple[_Act, ...]] = (
    _map,
    _commit(0, 1),
    _extend(3),
    _commit(1, 2),
    _extend(6),
    _trim(4),
    _extend(5),
    _commit(2, 4),
)
"""The acts of every rank after its reserve."""
MOVED: Final[tuple[_Act, ...]] = (
    *RUN[:4],
    lambda worker, lease: c.Evict(worker_id=worker, lease_id=lease, wait_ms=WAIT_MS),
    lambda worker, lease: a_reload(lease, worker_id=worker),
    _extend(4),
    _commit(2, 4),
)
"""The same acts, with an evict and a reload in between."""


class Engine:
    """The ranks of an engine: each makes its calls in order, and waits for each answer."""

    def __init__(self, acts: Sequence[_Act]) -> None:
        """Attach three ranks."""
        self.cache: Cache = a_cache(NUM_BLOCKS, num_ranks=len(RANKS))
        self._sound = Sound()
        self._acts = acts
        self._at = dict.fromkeys(RANKS, 0)
        self._waiting: dict[int, WorkerId] = {}
        self._leases: dict[WorkerId, LeaseId] = {}
        for rank in RANKS:
            self.cache.handle(an_attach(rank), 0.0)

    def can_go_on(self, rank: WorkerId) -> bool:
        """Return whether a rank has another call to make and waits for no answer."""
        return self._at[rank] <= len(self._acts) and rank not in self._waiting.values()

    def go_on(self, rank: WorkerId) -> None:
        """Have a rank make its next call."""
        at = self._at[rank]
        self._at[rank] += 1
        if at == 0:
            reply = self.cache.handle(a_reserve(2, worker_id=rank), 0.0)
            self._leases[rank] = answer(reply, Reserved).lease_id
        else:
            self._send(rank, self._acts[at - 1](rank, self._leases[rank]))
        assert self.cache.check(self._sound) == []

    def end(self, rank: WorkerId, *, dies: bool) -> None:
        """Let a rank release its lease, in whatever phase that is."""
        lease_id = self._leases.get(rank)
        if dies or lease_id is None:
            self._send(rank, c.WorkerDied(worker_id=rank))
        else:
            self._send(rank, _release(rank, lease_id))
        self._at[rank] = len(self._acts) + 1
        assert self.cache.check(self._sound) == []

    def finish(self) -> None:
        """Let all ranks go on until none can."""
        while able := [rank for rank in RANKS if self.can_go_on(rank)]:
            self.go_on(able[0])

    def restart(self) -> None:
        """Restart the control process."""
        living = dict.fromkeys(RANKS, TENANT)
        self.cache = Cache.recovered(
            self.cache.shape, records(self.cache), Epoch(EPOCH + 1), living, 0.0, PLACES
        )
        self._waiting.clear()
        assert self.cache.check(self._sound) == []

    def _send(self, rank: WorkerId, command: c.Command) -> None:
        try:
            outcome = self.cache.handle(command, 0.0)
        except KVLeaseError:
            return
        if outcome.ticket is not None:
            self._waiting[outcome.ticket] = rank
        copies = [one for one in outcome.effects if isinstance(one, Copy)]
        effects = [*outcome.effects]
        for copy in copies:
            effects += land(self.cache, copy).effects
        for effect in effects:
            self._waiting.pop(getattr(effect, "ticket", 0), None)


def _end_of(acts: Sequence[_Act], order: Sequence[WorkerId]) -> dict[str, object]:
    engine = Engine(acts)
    for rank in order:
        if engine.can_go_on(rank):
            engine.go_on(rank)
    engine.finish()
    rows = records(engine.cache).rows
    census = engine.cache.census()
    return {
        "found": found(engine.cache, KEYS),
        "num_tokens": int(rows.num_tokens[rows.lease_id != 0][0]),
        "num_blocks": rows.num_blocks[rows.lease_id != 0].tolist(),
        "num_computed": rows.num_computed[rows.lease_id != 0].tolist(),
        "device": census.device,
    }


orders = st.lists(st.sampled_from(RANKS), max_size=30)


@given(orders)
def test_the_end_is_the_same_in_every_order(order: list[WorkerId]) -> None:
    """What is published, held and free depends on what the ranks do, not on which one is faster."""
    assert _end_of(RUN, order) == _end_of(RUN, ())


@given(orders)
def test_a_way_through_the_host_pool_is_the_same_in_every_order(order: list[WorkerId]) -> None:
    """All ranks evict and reload together, whichever asks first."""
    assert _end_of(MOVED, order) == _end_of(MOVED, ())


@given(
    st.sampled_from((RUN, MOVED)),
    orders,
    st.permutations(RANKS),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.booleans(),
)
def test_nothing_is_left_whenever_ranks_end(
    acts: Sequence[_Act], order: list[WorkerId], ends: list[WorkerId], dies: list[bool], again: bool
) -> None:
    """If ranks end at any point, in any order, by word or by death, with or without a restart, no block stays held."""
    engine = Engine(acts)
    for rank in order:
        if engine.can_go_on(rank):
            engine.go_on(rank)
    if again:
        engine.restart()
    for rank, dead in zip(ends, dies, strict=True):
        engine.end(rank, dies=dead)
        engine.finish()

    census = engine.cache.census()
    assert census.num_leases == 0
    assert census.device["free"] + census.device["ready"] == NUM_BLOCKS
