"""Own the calls that a core makes wait: their callers, their deadlines, and how they are answered."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError
from kvleased.caches.entries import CacheEntry
from kvleased.caches.tallies import Wait
from kvleased.calls.idempotency import Leaving
from kvleased.core.effects import Wake
from kvleased.verbs.runner import Respond

_DEADLINE_SLACK_SECONDS: Final = 0.001
"""Seconds after a caller's deadline at which the core is asked to end its waiting."""

PassTime = Callable[[CacheEntry], None]
"""Tells the core of a cache what time it is."""
Cancel = Callable[[CacheEntry, int], None]
"""Tells the core of a cache that the caller of a ticket no longer waits."""


@dataclass(slots=True)
class _Waiting:
    """A call that the core makes wait."""

    future: asyncio.Future[Message]
    respond: Respond
    deadline: asyncio.TimerHandle
    wait: Wait


class WaitingCalls:
    """The waiting calls of all caches, by pool and ticket."""

    def __init__(self, pass_time: PassTime, cancel: Cancel) -> None:
        """Take the functions for a deadline, and for a caller that goes without an answer."""
        self._pass_time = pass_time
        self._cancel = cancel
        self._by_ticket: dict[tuple[int, int], _Waiting] = {}

    def __len__(self) -> int:
        """Count the calls that wait."""
        return len(self._by_ticket)

    def __repr__(self) -> str:
        """Show how many wait."""
        return f"<WaitingCalls {len(self)}>"

    def promise(
        self, entry: CacheEntry, ticket: int, respond: Respond, wait: Wait, wait_ms: int
    ) -> asyncio.Future[Message]:
        """Return a future of the answer to a call that the core gave a ticket."""
        loop = asyncio.get_running_loop()
        future = Leaving[Message](lambda: self._leave(entry, ticket))
        # The core ends a wait only when it is told the time, so tell it right at the deadline.
        deadline = loop.call_later(wait_ms / 1000 + _DEADLINE_SLACK_SECONDS, self._pass_time, entry)
        self._by_ticket[entry.pool, ticket] = _Waiting(future, respond, deadline, wait)
        return future

    def wake(self, entry: CacheEntry, wake: Wake) -> None:
        """Answer a call with the core's reply or refusal; do nothing if its caller has gone."""
        waiting = self._by_ticket.pop((entry.pool, wake.ticket), None)
        if waiting is None:
            return
        waiting.deadline.cancel()
        if waiting.future.done():
            return
        waiting.wait.end(wake.result)
        if isinstance(wake.result, KVLeaseError):
            waiting.future.set_exception(wake.result)
        else:
            waiting.future.set_result(waiting.respond(wake.result))

    def end_all_of(self, entry: CacheEntry, error: KVLeaseError) -> None:
        """Refuse all calls that wait for a cache that was deleted: its core answers none any more."""
        for ticket in [ticket for pool, ticket in self._by_ticket if pool == entry.pool]:
            self.wake(entry, Wake(ticket=ticket, result=error))

    def cancel_all(self) -> None:
        """Cancel all calls that wait."""
        for waiting in list(self._by_ticket.values()):
            waiting.future.cancel()

    def _leave(self, entry: CacheEntry, ticket: int) -> None:
        waiting = self._by_ticket.pop((entry.pool, ticket), None)
        if waiting is not None:
            waiting.deadline.cancel()
            waiting.wait.leave()
            self._cancel(entry, ticket)
