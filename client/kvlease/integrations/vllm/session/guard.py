"""Own the rule that kvlease never harms an engine: deadline, breaker and safe default; callers choose what to call.

The breaker opens after a call that the daemon did not answer. While it is open, calls are not made and give their
default at once. If the daemon is probed in the background, a probe that succeeds closes the breaker. If not, one call
is let through every `retry_seconds`, and its success closes the breaker.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, TypeVar
from weakref import WeakSet

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    NotYoursError,
    RefusedError,
    StaleError,
    StartingError,
)

T = TypeVar("T")
D = TypeVar("D")

_logger: Final = logging.getLogger(__name__)

ANSWERS: Final = (InvalidError, NotYoursError, RefusedError, StaleError)
"""Errors that the daemon gives as its answer, so that it is alive; except StartingError."""


@dataclass(slots=True)
class GuardCounts:
    """The counts of one guard's calls, since it began."""

    calls: int = 0
    """Calls that were made."""
    skipped: int = 0
    """Calls that were not made, because the breaker was open."""
    unanswered: int = 0
    """Calls that the daemon did not answer in time, or at all."""
    refused: int = 0
    """Calls that the daemon refused."""
    faults: int = 0
    """Mistakes in kvlease itself that were kept from the engine."""
    late: int = 0
    """Calls that were answered, but after the deadline."""
    opened: int = 0
    """How often the breaker has opened."""

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


class Guard:
    """The breaker of one session. Its calls come from one thread; `trip` and `recover` may be called from another."""

    def __init__(
        self,
        *,
        deadline_seconds: float,
        retry_seconds: float,
        is_probed: bool = False,
        away: "WeakSet[Guard] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin closed; `is_probed` says that somebody calls `recover` when the daemon answers again.

        `away` holds the guards whose daemon does not answer, as returned by `outages.of`; only the first of them logs
        the outage.
        """
        self.deadline_seconds = deadline_seconds
        self.counts = GuardCounts()
        self._retry_seconds = retry_seconds
        self._is_probed = is_probed
        self._clock = clock
        self._retry_at: float | None = None
        self._away: WeakSet[Guard] = WeakSet() if away is None else away
        self._is_away = False
        self._refusals: dict[str, str] = {}
        self._faulty: set[str] = set()

    def __repr__(self) -> str:
        """Show life: whether calls are made."""
        state = "open" if self.is_open else "closed"
        return f"<Guard {state}, {self.counts.calls} calls, {self.counts.skipped} skipped>"

    @property
    def is_open(self) -> bool:
        """Whether calls give their default at once."""
        return self._retry_at is not None

    def call(self, function: Callable[[], T], default: D, what: str) -> T | D:
        """Make a control call; give the default if it is not made, not answered or refused. Never raises an Exception.

        The function must end by its deadline, as a client's calls do. `what` names the call in the log.
        """
        if self._retry_at is not None and not self._may_try():
            self.counts.skipped += 1
            return default
        self.counts.calls += 1
        started_at = self._clock()
        try:
            answer = function()
        except KVLeaseError as error:
            self._heard(what, error)
            return default
        except Exception as error:  # noqa: BLE001 - nothing may reach the engine
            self._fault(what, error)
            return default
        self.recover()
        self._refusals.pop(what, None)
        if self._clock() - started_at > self.deadline_seconds:
            self.counts.late += 1
        return answer

    def shield(self, function: Callable[[], T], default: D, what: str) -> T | D:
        """Run a hook's code that makes no call; give the default if it fails. Never raises an Exception."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - nothing may reach the engine
            self._fault(what, error)
            return default

    def refusal(self, what: str) -> str:
        """Return the error code if the last answer to calls named `what` was a refusal; otherwise an empty text."""
        return self._refusals.get(what, "")

    def trip(self, why: str) -> None:
        """Open the breaker; log it once for all guards of the same outage."""
        if self._retry_at is None:
            self.counts.opened += 1
        if self.begin_outage():
            _logger.warning(
                "The kvlease daemon does not answer (%s); the engine goes on without cache, and the daemon is "
                "tried again every %g s. Check that kvleased is running, and that `socket` is its address.",
                why,
                self._retry_seconds,
                extra={"action": "breaker_open"},
            )
        self._retry_at = self._clock() + self._retry_seconds

    def recover(self) -> None:
        """Close the breaker, because the daemon has answered."""
        self._retry_at = None
        self.end_outage()

    @property
    def is_away(self) -> bool:
        """Whether the daemon has not answered since an outage began."""
        return self._is_away

    def end_outage(self) -> None:
        """Note that the daemon answers, even with a refusal; the last guard that had found it away logs it."""
        if not self._is_away:
            return
        self._is_away = False
        self._away.discard(self)
        if not self._away:
            _logger.warning("The kvlease daemon answers again.", extra={"action": "breaker_closed"})

    def leave(self) -> None:
        """Leave the outage without an answer, because the session has ended."""
        self._is_away = False
        self._away.discard(self)

    def begin_outage(self) -> bool:
        """Note that the daemon does not answer; return whether nobody has logged it yet."""
        is_first = not self._away and not self._is_away
        self._is_away = True
        self._away.add(self)
        return is_first

    def _may_try(self) -> bool:
        """Tell whether this call is the one that tries whether the daemon is back."""
        assert self._retry_at is not None, "only an open breaker has to be tried"
        now = self._clock()
        if self._is_probed or now < self._retry_at:
            return False
        self._retry_at = now + self._retry_seconds
        return True

    def _heard(self, what: str, error: KVLeaseError) -> None:
        if isinstance(error, StartingError) or not isinstance(error, ANSWERS):
            self.counts.unanswered += 1
            self.trip(f"{what}: {error.message}")
            return
        self.counts.refused += 1
        self.recover()
        if self._refusals.get(what) != error.code:
            self._refusals[what] = error.code
            _logger.warning(
                "The kvlease daemon refuses %s: %s",
                what,
                error.message,
                extra={"action": "refused", "code": error.code},
            )

    def _fault(self, what: str, error: Exception) -> None:
        self.counts.faults += 1
        if what not in self._faulty:
            self._faulty.add(what)
            _logger.error(
                "An error of kvlease in %s was kept from the engine; please report it.",
                what,
                exc_info=error,
                extra={"action": "fault"},
            )
