"""Own what commands leave to be done until their answers are on their way; who does it is `ending.settle`.

The next command, and whoever looks at the cache, has it done before: nobody sees a state in which it is not.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvleased.core.blocks.pool import Pool
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease


@dataclass(slots=True)
class Unsettled:
    """What is left to be done, in the order in which it is."""

    leaving: list[Lease] = field(default_factory=list)
    """Leases that have been released; their blocks are let go of before the next command could take their rows."""
    left: list[tuple[Pool, Ids, bool]] = field(default_factory=list)
    """Blocks that moves which are done still hold; and whether they leave their tier then."""
    parts: deque[Callable[[], None]] = field(default_factory=deque)
    """What is to be done of moves of large leases, part by part."""

    def __bool__(self) -> bool:
        """Tell whether there is anything to be done."""
        return bool(self.leaving or self.left or self.parts)

    def do(self, part: Callable[[], None], *, apart: bool) -> None:
        """Do a part at once, or have it be the next one."""
        if apart:
            self.parts.appendleft(part)
        else:
            part()
