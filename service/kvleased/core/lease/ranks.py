"""Own which ranks of an engine share a lease, how far each has computed, and what each has been told.

This is for ranks that each call for themselves. A process that calls for all ranks of its engine has no place here, and
its leases have no members. `joining` and `parting` tell what the calls of members mean for their lease.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from kvlease.errors import KVLeaseError
from kvlease.ids import LeaseId, WorkerId
from kvleased.core.effects import Forked, Reply, Reserved

RANKS_MAX: Final = 64
"""Ranks that can each call for themselves: a row has a bit for each."""


class Place(NamedTuple):
    """Which rank of which engine a worker is."""

    engine: int
    """64 bits that name the engine and its tenant; 0 is no engine."""
    rank: int


NO_PLACES: Final[Mapping[WorkerId, Place]] = MappingProxyType({})
"""The places if every process calls for all ranks of its engine."""


class RankBook:
    """The workers that are each one rank of an engine."""

    def __init__(self, num_ranks: int, *, is_recurrent: bool) -> None:
        """Start empty."""
        self.num_ranks = num_ranks
        self.is_recurrent = is_recurrent
        """Whether the cache keeps recurrent states, each of which belongs to one token."""
        self.places: dict[WorkerId, Place] = {}
        self._workers: dict[Place, WorkerId] = {}

    def sit(self, worker_id: WorkerId, place: Place) -> None:
        """Give a worker its place, which must be free."""
        assert place not in self._workers, "a place is for one worker"
        self.places[worker_id] = place
        self._workers[place] = worker_id

    def rise(self, worker_id: WorkerId) -> None:
        """Free the place of a worker, if it has one."""
        place = self.places.pop(worker_id, None)
        if place is not None:
            del self._workers[place]

    def worker_at(self, place: Place) -> WorkerId | None:
        """Return the living worker at a place."""
        return self._workers.get(place)

    def holder_of(self, worker_id: WorkerId) -> int:
        """Return the holder of a worker's requests: the worker's id or, negative and so no worker's, its engine's."""
        place = self.places.get(worker_id)
        return worker_id if place is None or self.num_ranks == 1 else -place.engine

    def members_for(self, worker_id: WorkerId) -> "Members | None":
        """Return the members of a new lease, with its caller as the first; None if there can be no other member."""
        place = self.places.get(worker_id)
        if place is None or self.num_ranks == 1:
            return None
        return Members(place, worker_id, self)


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One rank's part in a lease."""

    worker_id: WorkerId
    rank: int
    joined_id: LeaseId
    """The id under which it joined, from the same count as lease ids; the first member's is the lease's own."""
    told: list[int] = field(default_factory=list)
    """By group: where the places that it has been told of end."""
    num_tokens: int = 0
    """Tokens that it wants the lease to cover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A member's call that waits for its lease, beside the calls of other members."""

    ticket: int
    worker_id: WorkerId
    deadline: float
    joined_id: LeaseId

    def answer(self, result: Reply | KVLeaseError) -> Reply | KVLeaseError:
        """Return `result`, which all waiting members get, as this caller is told it."""
        if isinstance(result, Reserved):
            return replace(result, joined_id=self.joined_id)
        if isinstance(result, Forked):
            return replace(result, lease=replace(result.lease, joined_id=self.joined_id))
        return result


class Members:
    """The ranks that share one lease.

    A rank that has not joined yet has computed nothing. What a rank has committed still counts after it has left.
    """

    def __init__(self, place: Place, worker_id: WorkerId, book: RankBook) -> None:
        """Begin with the rank that asked first."""
        first = Member(worker_id=worker_id, rank=place.rank, joined_id=LeaseId(0))
        self.engine = place.engine
        self.num_ranks = book.num_ranks
        self.is_recurrent = book.is_recurrent
        self.hit_tokens = 0
        """Tokens of the prefix that was found, which every rank has before it computes anything."""
        self.ahead_tokens = 0
        """How many tokens some rank may have computed, after a restart, which forgets what each rank had committed."""
        self.present: dict[WorkerId, Member] = {worker_id: first}
        self.commits: dict[int, list[int]] = {place.rank: []}
        """By rank that ever joined: its commits that not all ranks have made, and always its newest one."""
        self.evicts: dict[WorkerId, Call] = {}
        """Calls of members that wait until all other members want the lease off the device, too."""

    def __repr__(self) -> str:
        """Show life: which ranks are there and how far they have come."""
        ranks = sorted(one.rank for one in self.present.values())
        return f"<Members {ranks} of {self.num_ranks}, all at {self.agreed()} tokens or beyond>"

    @property
    def mask(self) -> int:
        """A bit for each rank that has the lease now."""
        return sum(1 << one.rank for one in self.present.values())

    @property
    def mask_ever(self) -> int:
        """A bit for each rank that ever had the lease."""
        return sum(1 << rank for rank in self.commits)

    @property
    def have_all_joined(self) -> bool:
        """Whether every rank of the engine has had the lease."""
        return len(self.commits) == self.num_ranks

    @property
    def all_want_down(self) -> bool:
        """Whether all ranks have joined (one yet to come may write) and all present ones want the lease evicted."""
        return self.have_all_joined and self.evicts.keys() == self.present.keys()

    def begin(self, lease_id: LeaseId, ends: list[int], num_tokens: int, hit_tokens: int) -> None:
        """Note the places and tokens that the lease begins with; its first members are told of them."""
        self.hit_tokens = hit_tokens
        for member in self.present.values():
            member.told, member.num_tokens, member.joined_id = [*ends], num_tokens, lease_id

    def join(self, member: Member) -> None:
        """Let a rank share the lease; a rank that had it before begins anew."""
        self.present[member.worker_id] = member
        self.commits[member.rank] = []

    def part(self, worker_id: WorkerId, *, has_learned: bool) -> Member:
        """Take a member out; its commits still count. If it never learned of the lease, it counts as not joined."""
        member = self.present.pop(worker_id)
        if not has_learned:
            del self.commits[member.rank]
        return member

    # Tokens -------------------------------------------------------------------------------------------------------

    def agreed(self, worker_id: WorkerId | None = None, num_tokens: int = 0) -> int:
        """Return how many tokens all ranks have committed, once a member has committed `num_tokens`.

        If the cache keeps states, that is the newest commit that all ranks have made at the same token.
        """
        if not self.have_all_joined:
            return 0
        mine = None if worker_id is None else self.present[worker_id].rank
        made = [
            [*commits, num_tokens] if rank == mine else commits
            for rank, commits in self.commits.items()
        ]
        if self.is_recurrent:
            return max(set(made[0]).intersection(*made[1:]), default=0)
        return min(max(commits, default=0) for commits in made)

    def note(self, worker_id: WorkerId, num_tokens: int) -> None:
        """Note a commit of a member; forget commits that all ranks have made, except each rank's newest."""
        self.commits[self.present[worker_id].rank].append(num_tokens)
        agreed = self.agreed()
        for commits in self.commits.values():
            newest = max(commits, default=0)
            least = agreed if self.is_recurrent else newest
            commits[:] = sorted({one for one in commits if one >= least or one == newest})

    def forget_behind(self, num_tokens: int) -> None:
        """Forget commits beyond `num_tokens`: those blocks have left the lease, and new ones there are unwritten.

        A present rank still wants all that it has committed, so this concerns ranks that have parted.
        """
        self.ahead_tokens = min(self.ahead_tokens, num_tokens)
        for commits in self.commits.values():
            commits[:] = sorted({min(one, num_tokens) for one in commits})

    def computed_by(self, worker_id: WorkerId, num_computed: int) -> int:
        """Return how many tokens a member has computed, if all ranks have computed `num_computed`."""
        own = self.commits[self.present[worker_id].rank]
        return max([num_computed, self.ahead_tokens, *own])

    def furthest(self, num_computed: int) -> int:
        """Return how many tokens the furthest rank has computed."""
        return max([num_computed, self.ahead_tokens, *map(_newest, self.commits.values())])


def _newest(commits: Iterable[int]) -> int:
    return max(commits, default=0)
