"""Own the exchanges of a session's magazine: which one is on its way, and whether its content is in doubt."""

import time
from collections.abc import Callable
from typing import Final

from kvlease.errors import DeadlineError, InvalidError, RefusedError
from kvlease.integrations.vllm.session.attachment import Attachment
from kvlease.magazine import Exchanged, ExchangeOrder, Inventory

_NOTHING: Final = ExchangeOrder()


class Exchanging:
    """The exchanges of one session's magazine, over one attachment after another."""

    def __init__(self, deadline_seconds: float) -> None:
        """Begin without an attachment."""
        self._deadline_seconds = deadline_seconds
        self._is_in_doubt = False
        self._worker_id = 0
        self._underway: tuple[Attachment, Callable[[], Exchanged]] | None = None

    def __repr__(self) -> str:
        """Show life: whether an exchange is on its way, and whether the content is in doubt."""
        state = "in doubt" if self._is_in_doubt else "known"
        return f"<Exchanging {'underway' if self.is_underway else state}>"

    @property
    def is_underway(self) -> bool:
        """Whether an exchange was sent whose answer has not been taken."""
        return self._underway is not None

    def needs_inventory(self, attached: Attachment) -> bool:
        """Tell whether the magazine's content is uncertain; with an exchange on its way it is."""
        return self._is_in_doubt or attached.worker.worker_id != self._worker_id

    def take_up(self, attached: Attachment) -> None:
        """Go on with another attachment; other processes may have kept its magazine alive."""
        self._underway = None
        self._is_in_doubt = attached.magazine is not None
        self._worker_id = attached.worker.worker_id

    def carry_out(self, attached: Attachment, order: ExchangeOrder) -> Exchanged:
        """Carry out an exchange."""
        return self._told(attached, lambda: attached.magazine.exchange(order))

    def send(self, attached: Attachment, order: ExchangeOrder) -> bool:
        """Send an exchange; returns True."""
        self._is_in_doubt = True
        self._underway = attached, attached.magazine.begin(order)
        return True

    def answer(self, attached: Attachment) -> Exchanged:
        """Wait for the answer to the exchange that was sent."""
        underway, self._underway = self._underway, None
        if underway is None or underway[0] is not attached:
            raise _AnotherWorkerError
        return self._told(attached, underway[1])

    def forget(self) -> None:
        """Give up the answer to the exchange that was sent, which leaves the content in doubt."""
        self._underway = None

    def reconcile(self, attached: Attachment) -> Inventory:
        """Return the inventory, and end the doubt; an exchange that is still on its way can do nothing any more."""
        self._underway = None
        deadline_at = time.monotonic() + self._deadline_seconds
        worker_id = attached.worker.worker_id
        try:
            attached.magazine.inventory()
            _limit(attached, deadline_at)
            attached.magazine.exchange(_NOTHING)
            _limit(attached, deadline_at)
            truth: Inventory = attached.magazine.inventory()
        finally:
            attached.limit(self._deadline_seconds)
        self._worker_id = worker_id
        self._check_worker(attached)
        self._is_in_doubt = False
        return truth

    def _told(self, attached: Attachment, answer: Callable[[], Exchanged]) -> Exchanged:
        self._is_in_doubt = True
        try:
            told = answer()
        except (InvalidError, RefusedError):
            self._is_in_doubt = False
            raise
        self._is_in_doubt = False
        self._check_worker(attached)
        return told

    def _check_worker(self, attached: Attachment) -> None:
        """Refuse the answer if the worker became another one meanwhile, with another magazine of the same name."""
        if attached.worker.worker_id != self._worker_id:
            self._is_in_doubt = True
            raise _AnotherWorkerError


class _AnotherWorkerError(RefusedError):
    """The daemon has made this process another worker; the next inventory tells what it holds."""


def _limit(attached: Attachment, deadline_at: float) -> None:
    left = deadline_at - time.monotonic()
    if left <= 0:
        raise DeadlineError("the inventory was not complete before its deadline")
    attached.limit(left)
