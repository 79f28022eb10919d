"""Own the use of each row of the engine's magazine; makes no call.

Rows are the blocks of the daemon's pool. Every row of the magazine is in one of these states:

- in stock: private, and nobody writes it;
- being written: private, and a job stores into it;
- written: private, to be published and dropped by the next exchange: a cached block needs no holder;
- held: found for one or more requests that may load it;
- leaving: to be dropped by the next exchange.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.exchanges import packable
from kvlease.ids import BYTES_PER_KEY
from kvlease.magazine import Exchanged, ExchangeOrder, Inventory

Row = int
Rows = NDArray[np.int32]

NO_ROWS: Rows = np.zeros(0, np.int32)

_POSITION: Final = attrgetter("position")


class Written(NamedTuple):
    """A row that a job fills or has filled, with its future key and its place in the request's chain."""

    row: Row
    name: bytes
    position: int


@dataclass(slots=True)
class _Sent:
    """What an unanswered exchange may have done."""

    written: list[Written] = field(default_factory=list)
    leaving: list[Row] = field(default_factory=list)
    wrong: list[Row] = field(default_factory=list)


class Books:
    """The rows of one magazine, all of one memory."""

    def __init__(self) -> None:
        """Begin with no rows; `wipe` opens the books for a pool."""
        self.wipe(0)

    def __repr__(self) -> str:
        """Show life: the number of rows in each state."""
        return (
            f"<Books {len(self.stock)} in stock, {self.num_writing} being written, {len(self.written)} written, "
            f"{self.num_held} held, {len(self.leaving)} leaving>"
        )

    @property
    def num_held(self) -> int:
        """Rows that requests hold."""
        return self._num_held

    @property
    def num_writing(self) -> int:
        """Rows that jobs store into."""
        return len(self._writing)

    @property
    def is_due(self) -> bool:
        """Whether the next exchange has anything to tell."""
        return bool(self.written or self.leaving or self.wrong)

    def wipe(self, num_rows: int) -> None:
        """Forget everything, as the pool is another one, with `num_rows` rows."""
        self.num_rows = num_rows
        self.stock: list[Row] = []
        self.written: list[Written] = []
        self.leaving: list[Row] = []
        self.wrong: list[Row] = []
        self._writing: set[Row] = set()
        self._num_holders = np.zeros(num_rows, np.int32)
        self._num_held = 0
        self._sent: _Sent | None = None

    # Rows that are read

    def hold(self, rows: Rows) -> None:
        """Note that a request holds rows that an exchange gave it; `rows` has no row twice."""
        self._num_held += int(np.count_nonzero(self._num_holders[rows] == 0))
        self._num_holders[rows] += 1

    def release(self, rows: Rows) -> None:
        """Note that a request no longer holds these rows; those without another holder leave the magazine, in order."""
        self._num_holders[rows] -= 1
        left = rows[self._num_holders[rows] == 0]
        self._num_held -= len(left)
        self.leaving.extend(left.tolist())

    def condemn(self, rows: Iterable[Row]) -> None:
        """Mark held rows that carry another key than they should, so that the next exchange retracts them."""
        self.wrong.extend(
            row for row in rows if 0 <= row < self.num_rows and self._num_holders[row]
        )

    # Rows that are written

    def write(self, num_rows: int) -> list[Row]:
        """Take up to `num_rows` rows out of the stock, to store into."""
        keep = max(0, len(self.stock) - num_rows)
        rows = self.stock[keep:]
        del self.stock[keep:]
        self._writing.update(rows)
        return rows

    def end_write(self, row: Row) -> bool:
        """Note that a job has stored into a row; return whether we may still publish the row."""
        if row in self._writing:
            self._writing.remove(row)
            return True
        return False

    def unwrite(self, row: Row) -> None:
        """Note that a job has ended and left its row without useful content; the row returns to the stock."""
        if self.end_write(row):
            self.stock.append(row)

    # Exchanges

    def order(
        self, *, hold: Sequence[bytes] = (), take: int = 0, missed: Sequence[bytes] = ()
    ) -> ExchangeOrder:
        """Return what to tell the daemon now; call `settle` if it answers, and `reconcile` if it does not.

        Rows are taken as for new requests: their old content is first written to the tiers below, so they may come
        later.
        """
        sent = self._sent = _Sent(sorted(self.written, key=_POSITION), self.leaving, self.wrong)
        self.written, self.leaving, self.wrong = [], [], []
        names = b"".join(one.name for one in sent.written)
        leaving = [*(one.row for one in sent.written), *sent.leaving]
        assert len(names) == len(sent.written) * BYTES_PER_KEY
        return ExchangeOrder(
            publish_blocks=packable([one.row for one in sent.written], np.int32),
            publish_keys=names,
            publish_positions=packable([one.position for one in sent.written], np.uint32),
            retract_blocks=packable(sent.wrong, np.int32),
            drop_blocks=packable(leaving, np.int32),
            hold_keys=b"".join(hold),
            brings=True,
            take_new=take,
            missed_keys=b"".join(missed),
        )

    def settle(self, answer: Exchanged) -> None:
        """Note that the last order was carried out."""
        self._sent = None
        self.stock.extend(answer.taken_new.tolist())

    def reconcile(self, inventory: Inventory, held: Iterable[tuple[bytes, Row]]) -> set[Row]:
        """Make the books agree with the inventory; `held` lists the names and rows that requests believe they hold.

        Returns the rows of `held` that are no longer held under their name.
        """
        sent, self._sent = self._sent or _Sent(), None
        blank = bytes(BYTES_PER_KEY)
        names = [
            inventory.keys[at : at + BYTES_PER_KEY]
            for at in range(0, len(inventory.keys), BYTES_PER_KEY)
        ]
        there = dict(zip(inventory.blocks.tolist(), names, strict=True))
        private = {row for row, name in there.items() if name == blank}
        lost = {row for name, row in held if there.get(row) != name}
        self._num_holders[list(lost)] = 0
        self._num_held = int(np.count_nonzero(self._num_holders))
        self._writing &= private
        waiting = [one for one in (*sent.written, *self.written) if one.row in private]
        self.written = waiting
        used = self._writing.union(one.row for one in waiting)
        self.stock = sorted(private - used)
        self.leaving = [row for row in there if row not in private and not self._num_holders[row]]
        self.wrong = [row for row in (*sent.wrong, *self.wrong) if row in there.keys() - private]
        return lost
