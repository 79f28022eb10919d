"""Own the work that commands put off until their answers are on their way; `ending.settle` does it.

It is done before the next command, and before anybody looks at the cache, so nobody sees a state in which it is not.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvleased.core.blocks.pool import Pool
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease


@dataclass(slots=True)
class Unsettled:
    """The work that is left, in the order in which it is done."""

    leaving: list[Lease] = field(default_factory=list)
    """Released leases; their blocks are let go of before the next command could take their rows."""
    left: list[tuple[Pool, Ids, bool]] = field(default_factory=list)
    """Blocks that finished moves still hold, and whether they leave their tier once they are let go of."""
    parts: deque[Callable[[], None]] = field(default_factory=deque)
    """What is left of the moves of large leases, part by part."""

    def __bool__(self) -> bool:
        """Tell whether any work is left."""
        return bool(self.leaving or self.left or self.parts)

    def do(self, part: Callable[[], None], *, apart: bool) -> None:
        """Do a part at once, or, if it is done `apart`, make it the next part."""
        if apart:
            self.parts.appendleft(part)
        else:
            part()
