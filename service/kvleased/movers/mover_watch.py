"""Own when a mover counts as hanging, long before it is given up; `tiers` decides what follows from that.

Requests that wait for a hanging mover hold blocks of the device. If they give up, they leave those blocks behind,
because they may still be written until the mover is given up. So few requests may wait that long, or all blocks would
be lost to it.
"""

from typing import Final

import structlog

from kvleased.core.effects import Mover
from kvleased.movers.link import START_SECONDS_MAX, MoverLink
from kvleased.movers.protocol import Status

SHARE_OF_PATIENCE: Final = 10
"""The seconds that a mover may take for a batch, divided by this, are the seconds after which it counts as hanging."""
SECONDS_MIN: Final = 1.0
"""The least of these seconds: a busy machine does not mean a hanging mover."""
START_SECONDS: Final = 10.0
"""Seconds that a starting mover of memory may keep others waiting before its first word; imports take one or two."""
_CAUSES: Final = {
    Mover.MEMORY: "its mover is hanging, or memory is too slow",
    Mover.DISK: "the disk is hanging or is too slow",
}
_EVENTS: Final = {
    Mover.MEMORY: ("mover_hangs", "mover_answers"),
    Mover.DISK: ("disk_hangs", "disk_answers"),
}
_LOG = structlog.get_logger()


class MoverWatch:
    """Tell whether a mover has been silent for too long."""

    def __init__(self, mover: Mover, mover_seconds_max: float) -> None:
        """Start with a mover that works."""
        self._mover = mover
        self._seconds_max = max(SECONDS_MIN, mover_seconds_max / SHARE_OF_PATIENCE)
        self._start_seconds_max = max(START_SECONDS, self._seconds_max)
        self.is_hanging = False
        self._silent: Final = Status(
            is_on=False,
            reason=(
                f"no copy has ended for {self._seconds_max:g} s, so {_CAUSES[mover]}; after {mover_seconds_max:g} s "
                "its mover will be replaced"
            ),
        )
        self._mute: Final = Status(
            is_on=False,
            reason=(
                f"its mover was started {self._start_seconds_max:g} s ago and has not reported anything yet; after "
                f"{START_SECONDS_MAX:g} s it will be replaced"
            ),
        )
        self.status = self._silent
        """What is reported of each of its tiers while it hangs."""

    def __repr__(self) -> str:
        """Show whether the mover works."""
        return f"<MoverWatch {self._mover.value} {'hangs' if self.is_hanging else 'works'}>"

    def look(self, link: MoverLink, now: float) -> bool:
        """Look at the link to the mover; tell whether it has begun or stopped hanging.

        How long a process takes to start tells nothing about its copies, so a mover has longer until its first word. A
        store's tier is off until then in any case.
        """
        if link.is_answering:
            seconds_max, status = self._seconds_max, self._silent
            is_hanging = link.silent_seconds(now) > seconds_max
        else:
            seconds_max, status = self._start_seconds_max, self._mute
            is_hanging = self._mover is Mover.MEMORY and link.starting_seconds(now) > seconds_max
        if is_hanging == self.is_hanging:
            return False
        self.is_hanging, self.status = is_hanging, status
        began, ceased = _EVENTS[self._mover]
        if is_hanging:
            _LOG.warning(began, silent_seconds_max=seconds_max)
        elif link.is_answering:
            # Otherwise it was given up, which is logged elsewhere.
            _LOG.info(ceased, silent_seconds_max=seconds_max)
        return True
