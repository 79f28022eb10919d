"""Own what the daemon answered about the keys of each request, and how long the request holds what was found."""

from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvlease.integrations.vllm.offload.books import NO_ROWS, Rows

NOWHERE = -1
"""A block that no tier has, as an exchange answers."""
BELOW = -2
"""A block that only a lower tier has, and that is on its way."""

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
THERE = (HIT, PENDING)

_ANSWERS = (HIT, PENDING, MISS)
"""By row: 0 for any that is held, else `BELOW` or `NOWHERE`, which count from the end."""


@dataclass(slots=True, eq=False)
class Seeker:
    """One request that may load: what it asked for, and the rows that it holds."""

    request_id: str
    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    """The answer to each key; a lookup reads nothing else."""
    known: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    """The answers of before what was held was given up: what was there need not be stored."""
    keys: list[OffloadKey] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: NO_ROWS)
    pending_until: float | None = None
    """When blocks that are on their way become misses."""
    num_loads: int = 0
    is_refused: bool = False
    """Whether a load of this request failed: then it computes everything."""
    is_finished: bool = False
    _index: dict[OffloadKey, int] | None = None

    @property
    def holds(self) -> bool:
        """Whether it holds any row."""
        return bool(len(self.rows)) and bool((self.rows >= 0).any())

    @property
    def held_rows(self) -> Rows:
        """The rows that it holds, in token order."""
        return self.rows[self.rows >= 0]

    def learn(self, keys: Sequence[OffloadKey], names: Sequence[bytes], rows: Rows) -> None:
        """Note the answers to keys that were not asked before."""
        self.keys.extend(keys)
        self.names.extend(names)
        self.rows = np.concatenate([self.rows, rows])
        self._index = None
        answers = map(_ANSWERS.__getitem__, np.minimum(rows, 0).tolist())
        self.answers.update(zip(keys, answers, strict=True))

    def miss(self, keys: Iterable[OffloadKey]) -> None:
        """Note keys that no tier has; there is nothing to load or to wait for."""
        self.answers.update(dict.fromkeys(keys, MISS))

    def lacking(self, keys: list[OffloadKey], storing: KeysView[OffloadKey]) -> list[OffloadKey]:
        """Return those of some keys that the pool has not, and that nobody stores; mostly that are all of them."""
        there = {key for key, answer in (self.answers or self.known).items() if answer in THERE}
        if there.isdisjoint(keys) and storing.isdisjoint(keys):
            return keys
        return [key for key in keys if key not in there and key not in storing]

    def pending(self) -> list[int]:
        """Return the places of the keys whose blocks are on their way."""
        return np.flatnonzero(self.rows == BELOW).tolist()

    def arrive(self, places: Sequence[int], rows: Rows) -> None:
        """Note where the blocks of these places are now."""
        self.rows[list(places)] = rows
        for place, row in zip(places, rows.tolist(), strict=True):
            if row != BELOW:
                self.answers[self.keys[place]] = HIT if row >= 0 else MISS

    def miss_pending(self) -> None:
        """Go on without the blocks that are still on their way."""
        places = self.pending()
        self.arrive(places, np.full(len(places), NOWHERE, np.int32))
        self.pending_until = None

    def lose(self, rows: Iterable[int]) -> None:
        """Note that these rows are held no more: what they were is a miss."""
        for place in np.flatnonzero(np.isin(self.rows, list(rows))).tolist():
            self.rows[place] = NOWHERE
            self.answers[self.keys[place]] = MISS

    def find(self, keys: Iterable[OffloadKey]) -> tuple[Rows, bytes]:
        """Return row and name of keys that are to be loaded; a key that is not held has row -1."""
        if self._index is None:
            self._index = {key: place for place, key in enumerate(self.keys)}
        blank = bytes(32)
        places = [self._index.get(key, -1) for key in keys]
        rows = np.array([self.rows[at] if at >= 0 else NOWHERE for at in places], np.int32)
        names = b"".join(self.names[at] if at >= 0 else blank for at in places)
        return rows, names

    def clear(self) -> Rows:
        """Forget what was asked, and return the rows that were held; the next lookup asks anew."""
        rows = self.held_rows
        if self.answers:
            self.known = self.answers
        self.answers = {}
        self.keys, self.names, self.rows, self._index = [], [], NO_ROWS, None
        self.pending_until = None
        return rows
