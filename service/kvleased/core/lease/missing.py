"""Own granted leases that may have missed some keys, until there is time to see what became of those keys.

Putting a lease aside costs next to nothing; the keys that it missed are taken from its request later.
"""

from collections import deque
from typing import Final, NamedTuple

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.commands import Reserve
from kvleased.core.lease.leases import Lease

LEASES_MAX: Final = 512
"""Leases that wait at most; the missed keys of further leases are counted, but not looked up."""


class Missing(NamedTuple):
    """The missed keys of one grant."""

    keys: bytes
    first_key: int
    """The index of the first one in the request's chain."""
    num_left: int
    """Departures before the grant."""
    lease_id: int


class MissingKeys:
    """The leases that were put aside."""

    def __init__(self, hash_tokens: int) -> None:
        """Start empty; each key stands for `hash_tokens` tokens."""
        self._hash_tokens = hash_tokens
        self._aside: deque[Lease] = deque()
        self.num_dropped = 0
        """Missed keys that are never looked up, because there was no room."""

    def __len__(self) -> int:
        """Count the leases that wait."""
        return len(self._aside)

    def __repr__(self) -> str:
        """Show how many wait."""
        return f"<MissingKeys {len(self)} leases, {self.num_dropped} keys dropped>"

    def put(self, lease: Lease) -> None:
        """Put a lease that has just been granted aside, if there is room."""
        if len(self._aside) < LEASES_MAX:
            self._aside.append(lease)
        else:
            assert isinstance(lease.request, Reserve), "nothing else looks for a prefix"
            num_keys = len(lease.request.keys) // BYTES_PER_KEY
            self.num_dropped += num_keys - lease.tier_tokens[-1] // self._hash_tokens

    def take(self, num_keys: int) -> list[Missing]:
        """Return what leases have missed, oldest first, until there are at least `num_keys` keys or no more leases."""
        taken: list[Missing] = []
        while self._aside and num_keys > 0:
            missed = self._missed(self._aside.popleft())
            if missed.keys:
                taken.append(missed)
                num_keys -= len(missed.keys) // BYTES_PER_KEY
        return taken

    def _missed(self, lease: Lease) -> Missing:
        assert isinstance(lease.request, Reserve), "nothing else looks for a prefix"
        first_key = lease.tier_tokens[-1] // self._hash_tokens
        missed = lease.request.keys[first_key * BYTES_PER_KEY :]
        return Missing(missed, first_key, lease.num_left_before, lease.lease_id)
