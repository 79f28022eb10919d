"""Own the places that one lease has of one group, in plain numbers; for many leases at once see `kvlease.groups`.

The formulas are the same. But for one lease, a small array costs ten times as much as a number, and a request of
several groups needs a dozen such results.
"""

from typing import Final

from kvlease.groups import GroupShape, Keeps

ENDLESS: Final = 2**31 - 1


class Places:
    """The places of a group in the row of a lease."""

    __slots__ = (
        "_chunk",
        "_extra",
        "_is_fixed",
        "_is_state",
        "_last_state_place",
        "_max",
        "_most",
        "_size",
        "_window",
    )

    def __init__(self, group: GroupShape) -> None:
        """Take a group's numbers apart, so that no later call compares members of an enumeration."""
        self._size = group.tokens_per_block
        self._extra = group.extra_blocks
        self._most = group.table_blocks
        self._last_state_place = group.last_state_place
        self._max = group.max_blocks
        self._window = group.kept_tokens if group.keeps is Keeps.WINDOW else None
        self._chunk = group.kept_tokens if group.keeps is Keeps.CHUNK else None
        self._is_state = group.keeps is Keeps.STATE
        self._is_fixed = group.keeps is Keeps.FIXED

    def first_needed(self, num_computed: int) -> int:
        """Return the first place that is needed after so many tokens."""
        if self._window is not None:
            return max(num_computed - self._window, 0) // self._size
        if self._chunk is not None:
            return num_computed // self._chunk * self._chunk // self._size
        if self._is_state:
            return max(num_computed - 1, 0) // self._size
        return 0

    def last_covered(self, num_computed: int, num_tokens: int) -> int:
        """Return where the places of a lease end at most."""
        if self._is_fixed:
            return self._max
        end = min(-(-num_tokens // self._size) + self._extra, self._most)
        if self._window is None and self._chunk is None:
            return end
        return min(end, self.first_needed(num_computed) + self._max)

    def growth(self, num_computed: int, num_tokens: int, end: int) -> tuple[int, int]:
        """Return where the fresh places begin and end behind the present end."""
        after = max(self.last_covered(num_computed, num_tokens), end)
        first_filled = 0
        if self._is_state:
            first_filled = min((num_tokens - 1) // self._size, self._last_state_place)
        return min(max(first_filled, end), after), after

    def num_passed(self, num_tokens: int, end: int, after: int) -> int:
        """Return how many places of speculative states a lease of `num_tokens` passes over as it grows to `after`."""
        first_guessed = (num_tokens - 1) // self._size + 1
        return max(0, min(end, after - 1 - self._extra) - first_guessed)

    def covered(self, end: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` may be computed with the places before `end`."""
        if self._is_fixed or self._is_state:
            return num_tokens
        return min(num_tokens, end * self._size)

    def room(self, end: int) -> int:
        """Return how many tokens the places before `end` have room for, less speculative ones unless the table ends."""
        if self._is_fixed:
            return ENDLESS
        return (end if end == self._most else max(0, end - self._extra)) * self._size
