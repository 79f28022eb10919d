"""Own the granted leases some of whose keys may not have been found, until there is time to see what became of them.

To put one aside costs next to nothing; what it missed is taken from its request later.
"""

from collections import deque
from typing import Final, NamedTuple

from kvlease.ids import BYTES_PER_KEY
from kvleased.core.commands import Reserve
from kvleased.core.lease.leases import Lease

LEASES_MAX: Final = 512
"""Leases that wait; what comes above is not looked up, and counted."""


class Missing(NamedTuple):
    """The missed keys of one grant."""

    keys: bytes
    first_key: int
    """Of them, in the request's chain."""
    num_left: int
    """Departures before the grant."""
    lease_id: int


class MissingKeys:
    """What was put aside."""

    def __init__(self, hash_tokens: int) -> None:
        """Start empty; a key stands for so many tokens."""
        self._hash_tokens = hash_tokens
        self._aside: deque[Lease] = deque()
        self.num_dropped = 0
        """Keys that nobody looks up."""

    def __len__(self) -> int:
        """Count the leases that wait."""
        return len(self._aside)

    def __repr__(self) -> str:
        """Show how many wait."""
        return f"<MissingKeys {len(self)} leases, {self.num_dropped} keys dropped>"

    def put(self, lease: Lease) -> None:
        """Put a lease aside that has just been granted, if there is room."""
        if len(self._aside) < LEASES_MAX:
            self._aside.append(lease)
        else:
            assert isinstance(lease.request, Reserve), "nothing else looks for a prefix"
            num_keys = len(lease.request.keys) // BYTES_PER_KEY
            self.num_dropped += num_keys - lease.tier_tokens[-1] // self._hash_tokens

    def take(self, num_keys: int) -> list[Missing]:
        """Return what those that were put aside first have missed, until it is as many keys as are asked for."""
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
