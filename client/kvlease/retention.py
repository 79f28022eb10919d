"""Own how long, and how firmly, blocks may be asked to stay cached: the bounds that callers and daemon share."""

from typing import Final

RETAIN_PRIORITY_MAX: Final = 100
"""The largest number that says how long blocks stay cached; 0 is what low is, 50 normal, 100 high."""
SECONDS_RETAINED_MAX: Final = 7 * 86_400
"""Seven days: no block is worth more patience."""
