"""Own the thread in which a remote store's calls run, so that nobody waits for a call longer than its deadline."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from kvleased.movers.remote.store import RemoteError, RemoteStore, no_answer
from kvleased.telemetry import logs

STUCK_SECONDS_MAX: Final = 30.0
"""Seconds after which a call that does not end costs its process."""

Result = TypeVar("Result")
_Job = Callable[[RemoteStore], object]


class StuckError(Exception):
    """A call of the store's library does not end, and only a new process helps."""


class Bounded:
    """Have one store carry out calls in a thread of its own, one at a time.

    A call that exceeds its deadline is cut off, and its result, if one still comes, is thrown away. Until that call has
    ended, every other call is refused at once.
    """

    def __init__(
        self, open_store: Callable[[], RemoteStore], stuck_seconds_max: float = STUCK_SECONDS_MAX
    ) -> None:
        """Assign; the thread starts, and the store is opened, at the first call."""
        self._open_store = open_store
        self._stuck_seconds_max = stuck_seconds_max
        self._store: RemoteStore | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck_since: float | None = None

    def __repr__(self) -> str:
        """Show whether a call is stuck."""
        return f"<Bounded {'stuck' if self.is_stuck else 'ready'}>"

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was given up has not ended yet."""
        if self._stuck_since is not None:
            try:
                self._results.get_nowait()
            except queue.Empty:
                return True
            self._stuck_since = None
        return False

    def check(self) -> None:
        """Check that no call hangs for good.

        Raises:
            StuckError: a call does.
        """
        if self.is_stuck and self._stuck_since is not None:
            seconds = time.monotonic() - self._stuck_since
            if seconds > self._stuck_seconds_max:
                raise StuckError(f"a call to the store has not returned for {seconds:.0f} s")

    def call(self, act: Callable[[RemoteStore], Result], seconds: float) -> Result:
        """Return what the store answers.

        Raises:
            RemoteError: the call failed or took too long, or an earlier call that took too long has not ended yet.
        """
        if self.is_stuck:
            raise RemoteError(
                "an earlier call that took too long has not returned yet; check the server of remote_url",
                is_timeout=True,
            )
        if self._thread is None:
            # The thread of a library that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="remote-store", daemon=True)
            self._thread.start()
        self._jobs.put(act)
        try:
            result = self._results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self._stuck_since = time.monotonic()
            if self._store is None:
                raise no_answer(seconds) from None
            advice = self._store.advice
            self._store.cut()
            raise no_answer(seconds, advice) from None
        if isinstance(result, RemoteError):
            raise result
        return result  # type: ignore[return-value]  # what `act` returned

    def close(self) -> None:
        """Have the store closed, once its current call has ended."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (act := self._jobs.get()) is not None:
            self._results.put(self._result(act))
        if self._store is not None:
            self._store.close()

    def _result(self, act: _Job) -> object:
        try:
            if self._store is None:
                self._store = self._open_store()
            return act(self._store)
        except RemoteError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a library may raise anything at what a stranger's server says
            logs.line("warning", "remote_store_failed_oddly", error=type(error).__name__)
            return RemoteError(
                f"its answer could not be understood ({type(error).__name__}); check that remote_url names such a store"
            )
