"""Own how often an engine may call the daemon and how many blocks it asks for: policy alone, it calls nobody."""

from dataclasses import dataclass
from typing import Final

CALLS_BANKED_MAX: Final = 4
"""Calls that steps without one leave for later ones."""
_SHARE_OF_AVAILABLE: Final = 4
"""An engine fetches this part at most of what each of them could have."""
_SHARE_AHEAD: Final = 2
"""The same, where requests wait that want them."""
_SHARE_OF_SPARE: Final = 16
"""This part, of what the longest request leaves of the pool, stays held without a user at most, and in the stock of an
engine that does nothing: what engines at rest keep must not keep a request of another one from ever fitting."""
_IDLE_BLOCKS_MAX: Final = 256


class Pace:
    """Let one call go with each step, and a few at once where steps before had none."""

    def __init__(self, calls_banked_max: int = CALLS_BANKED_MAX) -> None:
        """Begin with a full bank."""
        self._max = calls_banked_max
        self._left = calls_banked_max

    def __repr__(self) -> str:
        """Show how many calls are left."""
        return f"<Pace {self._left} calls left>"

    def step(self) -> None:
        """Note that a step was scheduled."""
        self._left = min(self._max, self._left + 1)

    def spend(self) -> None:
        """Note that a call was made."""
        self._left -= 1

    @property
    def may_call(self) -> bool:
        """Whether a call that can wait may be made."""
        return self._left > 0

    @property
    def may_press(self) -> bool:
        """Whether a call may be made without which a running request would be preempted; later ones wait for it."""
        return self._left > -self._max


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """How much an engine keeps in stock."""

    num_blocks: int
    """Blocks of the pool."""
    stock_wanted: int
    """Private blocks that an engine under load keeps in stock."""
    longest_blocks: int
    """Blocks that the longest request takes."""

    @property
    def idle_max(self) -> int:
        """Held blocks without a user that stay, so that the next turn of a talk needs no call."""
        return min(_IDLE_BLOCKS_MAX, self._rest_share)

    @property
    def stock_max(self) -> int:
        """Private blocks above which an engine gives back."""
        return 2 * self.stock_wanted

    @property
    def rest_max(self) -> int:
        """Private blocks that an engine keeps that has nothing to do."""
        return min(self.stock_wanted, self._rest_share)

    @property
    def _rest_share(self) -> int:
        num_usable = self.num_blocks - 1  # without the null block
        return max(0, num_usable - self.longest_blocks) // _SHARE_OF_SPARE

    def ahead(self, wanted: int, num_stock: int, num_available: int, num_magazines: int) -> int:
        """Return how many of the blocks that waiting requests may want to fetch at once, so that each needs no call."""
        fair = num_available // (_SHARE_AHEAD * max(1, num_magazines))
        return max(0, min(wanted - num_stock, self.stock_max - num_stock, fair))

    def refill(self, wanted: int, num_stock: int, num_available: int, num_magazines: int) -> int:
        """Return how many blocks to fetch for a stock of so many, beside those that are needed now."""
        fair = num_available // (_SHARE_OF_AVAILABLE * max(1, num_magazines))
        return max(0, min(wanted - num_stock, fair))
