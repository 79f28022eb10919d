"""Own the calls that a core has wait: whose they are, when their time is up, and how they are answered."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError
from kvleased.core.effects import Wake
from kvleased.idempotency import Leaving
from kvleased.registry import CacheEntry
from kvleased.tallies import Wait
from kvleased.verbs.runner import Respond

_DEADLINE_SLACK_SECONDS: Final = 0.001
"""Seconds after a caller's deadline at which the core is asked to end its waiting."""

PassTime = Callable[[CacheEntry], None]
"""Tells a cache's core what time it is."""
Cancel = Callable[[CacheEntry, int], None]
"""Tells a cache's core that nobody waits with a ticket any more."""


@dataclass(slots=True)
class _Waiting:
    """A caller whom the core has wait."""

    future: asyncio.Future[Message]
    respond: Respond
    deadline: asyncio.TimerHandle
    wait: Wait


class WaitingCalls:
    """The calls of all caches that wait, by pool and ticket."""

    def __init__(self, pass_time: PassTime, cancel: Cancel) -> None:
        """Take what is done at a deadline, and when a caller goes without an answer."""
        self._pass_time = pass_time
        self._cancel = cancel
        self._by_ticket: dict[tuple[int, int], _Waiting] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._by_ticket)

    def __repr__(self) -> str:
        """Show how many wait."""
        return f"<WaitingCalls {len(self)}>"

    def promise(
        self, entry: CacheEntry, ticket: int, respond: Respond, wait: Wait, wait_ms: int
    ) -> asyncio.Future[Message]:
        """Return the promise of an answer to a call that the core gave a ticket."""
        loop = asyncio.get_running_loop()
        future = Leaving[Message](lambda: self._leave(entry, ticket))
        # The core ends waiting when it is told the time, so tell it at the very deadline.
        deadline = loop.call_later(wait_ms / 1000 + _DEADLINE_SLACK_SECONDS, self._pass_time, entry)
        self._by_ticket[entry.pool, ticket] = _Waiting(future, respond, deadline, wait)
        return future

    def wake(self, entry: CacheEntry, wake: Wake) -> None:
        """Answer a call with what the core says, or its refusal; nothing happens if its caller has gone."""
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

    def cancel_all(self) -> None:
        """Have nobody wait any more: their calls are cancelled."""
        for waiting in list(self._by_ticket.values()):
            waiting.future.cancel()

    def _leave(self, entry: CacheEntry, ticket: int) -> None:
        waiting = self._by_ticket.pop((entry.pool, ticket), None)
        if waiting is not None:
            waiting.deadline.cancel()
            waiting.wait.leave()
            self._cancel(entry, ticket)
