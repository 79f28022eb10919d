"""Own the records of an engine's bookkeeping: how a block stands, what an exchange carries and what came of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvlease.integrations.vllm.fence import Write


class Standing(IntEnum):
    """How a block stands, as the engine sees it."""

    OUT = 0
    """Not in the magazine."""
    FREE = 1
    """Private and in stock: it may be handed out."""
    PRIVATE = 2
    """Private, and used by a request or waiting to be published."""
    HELD = 3
    """Findable at the daemon and held by the magazine: nobody may overwrite it."""
    DOUBTED = 4
    """Private or findable: the answer to its publication was lost."""
    LOST = 5
    """Used by a request, although the daemon says that it is not in the magazine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an exchange is to fetch, and what it may give back."""

    names: Sequence[bytes] = ()
    """Names of the blocks to hold, in order."""
    stops_at_miss: bool = False
    """Whether holding stops at the first name that is not on the device."""
    num_running: int = 0
    """Private blocks to fetch for running requests."""
    num_new: int = 0
    """Private blocks to fetch to admit a request."""
    all_or_nothing: bool = False
    """Whether to get either all of these private blocks or none."""
    idle_max: int = 0
    """Held blocks without a user that may stay."""
    stock_max: int = 0
    """Private blocks without a user that may stay."""
    kept: Collection[int] = ()
    """Blocks without a user that stay in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one exchange carries."""

    publish: tuple[Write, ...]
    retract: tuple[int, ...]
    drop: tuple[int, ...]
    wish: Wish
    forgotten: tuple[int, ...]
    """Blocks whose names are to be forgotten at once, because they leave with this order."""

    @property
    def is_empty(self) -> bool:
        """Whether the exchange would carry nothing."""
        wish = self.wish
        wants = wish.names or wish.num_running or wish.num_new
        return not (self.publish or self.retract or self.drop or wants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What an answer changed."""

    held: tuple[tuple[bytes, int], ...] = ()
    """Names, each with the block that now holds its content."""
    forgotten: tuple[int, ...] = ()
    """Blocks whose names are to be forgotten."""
    num_published: int = 0
    num_duplicates: int = 0
    num_taken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """How the daemon's inventory differed from the books."""

    forgotten: tuple[int, ...]
    """Blocks whose names are to be forgotten."""
    lost: tuple[int, ...]
    """Blocks that requests use but the magazine lacks."""
    adopted: tuple[int, ...]
    """Private blocks that a lost answer had granted."""
    strays: tuple[int, ...]
    """Held blocks that the engine does not know, to be dropped."""
    held: tuple[int, ...]
    """Blocks that turned out to be published."""


@dataclass(slots=True)
class Notes:
    """The findings of a reconciliation while it runs."""

    forgotten: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def told(self) -> Reconciled:
        """Return the findings."""
        return Reconciled(
            forgotten=tuple(self.forgotten),
            lost=tuple(self.lost),
            adopted=tuple(self.adopted),
            strays=tuple(self.strays),
            held=tuple(self.held),
        )
