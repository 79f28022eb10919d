"""Own the work behind an answer: the effects of the command, then what the core left to be done, in this order."""

from collections.abc import Callable, Iterable, Sequence
from time import monotonic

import structlog

from kvleased.caches.entries import CacheEntry
from kvleased.core.effects import Effect
from kvleased.system.next_turn import in_next_turn

CarryOut = Callable[[CacheEntry, Iterable[Effect]], None]
"""Carries out the effects of a cache's core."""

_LOG = structlog.get_logger()


class Settling:
    """The work that the last commands left to be done."""

    def __init__(self, carry_out: CarryOut) -> None:
        """Take the function that carries out effects."""
        self._carry_out = carry_out
        self.left: list[tuple[CacheEntry, Sequence[Effect]]] = []
        """The effects of each command that are not carried out yet."""
        self._apart: set[int] = set()
        """The pools of the caches that are settled in turns of their own."""

    def __repr__(self) -> str:
        """Show life: how many commands left something."""
        return f"<Settling {len(self.left)} commands>"

    def add(self, entry: CacheEntry, effects: Sequence[Effect]) -> None:
        """Have the effects of a command carried out by the next `settle`."""
        self.left.append((entry, effects))

    def settle(self) -> None:
        """Carry out all effects, and have each core do what it left."""
        while self.left:
            self._settle(*self.left.pop(0))

    def settle_apart(self, entry: CacheEntry) -> None:
        """Do what the core of a cache left in turns of the loop of its own, after the turn that answers the caller.

        Nobody can see when that is: if a command comes first, the core does the rest before it.
        """
        if not entry.core.is_settled and entry.pool not in self._apart:
            self._apart.add(entry.pool)
            in_next_turn(self._settle_part, entry)

    def once_settled(
        self, entry: CacheEntry, act: Callable[[CacheEntry], None], until: float
    ) -> None:
        """Do something to a cache once its core is settled, or when `until` (monotonic seconds) has come.

        Doing it would settle the core first: waiting keeps a tick from doing the rest of a large move in one go.
        """
        if entry.core.is_settled or monotonic() >= until:
            act(entry)
        else:
            self.settle_apart(entry)
            in_next_turn(self.once_settled, entry, act, until)

    def _settle_part(self, entry: CacheEntry) -> None:
        self._apart.remove(entry.pool)
        try:
            entry.core.settle_part()
            self._carry_out(entry, entry.core.take_effects())
        except Exception:  # noqa: BLE001 -- one call's fault must not end the daemon
            _LOG.exception("settling_failed", cache=entry.name)
        self.settle_apart(entry)

    def _settle(self, entry: CacheEntry, effects: Sequence[Effect]) -> None:
        try:
            self._carry_out(entry, effects)
            entry.core.settle()
            self._carry_out(entry, entry.core.take_effects())
        except Exception:  # noqa: BLE001 -- one call's fault must not end the daemon
            _LOG.exception("settling_failed", cache=entry.name)
