"""Own the order of the calls that wait for room: running requests first, then new ones by priority and fair share.

The order, from its head:

1. extends, in the order of arrival. They go first because only running requests give blocks back: a new request that
   overtook them could wait for blocks that they hold, while they wait behind it;
2. reloads, in the order of arrival;
3. new requests that were served once and have to start over;
4. new requests by class (high, normal, low), inside a class by fair share, then in the order of arrival.

A fork does not wait for room: it goes before new requests until one of them has waited for `ageing_seconds`. The call
at the head keeps those behind it waiting, so small calls do not starve large ones. Calls in a queue hold nothing, so
they cannot wait in a circle. A new request rises one class for every `ageing_seconds` that it waits, so after two of
them at the latest it is in the highest class. Inside a class, each other tenant gets no more before the request than
the request asks for, together with what its own tenant has there before it (see `FairQueue`).
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Final

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.commands import Extend, Reload, Reserve
from kvleased.core.effects import Tier
from kvleased.core.ids import Ids
from kvleased.core.tier.flights import Flight
from kvleased.core.untold import Untold

Waitable = Reserve | Extend | Reload

PRIORITY_MAX: Final = 2
"""High; 0 is low and 1 is normal."""
NO_TIERS: Final[frozenset[Tier]] = frozenset()
NO_KEYS: Final[frozenset[bytes]] = frozenset()
WAIT_SECONDS_DEFAULT: Final = 30.0
"""How long a call that gave no time to wait waits if it must wait for copies."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A call that waits for room."""

    ticket: int
    """Also its rank by arrival."""
    command: Waitable
    worker_id: WorkerId
    deadline: float
    skipped: frozenset[Tier] = NO_TIERS
    """Take nothing from these tiers: a copy from there has just failed."""
    remote_keys: frozenset[bytes] = frozenset()
    """Keys that the remote store said it has."""
    unserved_keys: frozenset[bytes] = NO_KEYS
    """Keys that the remote store said it has, but did not deliver as it should."""
    untold: Untold | None = None
    """The keys of its chain of which the remote store says nothing; None if there are none."""
    brought: tuple[Flight, ...] = ()
    """Copies that earlier tries began; they may have brought a part of its prefix to the device."""
    tenant: int = 0
    """Of a new request: the tenant to whose share it counts."""
    cost: float = 1.0
    """Of a new request: its blocks, divided by its tenant's weight."""
    priority: int = PRIORITY_MAX
    """The class that it has reached."""
    tag: float = 0.0
    """Its place in that class: the smallest is served first."""
    request: tuple[int, str] | None = None
    """What the calls of several ranks for one request have in common; None if no other rank calls for it."""
    is_answered: bool = False
    """Whether it was answered together with another rank's call."""

    @property
    def lease_id(self) -> LeaseId | None:
        """The lease that the call is about, if there is one already."""
        return None if isinstance(self.command, Reserve) else self.command.lease_id

    @property
    def since(self) -> float:
        """Monotonic seconds at which the call came."""
        return self.deadline - (self.command.wait_ms / 1000 or WAIT_SECONDS_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A new request that waits to learn what the remote store has of its prefix; it has no place in a queue yet."""

    waiter: Waiter
    keys: tuple[bytes, ...]
    """The keys that the store was asked for."""
    positions: Ids
    """The index of each of them in the call's chain."""


class FairQueue:
    """The new requests of one class, in the order of self-clocked fair queueing over tenants.

    A request's tag is  max(virtual time, the last tag that its tenant has here) + its cost,  and the virtual time is
    the largest tag that was served. If a request arrives at virtual time v and gets tag T, the later requests of any
    other tenant that are served before its turn cost at most  T - v  together, which is the request's own cost and
    what its tenant had here before it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._waiters: list[Waiter] = []
        self.virtual_time = 0.0

    def __len__(self) -> int:
        """Count the waiting requests."""
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """Go through the requests in their order."""
        return iter(self._waiters)

    def place(self, waiter: Waiter) -> int:
        """Give a request its tag, and return how many would be served before it."""
        if waiter.request is not None:
            for mate in self._waiters:
                if mate.request == waiter.request:
                    # Both calls ask for the same lease.
                    waiter.tag = mate.tag
                    return bisect_left(self._waiters, _turn(waiter), key=_turn)
        tags = (other.tag for other in self._waiters if other.tenant == waiter.tenant)
        waiter.tag = max(self.virtual_time, max(tags, default=0.0)) + waiter.cost
        return bisect_left(self._waiters, _turn(waiter), key=_turn)

    def join(self, waiter: Waiter) -> None:
        """Put a request at the place that its tag gives it."""
        self._waiters.insert(self.place(waiter), waiter)

    def leave(self, waiter: Waiter) -> None:
        """Take a request out without counting it as served."""
        self._waiters.remove(waiter)

    def count(self, waiter: Waiter) -> None:
        """Count a request as served."""
        self.virtual_time = max(self.virtual_time, waiter.tag)


class WaitingRoom:
    """The queues, bounded."""

    def __init__(self, max_waiting: int, ageing_seconds: float = inf) -> None:
        """Start empty."""
        self._max_waiting = max_waiting
        self._ageing_seconds = ageing_seconds
        self._extends: dict[int, Waiter] = {}
        self._reloads: dict[int, Waiter] = {}
        self._again: dict[int, Waiter] = {}
        self._classes = tuple(FairQueue() for _ in range(PRIORITY_MAX + 1))
        self.by_ticket: dict[int, Waiter] = {}
        """All waiting calls; every command looks whether there are any here, which is cheaper than `len`."""
        self._rises_at = inf
        """No request rises to a higher class before this time."""

    def __len__(self) -> int:
        """Count the waiting calls."""
        return len(self.by_ticket)

    def __iter__(self) -> Iterator[Waiter]:
        """Go through the waiting calls in the order in which they would be served."""
        return chain(
            self._extends.values(),
            self._reloads.values(),
            self._again.values(),
            *reversed(self._classes),
        )

    @property
    def max_waiting(self) -> int:
        """Calls that may wait at once."""
        return self._max_waiting

    @property
    def is_full(self) -> bool:
        """Whether another call must be refused."""
        return len(self) >= self._max_waiting

    def num_ahead(self, waiter: Waiter, now: float) -> int:
        """Count the calls that would be served before one that comes now; a new request gets its tag."""
        self._age(now)
        num_ahead = len(self._extends)
        command = waiter.command
        if isinstance(command, Extend):
            return num_ahead
        num_ahead += len(self._reloads)
        if isinstance(command, Reload):
            return num_ahead
        higher = self._classes[command.priority + 1 :]
        waiter.priority = command.priority
        num_ahead += len(self._again) + sum(len(one) for one in higher)
        return num_ahead + self._classes[command.priority].place(waiter)

    def precedes_forks(self, now: float) -> bool:
        """Tell whether a fork must take no block: other running requests wait, or a new one has waited for long.

        A fork belongs to a running request, so it need not wait for all new requests. But it also begins a request, so
        an endless series of forks must not keep a new request waiting for ever.
        """
        if self._extends or self._reloads or self._again:
            return True
        waiting_longest = min((waiter.since for waiter in chain(*self._classes)), default=now)
        return now - waiting_longest >= self._ageing_seconds

    def ordered(self, now: float) -> list[Waiter]:
        """Return the waiting calls in the order in which they would be served now."""
        self._age(now)
        return list(self)

    def first(self, now: float) -> Waiter | None:
        """Return the call to serve next."""
        self._age(now)
        return next(iter(self), None)

    def join(self, waiter: Waiter) -> None:
        """Let a call wait for its turn."""
        command = waiter.command
        self.by_ticket[waiter.ticket] = waiter
        if isinstance(command, Reserve):
            waiter.priority = command.priority
            self._classes[waiter.priority].join(waiter)
            self._rises_at = min(self._rises_at, self._rise_of(waiter))
        elif isinstance(command, Reload):
            self._reloads[waiter.ticket] = waiter
        else:
            self._extends[waiter.ticket] = waiter

    def rejoin(self, waiter: Waiter) -> None:
        """Put a new request that was served once back, before all other new requests."""
        assert isinstance(waiter.command, Reserve)
        self._again = {waiter.ticket: waiter, **self._again}
        self.by_ticket[waiter.ticket] = waiter

    def serve(self, waiter: Waiter) -> None:
        """Take out a call that has been served, or never had to wait, and count it to its tenant's share."""
        self.leave(waiter.ticket)
        if waiter.tag:
            self._classes[waiter.priority].count(waiter)

    def leave(self, ticket: int) -> Waiter | None:
        """Take a call out without counting it as served, and return it; None if it does not wait."""
        waiter = self.by_ticket.pop(ticket, None)
        if waiter is None:
            return None
        for queue in (self._extends, self._reloads, self._again):
            if ticket in queue:
                return queue.pop(ticket)
        self._classes[waiter.priority].leave(waiter)
        return waiter

    # Ageing -------------------------------------------------------------------------------------------------------

    def _age(self, now: float) -> None:
        """Let requests that have waited long enough rise; each joins its new class as if it came only now."""
        if now < self._rises_at:
            return
        for lower in range(PRIORITY_MAX):
            for waiter in [one for one in self._classes[lower] if self._rise_of(one) <= now]:
                self._classes[lower].leave(waiter)
                waiter.priority = lower + 1
                self._classes[lower + 1].join(waiter)
        self._rises_at = min(map(self._rise_of, chain(*self._classes)), default=inf)

    def _rise_of(self, waiter: Waiter) -> float:
        """Return when a request rises to the next class."""
        assert isinstance(waiter.command, Reserve)
        if waiter.priority == PRIORITY_MAX:
            return inf
        return waiter.since + self._ageing_seconds * (waiter.priority - waiter.command.priority + 1)


def _turn(waiter: Waiter) -> tuple[float, int]:
    return waiter.tag, waiter.ticket
