"""Own the daemon's answers about each request's keys, and how long the request holds the blocks found."""

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvlease.integrations.vllm.offload.books import NO_ROWS, Rows

NOWHERE = -1
"""An exchange's answer for a block that no tier has."""
BELOW = -2
"""An exchange's answer for a block that only a lower tier has, and that is on its way."""

MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
THERE = (HIT, PENDING)

Question = tuple["Seeker", list[int] | None, list[bytes]]
"""A request, the places of its blocks on their way, or None if it asks for the first time, and the names."""

_ANSWERS = (HIT, PENDING, MISS)
"""Indexed by min(row, 0): 0 for a row that is held; `BELOW` and `NOWHERE` count from the end."""


@dataclass(slots=True, eq=False)
class Seeker:
    """One request that may load: its keys, the answers, and the rows that it holds."""

    request_id: str
    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    """The answer for each key; a lookup reads only this."""
    known: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    """The answers from before the hold was given up: blocks that the pool had need not be stored."""
    keys: list[OffloadKey] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: NO_ROWS)
    pending_until: float | None = None
    """The time at which blocks still on their way become misses."""
    num_loads: int = 0
    is_refused: bool = False
    """Whether a load of this request failed; then it computes everything."""
    is_finished: bool = False
    is_spoilt: bool = False
    """Whether the request has read what a load left unwritten; then nothing of it is stored."""
    _index: dict[OffloadKey, int] | None = None

    @property
    def holds(self) -> bool:
        """Whether the request holds any row."""
        return bool(len(self.rows)) and bool((self.rows >= 0).any())

    @property
    def held_rows(self) -> Rows:
        """The rows that the request holds, in token order."""
        return self.rows[self.rows >= 0]

    def learn(self, keys: Sequence[OffloadKey], names: Sequence[bytes], rows: Rows) -> None:
        """Note the answers for keys that were not asked for before."""
        self.keys.extend(keys)
        self.names.extend(names)
        self.rows = np.concatenate([self.rows, rows])
        self._index = None
        answers = map(_ANSWERS.__getitem__, np.minimum(rows, 0).tolist())
        self.answers.update(zip(keys, answers, strict=True))

    def miss(self, keys: Iterable[OffloadKey]) -> None:
        """Note keys that no tier has, so that there is nothing to load or to wait for."""
        self.answers.update(dict.fromkeys(keys, MISS))

    def lacking(self, keys: list[OffloadKey], storing: KeysView[OffloadKey]) -> list[OffloadKey]:
        """Return those keys that the pool lacks and nobody is storing; usually all of them."""
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
        """Make misses of the blocks that are still on their way."""
        places = self.pending()
        self.arrive(places, np.full(len(places), NOWHERE, np.int32))
        self.pending_until = None

    def lose(self, rows: Iterable[int]) -> None:
        """Note that these rows are no longer held; their keys become misses."""
        for place in np.flatnonzero(np.isin(self.rows, list(rows))).tolist():
            self.rows[place] = NOWHERE
            self.answers[self.keys[place]] = MISS

    def find(self, keys: Iterable[OffloadKey]) -> tuple[Rows, bytes]:
        """Return the rows and names of keys that are to be loaded; a key that is not held has row -1."""
        if self._index is None:
            self._index = {key: place for place, key in enumerate(self.keys)}
        blank = bytes(32)
        places = [self._index.get(key, -1) for key in keys]
        rows = np.array([self.rows[at] if at >= 0 else NOWHERE for at in places], np.int32)
        names = b"".join(self.names[at] if at >= 0 else blank for at in places)
        return rows, names

    def clear(self) -> Rows:
        """Forget what was asked for, and return the rows that were held; the next lookup asks again."""
        rows = self.held_rows
        if self.answers:
            self.known = self.answers
        self.answers = {}
        self.keys, self.names, self.rows, self._index = [], [], NO_ROWS, None
        self.pending_until = None
        return rows


def questions(
    unasked: Iterable[tuple[Seeker, dict[OffloadKey, None]]],
    due: Iterable[tuple[Seeker, list[int]]],
    names_of: Callable[[list[OffloadKey]], list[bytes]],
) -> list[Question]:
    """Return the questions of waiting requests in a step: those never asked before, and those due again."""
    first = [(seeker, None, names_of(list(keys))) for seeker, keys in unasked]
    again = [(seeker, places, [seeker.names[at] for at in places]) for seeker, places in due]
    return [*first, *again]
