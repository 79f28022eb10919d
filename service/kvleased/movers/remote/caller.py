"""Own when a remote store is called and what is reported of it; `copies` knows what it is called for."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from kvleased.movers.protocol import Status
from kvleased.movers.remote.bounded import Bounded
from kvleased.movers.remote.breaker import Breaker
from kvleased.movers.remote.store import RemoteError, RemoteStore
from kvleased.telemetry import logs

IDLE_SECONDS: Final = 5.0
"""Seconds without a call after which a store is asked whether it is there."""
_FAILED_SECONDS: Final = 0.25
"""The same after a failed call, so that a dead store is noticed before the next request needs it."""

Result = TypeVar("Result")


class RemoteCaller:
    """Call a store within time budgets and behind a breaker, and tell the daemon when the breaker opens or closes."""

    def __init__(
        self,
        store: Bounded,
        tell: Callable[[Status], None],
        *,
        seconds_max: float,
        breaker: Breaker,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Assign; the store is not called yet."""
        self._store = store
        self._tell = tell
        self._seconds_max = seconds_max
        self._breaker = breaker
        self._idle_seconds = idle_seconds
        self._called_at: float | None = None
        self._said: Status | None = None

    def __repr__(self) -> str:
        """Show the breaker and the store."""
        return f"<RemoteCaller {self._breaker!r}, {self._store!r}>"

    @property
    def seconds_to_ping(self) -> float:
        """Seconds until the store should be asked whether it is there, if no other call comes first."""
        now = time.monotonic()
        if not self._breaker.is_closed:
            return self._breaker.seconds_to_trial(now)
        if self._called_at is None:
            return 0.0
        pause = _FAILED_SECONDS if self._breaker.num_failures else self._idle_seconds
        return max(0.0, self._called_at + pause - now)

    def call(
        self, act: Callable[[RemoteStore], Result], seconds: float, *, is_whole_budget: bool = True
    ) -> Result:
        """Return what the store answers.

        A forbidden call opens the breaker, and so does a call that had its whole budget and was not answered.

        Raises:
            RemoteError: the store did not answer as it should, or is left alone at present.
        """
        if not self._breaker.is_closed:
            raise RemoteError("it is not being called for a while, because calls to it have failed")
        return self._try(act, seconds, is_whole_budget=is_whole_budget)

    def ping(self) -> None:
        """Ask the store whether it is there; if the breaker is open, this is its trial."""
        try:
            self._try(lambda store: store.ping(), self._seconds_max, is_whole_budget=True)
        except RemoteError:
            # The breaker has counted the failure.
            return

    def check(self) -> None:
        """Check that no call hangs for good.

        Raises:
            StuckError: a call does.
        """
        self._store.check()

    def _try(
        self, act: Callable[[RemoteStore], Result], seconds: float, *, is_whole_budget: bool
    ) -> Result:
        try:
            result = self._store.call(act, seconds)
        except RemoteError as error:
            # A forbidden call fails next time, too, but successes of other calls would hide that.
            is_grave = error.is_forbidden or (error.is_timeout and is_whole_budget)
            self._breaker.fail(time.monotonic(), is_grave=is_grave)
            if not self._breaker.is_closed:
                self._say(is_on=False, reason=str(error))
            raise
        else:
            self._breaker.succeed()
            self._say(is_on=True)
            return result
        finally:
            self._called_at = time.monotonic()

    def _say(self, *, is_on: bool, reason: str = "") -> None:
        """Report a changed status or reason: a first trial that was only slow may hide a wrong password."""
        status = Status(is_on=is_on, reason=reason)
        if status == self._said:
            return
        self._said = status
        if is_on:
            logs.line("info", "remote_store_on")
        else:
            logs.line("warning", "remote_store_off", reason=reason)
        self._tell(status)
