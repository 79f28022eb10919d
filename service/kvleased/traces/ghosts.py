"""Own ghosts: how many of the keys that a cache is asked for other policies or sizes would have found.

If a ghost would hold many keys, it looks only at a sample of the keys, chosen by their digests, and is smaller by the
same factor.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY
from kvlease.units import TOKENS_MAX
from kvleased.traces.policies import BELADY, POLICIES, policy_named
from kvleased.traces.shadow import ShadowPool

GHOSTS_MAX: Final = 3
"""Most ghosts of one cache."""
KEYS_HELD_MAX: Final = 1 << 17
"""Most keys that one ghost holds; a larger ghost looks at a sample."""
KEYS_WAITING_MAX: Final = 1 << 16
"""Most keys that wait to be looked at; further keys are dropped, and counted."""

_WORDS_PER_KEY: Final = BYTES_PER_KEY // 8
_SAMPLED_BITS: Final = np.uint64(40)
"""The first bit of a digest that decides whether its key is in a sample; policies use the bits below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ghost:
    """A policy and size to try."""

    policy: str
    num_blocks: int
    """Blocks of the pool; 0 takes the cache's own number."""

    @property
    def name(self) -> str:
        """The ghost as it is written: POLICY or POLICY@BLOCKS."""
        return f"{self.policy}@{self.num_blocks}" if self.num_blocks else self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostFigures:
    """The counts of a ghost so far."""

    name: str
    num_keys: int
    num_hits: int


def read_ghosts(written: Sequence[str]) -> tuple[Ghost, ...]:
    """Read ghosts, each written as POLICY or POLICY@BLOCKS.

    Raises:
        InvalidError: a ghost is not written so or named twice, or there are too many.
    """
    if len(written) > GHOSTS_MAX:
        message = f"{len(written)} ghosts are named; name at most {GHOSTS_MAX}"
        raise InvalidError(message, resource="ghosts", need=len(written), limit=GHOSTS_MAX)
    ghosts = tuple(map(_read, written))
    if len(set(ghosts)) < len(ghosts):
        names = ", ".join(ghost.name for ghost in ghosts)
        raise InvalidError(f"a ghost is named twice: {names}", resource="ghosts")
    return ghosts


def _read(written: str) -> Ghost:
    name, at, blocks = written.partition("@")
    if name == BELADY:
        message = (
            f"{BELADY} needs to know the future, which a ghost cannot; record a trace and use kvlease trace simulate "
            "instead"
        )
        raise InvalidError(message, resource="ghosts")
    policy = policy_named(name, POLICIES)
    if not at:
        return Ghost(policy=policy, num_blocks=0)
    if not (blocks.isascii() and blocks.isdecimal() and 0 < int(blocks[:18]) <= TOKENS_MAX):
        message = (
            f"the ghost {written[:40]!r} does not have a number of blocks from 1 to {TOKENS_MAX} after its @; write it "
            f"as {policy}@20000, or {policy} for a pool as large as the cache's"
        )
        raise InvalidError(message, resource="ghosts", limit=TOKENS_MAX)
    return Ghost(policy=policy, num_blocks=int(blocks))


class GhostCache:
    """One policy and size, tried on the keys of one request after another."""

    def __init__(self, policy: str, num_blocks: int, *, keys_held_max: int = KEYS_HELD_MAX) -> None:
        """Start empty; one key in `rate` is looked at, so that at most `keys_held_max` are held."""
        self.name = f"{policy}@{num_blocks}"
        self.num_keys = 0
        self.num_hits = 0
        self.rate = 1
        while num_blocks > keys_held_max * self.rate:
            self.rate *= 2
        self._mask = np.uint64(self.rate - 1)
        self._pool = ShadowPool(policy, -(-num_blocks // self.rate))

    def __repr__(self) -> str:
        """Show its name and its hits."""
        return f"<GhostCache {self.name}, {self.num_hits} of {self.num_keys} hit>"

    def ask(self, digests: NDArray[np.uint64]) -> int:
        """Take the keys of one request in token order; return how many would have been found, estimated if sampled."""
        num_hits = self._pool.ask(digests) if self.rate == 1 else self._estimated(digests)
        self.num_keys += len(digests)
        self.num_hits += num_hits
        return num_hits

    def _estimated(self, digests: NDArray[np.uint64]) -> int:
        """Return where the hits end: in the middle between the last hit in the sample and the next key in it.

        So a key with which every request begins has the same weight, whether it is in the sample or not.
        """
        (places,) = ((digests >> _SAMPLED_BITS) & self._mask == 0).nonzero()
        if not len(places):
            return len(digests) * self.num_hits // self.num_keys if self.num_keys else 0
        num_found = self._pool.ask(digests[places])
        low = int(places[num_found - 1]) + 1 if num_found else 0
        high = int(places[num_found]) if num_found < len(places) else len(digests)
        return (low + high) // 2


class Ghosts:
    """The ghosts of one cache, and the requests that they have not looked at yet."""

    def __init__(
        self, ghosts: Sequence[Ghost], num_blocks: int, blocks_per_key: float = 1.0
    ) -> None:
        """Start empty; `num_blocks` are the cache's own, and each key takes `blocks_per_key` of them."""
        self.num_dropped = 0
        """Keys that were dropped before any ghost looked at them."""
        self._caches: list[GhostCache] = []
        self._waiting: deque[bytes] = deque()
        self._num_waiting = 0
        self._asked: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._to_ask: list[GhostCache] = []
        """The ghosts that have not looked at the current request yet."""
        for ghost in ghosts:
            size = ghost.num_blocks or num_blocks
            cache = GhostCache(ghost.policy, max(1, int(size / blocks_per_key)))
            cache.name = f"{ghost.policy}@{size}"
            self._caches.append(cache)

    def __repr__(self) -> str:
        """Show life."""
        return (
            f"<Ghosts {self._caches}, {self._num_waiting} keys waiting, {self.num_dropped} dropped>"
        )

    @property
    def is_behind(self) -> bool:
        """Whether requests wait to be looked at."""
        return bool(self._waiting or self._to_ask)

    def offer(self, keys: bytes) -> None:
        """Keep the packed keys of a granted request until there is time for them."""
        num_keys = len(keys) // BYTES_PER_KEY
        if self._num_waiting + num_keys > KEYS_WAITING_MAX:
            self.num_dropped += num_keys
        elif num_keys:
            self._waiting.append(keys)
            self._num_waiting += num_keys

    def work(self, seconds: float) -> None:
        """Have ghosts look at waiting requests for about `seconds`: at least one ghost at one request."""
        deadline = perf_counter() + seconds
        while self.is_behind:
            if not self._to_ask:
                keys = self._waiting.popleft()
                self._num_waiting -= len(keys) // BYTES_PER_KEY
                self._asked = distinct(np.frombuffer(keys, "<u8")[::_WORDS_PER_KEY])
                self._to_ask = self._caches[:]
            self._to_ask.pop().ask(self._asked)
            if perf_counter() >= deadline:
                return

    def figures(self) -> tuple[GhostFigures, ...]:
        """Return the counts of each ghost so far."""
        return tuple(
            GhostFigures(name=one.name, num_keys=one.num_keys, num_hits=one.num_hits)
            for one in self._caches
        )


def distinct(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return digests without repetitions, which only come from a caller's mistake."""
    if len(set(digests.tolist())) == len(digests):
        return digests
    _, first = np.unique(digests, return_index=True)
    return digests[np.sort(first)]
