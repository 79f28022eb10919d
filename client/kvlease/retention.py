"""Own the bounds of how long, and how firmly, a caller may ask blocks to stay cached; callers and daemon share them."""

from typing import Final

RETAIN_PRIORITY_MAX: Final = 100
"""The largest retain priority; 0 is the same as low, 50 as normal, 100 as high."""
SECONDS_RETAINED_MAX: Final = 7 * 86_400
"""The most `retain_seconds`: seven days; no block is worth keeping longer."""
