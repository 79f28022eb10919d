"""Own the exchanges of the offloading manager: one at a time, each settled or reconciled before the next one."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey

from kvlease.integrations.vllm.offload.absences import Absences
from kvlease.integrations.vllm.offload.books import NO_ROWS, Books, Row, Rows
from kvlease.integrations.vllm.rekey import RememberedKeys
from kvlease.integrations.vllm.session import EngineSession, SessionEvent

T = TypeVar("T")
D = TypeVar("D")

NAMES_MAX: Final = 16_384
"""Names that one exchange seeks at most; the daemon limits what a call names."""
QUIET_SECONDS: Final = 0.1
"""Seconds without exchanges after one that failed, where the daemon is there."""
PUT_OFF_MAX: Final = 4
"""Steps in a row that an exchange may be put off for, which nobody waits for."""

Lost = Callable[[Collection[Row] | None], None]
Held = Callable[[], Iterable[tuple[bytes, Row]]]


def pool_id(session: EngineSession) -> bytes:
    """Return what names the memory that a session has: the same in all processes that have it; empty for none."""
    return b" ".join(
        b"%d:%d" % (device, inode) for kind, device, inode in session.memory if kind == "tables"
    )


class Desk:
    """The manager's way to the daemon. No call of it raises."""

    def __init__(
        self, session: EngineSession, held: Held, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take a session over; `held` lists the names and rows that requests hold."""
        self.books = Books()
        self.pool = b""
        """Which memory the rows of the books are rows of; empty before there was any."""
        self.on_loss: Lost = lambda _: None
        """Told of rows that are held no more; None: of all rows."""
        self.absences = Absences(self.absent)
        self.num_exchanges = 0
        self._session = session
        self._held = held
        self._clock = clock
        self._is_in_doubt = False
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

    def is_due(self, *, can_wait: bool) -> bool:
        """Tell whether a step's end has something to tell; where that can wait, a later one tells it.

        It can where a step has new requests, as who waits for a first token need not wait for what others had; and
        where stores are under way, which are told of soon. Any exchange before takes it along.
        """
        is_due = self.books.is_due
        self._num_put_off = self._num_put_off + 1 if is_due and can_wait else 0
        return is_due and self._num_put_off % (PUT_OFF_MAX + 1) == 0

    def poll(self) -> None:
        """Take over what became of the session; other memory means other books."""
        event = self._session.poll()
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
        """Tell the daemon what is due and ask for more; returns a row for each name, or None where that failed.

        It is one exchange, but for more names than one can carry. What was absent is not told where a request waits.
        """
        if not self.is_ready or not self._is_certain():
            return None
        missed = [] if is_waited_for else self.names(self.absences.untold.take())
        rows = self._exchange_once(hold[:NAMES_MAX], take, missed)
        for first in range(NAMES_MAX, len(hold), NAMES_MAX):
            if rows is None:
                break
            more = self._exchange_once(hold[first : first + NAMES_MAX], 0)
            rows = None if more is None else np.concatenate([rows, more])
        return rows

    def names(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        """Return the daemon's keys of vLLM's; a desk that was never ready can be asked for none."""
        if not keys:
            return []
        rekeyer = self._session.rekeyer
        assert rekeyer is not None, "a desk that is ready has keys"
        return self._keys.of_names(rekeyer, keys)

    def absent(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Tell of each key without a call whether the pool surely lacks it; of none, where there is no pool."""
        return self._session.absent(self.names(keys)) if self.pool else [False] * len(keys)

    def begin_generation(self) -> None:
        """Make all keys others than before."""
        self.absences.untold.clear()
        self._session.reset()

    def shield(self, work: Callable[[], T], default: D, what: str) -> T | D:
        """Carry out a hook's work; the default where it fails."""
        return self._session.guard.shield(work, default, what)

    def close(self) -> None:
        """Detach."""
        self._session.close()

    def _exchange_once(
        self, hold: Sequence[bytes], take: int, missed: Sequence[bytes] = ()
    ) -> Rows | None:
        order = self.books.order(hold=hold, take=take, missed=missed)
        self.num_exchanges += 1
        answer = self._session.exchange(order, None)
        if answer is None:
            self._is_in_doubt = True
            self._quiet_until = self._clock() + QUIET_SECONDS
            return None
        self.books.settle(answer)
        return answer.held if hold else NO_ROWS

    def _is_certain(self) -> bool:
        """Make sure of what the magazine has, where the last answer was lost or the attachment is a new one."""
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
