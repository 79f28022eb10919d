"""Own when a disk counts as one that hangs; what the tier makes of that is its own business.

Whoever waits for a disk that hangs holds blocks of the device, and those that give up leave them behind: they may still
be written, until the mover is given up. So that they are not all lost to it, few may wait for it for so long.
"""

import logging
from typing import Final

import structlog

from kvleased.movers.link import MoverLink
from kvleased.movers.protocol import Status

SHARE_OF_PATIENCE: Final = 10
"""The seconds that a mover may take for a batch, divided by this, are those that its disk may."""
SECONDS_MIN: Final = 1.0
"""The least number of these: a busy machine is no disk that hangs."""
_LOG = structlog.get_logger()


class DiskWatch:
    """Tell whether the mover of the disk stores has been silent for too long."""

    def __init__(self, mover_seconds_max: float) -> None:
        """Begin with a disk that works."""
        self._seconds_max = max(SECONDS_MIN, mover_seconds_max / SHARE_OF_PATIENCE)
        self.is_hanging = False
        self.status: Final = Status(
            is_on=False,
            reason=(
                f"no copy has ended for {self._seconds_max:g} s, so the disk hangs or is too slow; "
                f"after {mover_seconds_max:g} s its mover is replaced"
            ),
        )
        """What is said of each of its stores while it hangs."""

    def __repr__(self) -> str:
        """Show whether it works."""
        return f"<DiskWatch {'hangs' if self.is_hanging else 'works'}>"

    def look(self, link: MoverLink, now: float) -> bool:
        """Look at the link to its mover; tell whether it has begun or ceased to hang."""
        is_hanging = link.silent_seconds(now) > self._seconds_max
        if is_hanging == self.is_hanging:
            return False
        self.is_hanging = is_hanging
        level = logging.WARNING if is_hanging else logging.INFO
        _LOG.log(
            level,
            "disk_hangs" if is_hanging else "disk_answers",
            silent_seconds_max=self._seconds_max,
        )
        return True
