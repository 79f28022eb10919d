"""Own how often an engine may call the daemon, and how many blocks it asks for; pure policy that makes no call."""

from dataclasses import dataclass
from typing import Final

CALLS_BANKED_MAX: Final = 4
"""Calls that are saved up, at most, from steps that made none."""
_SHARE_OF_AVAILABLE: Final = 4
"""An engine fetches at most its even share of the available blocks divided by this."""
_SHARE_AHEAD: Final = 2
"""The same divisor, if waiting requests want the blocks."""
_SHARE_OF_SPARE: Final = 16
"""The blocks that the longest request leaves in the pool, divided by this, are the most that stay held without a user,
and the most in an idle engine's stock: blocks that idle engines keep must never prevent another engine's request from
fitting."""
_IDLE_BLOCKS_MAX: Final = 256


class Pace:
    """Allow one call a step, and a few at once after steps without calls."""

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
        """Whether a call may be made that keeps a running request from being preempted; later calls make up for it."""
        return self._left > -self._max


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """How many blocks an engine keeps."""

    num_blocks: int
    """Blocks of the pool."""
    stock_wanted: int
    """Private blocks that an engine under load keeps in stock."""
    longest_blocks: int
    """Blocks that the longest request takes."""

    @property
    def idle_max(self) -> int:
        """Held blocks without a user that may stay, so that the next turn of a conversation needs no call."""
        return min(_IDLE_BLOCKS_MAX, self._rest_share)

    @property
    def stock_max(self) -> int:
        """Private blocks above which an engine gives blocks back."""
        return 2 * self.stock_wanted

    @property
    def rest_max(self) -> int:
        """Private blocks that an idle engine keeps."""
        return min(self.stock_wanted, self._rest_share)

    @property
    def _rest_share(self) -> int:
        num_usable = self.num_blocks - 1  # without the null block
        return max(0, num_usable - self.longest_blocks) // _SHARE_OF_SPARE

    def ahead(self, wanted: int, num_stock: int, num_available: int, num_magazines: int) -> int:
        """Return how many blocks to fetch at once for waiting requests, so that not each of them needs a call."""
        fair = num_available // (_SHARE_AHEAD * max(1, num_magazines))
        return max(0, min(wanted - num_stock, self.stock_max - num_stock, fair))

    def refill(self, wanted: int, num_stock: int, num_available: int, num_magazines: int) -> int:
        """Return how many blocks to fetch towards a stock of `wanted`, besides those that are needed now."""
        fair = num_available // (_SHARE_OF_AVAILABLE * max(1, num_magazines))
        return max(0, min(wanted - num_stock, fair))
