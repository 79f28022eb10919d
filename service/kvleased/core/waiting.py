"""Own the queues of calls that wait for room: running requests first, then new ones, each in the order of arrival.

Running requests go first because only they give blocks back: a new request that overtook them could
wait for blocks that they hold while they wait behind it. Nobody in a queue holds anything, so
nothing can wait in a circle.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvlease.ids import LeaseId, WorkerId
from kvleased.core.commands import Extend, Reload, Reserve

Waitable = Reserve | Extend | Reload


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A call that waits for room."""

    ticket: int
    command: Waitable
    worker_id: WorkerId
    deadline: float
    skip_host: bool = False
    """Take nothing from the host pool: a copy from there has just failed."""
    device_hit_blocks_max: int | None = None
    """Hits that count as the device's, where a first try brought more of them up from the host pool."""

    @property
    def lease_id(self) -> LeaseId | None:
        """The lease that the call is about, if there is one already."""
        return None if isinstance(self.command, Reserve) else self.command.lease_id


class WaitingRoom:
    """The queues, bounded."""

    def __init__(self, max_waiting: int) -> None:
        """Start empty."""
        self._max_waiting = max_waiting
        self._running: dict[int, Waiter] = {}
        self._new: dict[int, Waiter] = {}

    def __len__(self) -> int:
        """Count the waiting calls."""
        return len(self._running) + len(self._new)

    def __iter__(self) -> Iterator[Waiter]:
        """Go through the waiting calls in the order in which they will be served."""
        yield from self._running.values()
        yield from self._new.values()

    @property
    def is_full(self) -> bool:
        """Whether another call must be refused."""
        return len(self) >= self._max_waiting

    def num_ahead(self, command: Waitable) -> int:
        """Count the calls that would be served before this one."""
        return len(self._running) if isinstance(command, Extend) else len(self)

    def first(self) -> Waiter | None:
        """Return the call to serve next."""
        return next(iter(self), None)

    def join(self, waiter: Waiter) -> None:
        """Put a call at the end of its queue."""
        queue = self._running if isinstance(waiter.command, Extend) else self._new
        queue[waiter.ticket] = waiter

    def rejoin(self, waiter: Waiter) -> None:
        """Put a call back at the head of its queue."""
        assert not isinstance(waiter.command, Extend)
        self._new = {waiter.ticket: waiter, **self._new}

    def leave(self, ticket: int) -> Waiter | None:
        """Take a call out, if it is there."""
        return self._running.pop(ticket, None) or self._new.pop(ticket, None)
