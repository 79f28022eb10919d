"""Own what a keeper of owned memory is given: how to call the daemon, how many blocks are needed, and persistence."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvlease.magazine import Exchanged, ExchangeOrder, Inventory


class Calls(Protocol):
    """The daemon, behind a guard: nothing is raised, and None stands for no answer."""

    @property
    def is_answering(self) -> bool:
        """Whether a call is worth making."""

    @property
    def is_returning(self) -> bool:
        """Whether the daemon answers, or did so moments ago."""

    @property
    def is_dead(self) -> bool:
        """Whether the daemon is proven dead with its supervisor, so that nobody finds blocks, now or later."""

    def exchange(self, order: ExchangeOrder) -> Exchanged | None:
        """Carry out an exchange."""

    def begin(self, order: ExchangeOrder) -> bool:
        """Send an exchange, whose answer `answered` takes before anything else is asked; False if it cannot be sent."""

    def answered(self) -> Exchanged | None:
        """Wait for the answer to the exchange that was begun."""

    def inventory(self) -> Inventory | None:
        """Ask what the magazine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """How many blocks an engine can need at once."""

    blocks_per_request: int
    """New blocks that one request gets in one step at most."""
    reserve_blocks: int
    """Spare blocks that are kept at least, if the pool is large enough."""
    longest_blocks: int = 0
    """Blocks of the longest request. Its hits may be spare blocks, too, and are no longer spare once they are used
    again."""


class Persistence(Enum):
    """Whether blocks are kept beyond the engine's life."""

    ON = "on"
    GONE = "gone"
    """The whole daemon is dead: nobody finds anything, so every block may be overwritten until one is back."""
    OFF = "off"
    """The memory is no longer the daemon's; this lasts until the engine restarts."""
