"""Own a played session: an engine's link to a played pool, over which calls and answers get lost at random."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TypeVar

from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
from kvlease.integrations.vllm.identity.rekey import Rekeyer
from kvlease.integrations.vllm.session.guard import Guard
from kvlease.integrations.vllm.session.session import SessionEvent
from kvlease.memory.mapped import Identity
from tests.integrations.vllm.played.pool import PlayedPool

D = TypeVar("D")

_ERA_BYTES: Final = 8
_BACK: Final = 0.2
"""The share of polls at which a session that is off is on again."""
_SEEN: Final = 0.7
"""The share of absent keys that the key counts show as absent; others share a bucket with a key that is there."""


@dataclass(slots=True)
class Weather:
    """How a link fares."""

    losses: float
    """The share of calls that get lost, half of them before they are carried out."""
    outages: float
    """The share of polls at which a session goes off or comes back."""

    def clear(self) -> None:
        """Let nothing get lost any more."""
        self.losses = self.outages = 0.0


class LoudGuard(Guard):
    """A guard that hides no mistake of ours."""

    def _fault(self, what: str, error: Exception) -> NoReturn:
        raise AssertionError(f"a mistake of ours in {what}: {error!r}") from error


class PlayedSession:
    """What `EngineSession` is to a connector; connectors find it by the name of its magazine."""

    def __init__(
        self, name: str, pool: PlayedPool, memory: Identity, weather: Weather, chance: random.Random
    ) -> None:
        self.name = name
        self.pool = pool
        self.memory = memory
        self.generation = 0
        self.guard = LoudGuard(deadline_seconds=1, retry_seconds=1)
        self.plan = SimpleNamespace(num_blocks=pool.num_blocks)
        self.settings = SimpleNamespace(address="", start_seconds=0)
        self.refusal = ""
        self.is_closed = False
        self.is_cut_off = False
        """Whether the daemon lets the scheduler in no more."""
        self._is_reachable = True
        self._is_in_doubt = True
        self._is_fresh = True
        self._underway: tuple[ExchangeOrder, Exchanged | None] | None = None
        self._next: tuple[PlayedPool, Identity] | None = None
        self._told_gone: bool | None = None
        self._weather = weather
        self._chance = chance
        self._begin_era(b"")

    def __repr__(self) -> str:
        return f"<PlayedSession {self.name}, {'on' if self.is_on else 'off'}>"

    # What the play does to it

    @property
    def is_gone(self) -> bool:
        """Whether the pool has ended and no other takes its place, whoever has heard of it."""
        return self._told_gone is not None

    def end_pool(self) -> None:
        """End the pool, so that the next polls give GONE once."""
        self._told_gone, self._underway = False, None

    def replace_pool(self, pool: PlayedPool, memory: Identity) -> None:
        """Let the next poll find another pool."""
        self._next = (pool, memory)
        self.cast_doubt()

    def cast_doubt(self) -> None:
        """Make the magazine's content uncertain, as after a daemon's restart."""
        self._is_in_doubt, self._underway = True, None

    def reach(self) -> None:
        """Let the daemon answer."""
        self._is_reachable = True

    # What connectors do

    @property
    def is_on(self) -> bool:
        """Whether a call is worth making."""
        is_there = self._next is None and not self.is_gone and not self.is_cut_off
        return self._is_reachable and is_there and not self.is_closed

    @property
    def is_returning(self) -> bool:
        """Whether the daemon will answer."""
        return not (self.is_cut_off or self.is_gone)

    @property
    def needs_inventory(self) -> bool:
        """Whether the magazine's content is uncertain."""
        return self._is_in_doubt

    def keep(self, memory: Identity) -> None:
        """Accept that no other memory will do; the play gives none."""

    def close(self) -> None:
        """Stay off."""
        self.is_closed = True

    def poll(self) -> SessionEvent:
        """Tell what became of the session."""
        if self._is_reachable:
            self._is_reachable = self._chance.random() >= self._weather.outages
        else:
            self._is_reachable = self._chance.random() < _BACK
        if self._told_gone is False and self._chance.random() < 0.5:
            self._told_gone, self._underway = True, None
            return SessionEvent.GONE
        if self._next is not None:
            (self.pool, self.memory), self._next = self._next, None
            self._is_fresh = True
        event = SessionEvent.FRESH if self._is_fresh else SessionEvent.NONE
        self._is_fresh = False
        return event

    def exchange(self, order: ExchangeOrder, default: D) -> Exchanged | D:
        """Carry out an exchange; give the default if the call or its answer gets lost."""
        assert self._underway is None, "an answer is taken before anything else is asked"
        if self._is_in_doubt or not self.is_on:
            return default
        answer = self._answer(order, None)
        self._is_in_doubt = answer is None
        return default if answer is None else answer

    def begin(self, order: ExchangeOrder) -> bool:
        """Send an exchange, which is carried out now or when its answer is asked for."""
        assert self._underway is None, "an answer is taken before anything else is asked"
        if self._is_in_doubt or not self.is_on:
            return False
        self._is_in_doubt = True
        if self._is_lost():
            return False
        is_quick = self._chance.random() < 0.5
        self._underway = (order, self.pool.exchange(self.name, order) if is_quick else None)
        return True

    def answered(self) -> Exchanged | None:
        """Answer the exchange that was begun; None if something got lost."""
        underway, self._underway = self._underway, None
        answer = None if underway is None else self._answer(*underway)
        if answer is not None:
            self._is_in_doubt = False
        return answer

    def reconciled(self) -> Inventory | None:
        """Return the inventory and end the doubt."""
        self._underway = None
        if not self.is_on or self._is_lost():
            return None
        self._is_in_doubt = False
        return self.pool.inventory(self.name)

    def inventory(self) -> Inventory:
        """Return the inventory."""
        return self.pool.inventory(self.name)

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell of some of the absent keys that they are absent."""
        return [not self.pool.has(key) and self._chance.random() < _SEEN for key in keys]

    def reset(self, weights: str = "") -> None:
        """Begin a new era of keys."""
        del weights
        self.generation += 1
        self._begin_era(self._chance.randbytes(_ERA_BYTES))

    def _begin_era(self, era: bytes) -> None:
        self.rekeyer: Any = Rekeyer(bytes(32), bytes(32), era)

    def _answer(self, order: ExchangeOrder, answer: Exchanged | None) -> Exchanged | None:
        if answer is None and self._is_lost():
            return None
        answer = answer or self.pool.exchange(self.name, order)
        return None if self._is_lost() else answer

    def _is_lost(self) -> bool:
        return self._chance.random() < self._weather.losses / 2
