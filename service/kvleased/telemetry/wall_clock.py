"""Own the time of day in what the daemon tells; nothing is decided by it."""

import time
from typing import Final

LAST_NANOSECONDS: Final = 2**63 - 1
"""The last nanosecond since 1970 that 64 bits hold, in the year 2262."""


def unix_nanoseconds() -> int:
    """Return the nanoseconds since 1970; on a clock that is set beyond the last one that can be told, that one."""
    try:
        return time.time_ns()
    except OverflowError:
        return LAST_NANOSECONDS
