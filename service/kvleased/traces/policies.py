"""Own the policies for simulations: those of the daemon's pools, and two to compare them with."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvleased.core.eviction import POLICIES as OF_POOLS
from kvleased.core.eviction import make_order
from kvleased.core.ids import Ids

ALIASES: Final = {"lru": "leaf-lru"}
"""Other names of policies."""
BELADY: Final = "belady"
"""The name of the bound, which is no policy because it knows the future."""


class Order(Protocol):
    """The interface of a policy for a simulated pool; the same as that of an eviction order."""

    def cached(self, blocks: Ids) -> None:
        """Note that blocks hold other keys now; the first block of a request comes first."""

    def add(self, blocks: Ids) -> None:
        """Add blocks that nobody holds any more; the last block of a request comes first."""

    def discard(self, blocks: Ids) -> None:
        """Take out blocks that were found, and are held again."""

    def evicted(self, blocks: Ids) -> None:
        """Take out blocks that leave the pool; they still hold their keys."""

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return the blocks that should leave next."""


class Fifo:
    """Evicts the blocks that came first, whether they were found since or not."""

    def __init__(self) -> None:
        """Start empty."""
        self._queue: dict[int, None] = {}
        self._held: set[int] = set()

    def cached(self, blocks: Ids) -> None:
        """Put blocks behind all others; they are held."""
        self._queue.update(dict.fromkeys(blocks.tolist()))
        self._held.update(blocks.tolist())

    def add(self, blocks: Ids) -> None:
        """Let blocks be evicted again, at the places that they have."""
        self._held.difference_update(blocks.tolist())

    def discard(self, blocks: Ids) -> None:
        """Pass over blocks until they are added; they keep their places."""
        self._held.update(blocks.tolist())

    def evicted(self, blocks: Ids) -> None:
        """Take blocks out of their places."""
        for block in blocks.tolist():
            del self._queue[block]

    def coldest(self, count: int, protected: Ids) -> Ids:
        """Return the blocks that came first."""
        passed = self._held.union(protected.tolist())
        found: list[int] = []
        for block in self._queue:
            if len(found) == count:
                break
            if block not in passed:
                found.append(block)
        return np.array(found, np.intp)


class RootFirst:
    """Wraps a policy, and gives it the blocks of a request in reverse, so that prefixes leave before their ends."""

    def __init__(self, order: Order) -> None:
        """Take the wrapped policy."""
        self._order = order
        self.cached = order.cached
        self.discard = order.discard
        self.evicted = order.evicted
        self.coldest = order.coldest

    def add(self, blocks: Ids) -> None:
        """Add blocks, with the first block of a request as the coldest of them."""
        self._order.add(blocks[::-1])


_TO_COMPARE: Final[dict[str, Callable[[int, NDArray[np.uint64]], Order]]] = {
    "fifo": lambda *_: Fifo(),
    "root-lru": lambda num_blocks, keys: RootFirst(make_order("leaf-lru", num_blocks, keys)),
}

POLICIES: Final = (*_TO_COMPARE, *OF_POOLS)
"""Every policy."""


def order_of(policy: str, num_blocks: int, keys: NDArray[np.uint64]) -> Order:
    """Return an empty order of blocks; block i holds the key keys[i]."""
    if policy in _TO_COMPARE:
        return _TO_COMPARE[policy](num_blocks, keys)
    return make_order(policy, num_blocks, keys)


def policy_named(name: str, known: tuple[str, ...] = POLICIES) -> str:
    """Return the policy of a name, which may be an alias.

    Raises:
        InvalidError: there is no such policy.
    """
    policy = ALIASES.get(name, name)
    if policy not in known:
        close = get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        message = f"{name[:40]!r} is not a policy; {hint}the policies are {', '.join(known)}"
        raise InvalidError(message, resource="policy")
    return policy
