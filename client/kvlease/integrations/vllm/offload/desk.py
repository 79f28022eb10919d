"""Own the offloading manager's exchanges: one at a time, each settled or reconciled before the next."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey

from kvlease.integrations.vllm.identity.rekey import RememberedKeys
from kvlease.integrations.vllm.offload.absences import Absences
from kvlease.integrations.vllm.offload.books import NO_ROWS, Books, Row, Rows
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent
from kvlease.magazine import Exchanged

T = TypeVar("T")
D = TypeVar("D")

NAMES_MAX: Final = 16_384
"""Names that one exchange asks for at most; the daemon limits how many a call may name."""
QUIET_SECONDS: Final = 0.1
"""Seconds without exchanges after one that failed, if the daemon still answers."""
PUT_OFF_MAX: Final = 4
"""Steps in a row for which an exchange that nobody waits for may be put off."""

Lost = Callable[[Collection[Row] | None], None]
Held = Callable[[], Iterable[tuple[bytes, Row]]]


def pool_id(session: EngineSession) -> bytes:
    """Return the identity of a session's memory, the same in all processes that have it; empty if it has none."""
    return b" ".join(
        b"%d:%d" % (device, inode) for kind, device, inode in session.memory if kind == "tables"
    )


class Desk:
    """The manager's link to the daemon. Its calls never raise."""

    def __init__(
        self, session: EngineSession, held: Held, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Use a session; `held` lists the names and rows that requests hold."""
        self.books = Books()
        self.pool = b""
        """The identity of the memory that the books' rows belong to; empty until there is memory."""
        self.on_loss: Lost = lambda _: None
        """Called with the rows that are no longer held, or with None for all rows."""
        self.absences = Absences(self.absent)
        self.num_exchanges = 0
        self._session = session
        self._held = held
        self._clock = clock
        self._is_in_doubt = False
        self._is_underway = False
        self._is_news_underway = False
        self._quiet_until = 0.0
        self._num_put_off = 0
        self._keys = RememberedKeys()
        self.poll()

    def __repr__(self) -> str:
        """Show life: the session and the books."""
        return f"<Desk {self._session!r}, {self.books!r}>"

    @property
    def is_ready(self) -> bool:
        """Whether an exchange is worth trying."""
        return bool(self.pool) and self._session.is_on and self._clock() >= self._quiet_until

    @property
    def has_work(self) -> bool:
        """Whether there is anything to tell the daemon, or to hear of what it was told; rows may come at any time."""
        return self.is_ready and (self.books.is_due or self._is_news_underway)

    def come_due(self, *, can_wait: bool) -> bool:
        """Count a step's end, and tell whether an exchange is due at it; if it can wait, a later step makes it.

        It can wait if the step has new requests, so that no first token waits for news of other requests, and if stores
        are unfinished, which will bring more news soon. Any exchange made before then carries the news as well.
        """
        is_due = self.books.is_due
        self._num_put_off = self._num_put_off + 1 if is_due and can_wait else 0
        return is_due and self._num_put_off % (PUT_OFF_MAX + 1) == 0

    def poll(self) -> None:
        """Learn what has become of the session and of the exchange on its way; other memory means new books."""
        event = self._session.poll()
        self._hear()
        if event is SessionEvent.FRESH and (pool := pool_id(self._session)) != self.pool:
            plan = self._session.plan
            self.pool = pool
            self.books.wipe(0 if plan is None else plan.num_blocks)
            self.absences.untold.clear()
            self._is_in_doubt = False
            self.on_loss(None)

    def exchange(
        self, *, hold: Sequence[bytes] = (), take: int = 0, is_waited_for: bool = False
    ) -> Rows | None:
        """Tell the daemon what is due and ask for more; return a row for each name, or None if that failed.

        It makes one exchange, or several if there are more names than one can carry. While a request waits, the
        exchange does not report keys that were missed without a call.
        """
        self._hear()
        if not self.is_ready or not self._make_certain():
            return None
        missed = [] if is_waited_for else self.names(self.absences.untold.take())
        rows = self._exchange_once(hold[:NAMES_MAX], take, missed)
        for first in range(NAMES_MAX, len(hold), NAMES_MAX):
            if rows is None:
                break
            more = self._exchange_once(hold[first : first + NAMES_MAX], 0)
            rows = None if more is None else np.concatenate([rows, more])
        return rows

    def begin(self, take: int) -> None:
        """Tell the daemon what is due and ask for rows; the answer is heard at the next poll or exchange.

        So the daemon works while the engine computes a step, and nobody waits.
        """
        self._hear()
        if not self.is_ready or not self._make_certain():
            return
        is_news = self.books.is_due
        order = self.books.order(take=take, missed=self.names(self.absences.untold.take()))
        self.num_exchanges += 1
        self._is_underway, self._is_news_underway = True, is_news
        if not self._session.begin(order):
            self._hear()

    def lack(self, num_rows: int) -> int:
        """Return how many of so many rows the stock lacks, once those on their way have come."""
        if num_rows > len(self.books.stock):
            self._hear()
        return max(0, num_rows - len(self.books.stock))

    def names(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        """Return the daemon's keys for vLLM's; the desk must have been ready once unless `keys` is empty."""
        if not keys:
            return []
        rekeyer = self._session.rekeyer
        assert rekeyer is not None, "a desk that is ready has keys"
        return self._keys.of_names(rekeyer, keys)

    def absent(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Tell for each key, without a call, whether the pool surely lacks it; all False if there is no pool."""
        return self._session.absent(self.names(keys)) if self.pool else [False] * len(keys)

    def begin_generation(self) -> None:
        """Begin a new era of keys."""
        self.absences.untold.clear()
        self._session.reset()

    def shield(self, work: Callable[[], T], default: D, what: str) -> T | D:
        """Carry out a hook's work; give the default if it fails."""
        return self._session.guard.shield(work, default, what)

    def close(self) -> None:
        """Detach, once what is on its way has arrived and what no step has told is told."""
        self._hear()
        if self.books.is_due:
            self.exchange()
        self._session.close()

    def _exchange_once(
        self, hold: Sequence[bytes], take: int, missed: Sequence[bytes] = ()
    ) -> Rows | None:
        order = self.books.order(hold=hold, take=take, missed=missed)
        self.num_exchanges += 1
        answer = self._session.exchange(order, None)
        self._settle(answer)
        if answer is None:
            return None
        return answer.held if hold else NO_ROWS

    def _hear(self) -> None:
        if self._is_underway:
            self._is_underway = self._is_news_underway = False
            self._settle(self._session.answered())

    def _settle(self, answer: Exchanged | None) -> None:
        if answer is None:
            self._is_in_doubt = True
            self._quiet_until = self._clock() + QUIET_SECONDS
        else:
            self.books.settle(answer)

    def _make_certain(self) -> bool:
        """Make sure of the magazine's content if the last answer was lost or the attachment is new."""
        if not self._is_in_doubt and not self._session.needs_inventory:
            return True
        inventory = self._session.reconciled()
        if inventory is None:
            self._quiet_until = self._clock() + QUIET_SECONDS
            return False
        self._is_in_doubt = False
        if lost := self.books.reconcile(inventory, self._held()):
            self.on_loss(lost)
        return True
