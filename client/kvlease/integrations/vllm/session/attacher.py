"""Own how a session gets its attachment, at first and after a loss: a thread that registers, attaches and probes.

The thread does everything that may take long, so that no hook has to; between two tries it maps memory ahead. It hands
over a new attachment by leaving it in `found`. The session's owner picks it up when it polls, so nothing changes while
the owner works.
"""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Final

from kvlease.client import Client
from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    LayoutMismatchError,
    NeverFitsError,
    NotYoursError,
    RefusedError,
    StaleError,
    StartingError,
    UnknownCacheError,
)
from kvlease.integrations.vllm.mapping import mapped_ahead
from kvlease.integrations.vllm.session.attachment import Attachment, attach
from kvlease.integrations.vllm.session.guard import ANSWERS, Guard
from kvlease.integrations.vllm.session.sayings import Sayings
from kvlease.integrations.vllm.session.terms import Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.memory.mapped import Identity as MemoryIdentity
from kvlease.units import show_bytes

_logger: Final = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.05
_STARTING_PAUSE_SECONDS: Final = 0.2
"""Seconds between tries, at most, while the daemon makes the cache's memory."""
_DOUBLINGS_MAX: Final = 20
_LASTING: Final = (InvalidError, LayoutMismatchError, NeverFitsError)
"""Refusals that stay as they are until the engine's or the daemon's settings change, or an operator deletes a cache."""
_ENDED: Final = "the daemon has lost the memory of this engine's cache"


class Attacher:
    """The background thread of one session: it seeks an attachment while there is none, and probes the current one."""

    def __init__(
        self, settings: ConnectorSettings, terms: Terms, guard: Guard, sayings: Sayings
    ) -> None:
        """Remember how to attach; `start` begins."""
        self.found: Attachment | None = None
        """A new attachment that the owner has not taken yet."""
        self.refusal = ""
        """Why there is no attachment; empty if there is one."""
        self.is_starting = False
        """Whether the daemon is making the cache's memory."""
        self.is_refused_for_good = False
        """Whether the last refusal is one that no wait helps against."""
        self.is_gone = False
        """Whether the last attached cache has ended with its memory; another cache may now have its name."""
        self.stop = threading.Event()
        self.changed = threading.Event()
        """Set after every try."""
        self._settings = settings
        self._terms = terms
        self._guard = guard
        self._sayings = sayings
        self._name = settings.cache or terms.cache
        self.kept: MemoryIdentity = ()
        """The memory that the engine's cache lies in, if it can be no other: then no other memory is accepted."""
        self._wake = threading.Event()
        self._current: Attachment | None = None
        self._is_seeking = True
        self._is_abandoned = False
        self._num_failures = 0
        self._had = terms.had
        self._lost: list[Attachment] = []
        self._mapping: Iterator[int] = iter(())
        self._thread = threading.Thread(target=self._run, name="kvlease-vllm", daemon=True)

    def start(self) -> None:
        """Begin to seek."""
        self._thread.start()

    def wait(self) -> None:
        """Wait for the first attachment, as long as the settings allow and a wait may help."""
        started_at = time.monotonic()
        while self.found is None and not self.is_refused_for_good:
            most = self._settings.start_seconds
            if self.is_starting:
                most = max(most, self._settings.populate_seconds)
            left = started_at + most - time.monotonic()
            if left <= 0:
                break
            self.changed.wait(left)
            self.changed.clear()

    def take(self) -> Attachment | None:
        """Return the attachment that was found since the last call, or None."""
        found, self.found = self.found, None
        return found

    def has(self, attachment: Attachment) -> bool:
        """Tell whether an attachment is still current; it is not once a probe has found it lost."""
        return attachment is self._current

    def seek(self, lost: Attachment) -> None:
        """End an attachment that is of no more use, and seek another."""
        if lost is self._current:
            self._current = None
            self._lost.append(lost)
            self._is_seeking = True
            self._wake.set()

    def abandon(self) -> None:
        """End the thread, which then ends the attachment, because the session was dropped without being closed."""
        self._is_abandoned = True
        self.stop.set()
        self._wake.set()

    def close(self, seconds: float) -> None:
        """End the thread, and any attachment that nobody took."""
        self.stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        found = self.take()
        for unused in [*self._lost, *([] if found is None else [found])]:
            unused.worker.close()

    def _run(self) -> None:
        while not self.stop.is_set():
            while self._lost:
                self._mapping = iter(())
                self._lost.pop().worker.close()
            if self._is_seeking:
                self._seek()
            elif (current := self._current) is not None:
                self._probe(current)
            self.changed.set()
            if not self._lost:
                self._rest()
        # A close that did not wait long enough leaves an attachment that nobody has.
        found = self._current if self._is_abandoned else self.take()
        if found is not None:
            found.worker.close()

    def _rest(self) -> None:
        """Wait until the next try is due or somebody needs the thread, and map memory meanwhile."""
        ends_at = time.monotonic() + self._pause_seconds()
        while not self._wake.is_set() and time.monotonic() < ends_at:
            if next(self._mapping, None) is None:
                break
        self._wake.wait(max(0, ends_at - time.monotonic()))
        self._wake.clear()

    def _pause_seconds(self) -> float:
        """Return how long to wait before the next try: longer after each failure, or `retry_seconds` before a probe."""
        if not self._is_seeking:
            return self._settings.retry_seconds
        least = _FIRST_PAUSE_SECONDS * (1 << min(self._num_failures, _DOUBLINGS_MAX))
        most = _STARTING_PAUSE_SECONDS if self.is_starting else self._settings.retry_seconds
        return min(least, most)

    def _seek(self) -> None:
        started_at = time.monotonic()
        try:
            attachment = attach(self._settings, self._terms)
        except KVLeaseError as error:
            is_answer = isinstance(error, ANSWERS) and not isinstance(error, StartingError)
            is_end = is_answer and self._sees_end()
            if is_end and self.kept:
                self._give_up()
            else:
                self._refused(error, time.monotonic() - started_at)
                self.is_gone = self.is_gone or is_end
        except Exception as error:  # noqa: BLE001 - a thread that ends silently would never attach again
            self._refused(KVLeaseError(f"{type(error).__name__}: {error}"), 0)
        else:
            if self.kept in {(), attachment.memory}:
                self._attached(attachment)
            else:
                attachment.worker.close()
                self._give_up()

    def _attached(self, attachment: Attachment) -> None:
        """Hand over an attachment, and log it."""
        self.refusal, self.is_starting, self.is_gone, self._is_seeking = "", False, False, False
        self.is_refused_for_good = False
        self._had = attachment.plan
        self._num_failures = 0
        self._guard.recover()
        self._sayings.forget()
        self._current = self.found = attachment
        if self._terms.touches:
            self._mapping = _mapping_of(attachment)
        _logger.info(
            "Attached to the kvlease daemon as worker %d of cache %s, rank %d: %d blocks of %d tokens, %s.",
            attachment.worker.worker_id,
            self._name,
            self._terms.rank,
            attachment.plan.num_blocks,
            attachment.plan.tokens_per_block,
            show_bytes(attachment.plan.device_bytes),
            extra={"action": "attached"},
        )

    def _give_up(self) -> None:
        """Stop seeking: the daemon has lost the kept memory. The session's owner logs it in its own words."""
        self.refusal, self.is_starting, self.is_gone, self._is_seeking = _ENDED, False, True, False
        self._guard.recover()

    def _sees_end(self) -> bool:
        """Ask a daemon that refused to attach us whether it has lost the cache that we had."""
        if self._had is None:
            return False
        deadline_seconds = self._settings.deadline_seconds
        try:
            with Client(
                self._settings.address, deadline_seconds=deadline_seconds, on_doubt="raise"
            ) as client:
                return client.get_cache(self._name).plan != self._had
        except UnknownCacheError:
            return True
        except KVLeaseError:
            return False

    def _refused(self, error: KVLeaseError, seconds: float) -> None:
        """Note why there is no attachment, and log it if the reason is new."""
        self._num_failures += 1
        self.is_starting = isinstance(error, StartingError)
        self.is_refused_for_good = isinstance(error, _LASTING)
        was_away = self._guard.is_away
        if isinstance(error, ANSWERS) and not self.is_starting:
            self._guard.end_outage()
        refusal = f"{error.code}: {error.message}"
        is_new = refusal.partition(":")[0] != self.refusal.partition(":")[0]
        self.refusal = refusal
        if not is_new or self.is_starting:
            return
        is_answer = isinstance(error, ANSWERS)
        if not (self._sayings.note(refusal) if is_answer else self._guard.begin_outage()):
            # Another session of this process has logged it.
            return
        level = logging.WARNING
        if isinstance(error, LayoutMismatchError | InvalidError):
            level = logging.ERROR
        elif was_away and isinstance(error, StaleError):
            # The outage was logged already: its cache will be made anew in a moment, by whoever makes it.
            level = logging.INFO
        _logger.log(
            level,
            "No kvlease cache for this engine, which goes on without one; attaching is tried again %s. %s",
            self._tries,
            error.message,
            extra={"action": "attach", "code": error.code, "seconds": round(seconds, 3)},
        )

    @property
    def _tries(self) -> str:
        """When attaching is tried again, in words."""
        if self._terms.ends_with_start and self._had is None:
            if self.is_refused_for_good:
                return "at the engine's next start"
            return (
                f"for up to {self._settings.start_seconds:g} s, and then at the engine's next start"
            )
        return f"every {self._settings.retry_seconds:g} s"

    def _probe(self, current: Attachment) -> None:
        """Check whether the daemon answers and still knows us; if it can, the worker attaches again by itself."""
        try:
            current.worker.heartbeat()
        except (InvalidError, NotYoursError, RefusedError) as error:
            # For example, the daemon has lost the cache, and this worker cannot have it made anew.
            if not isinstance(error, StartingError) and self._sees_end():
                self.is_gone = True
                self.seek(current)
        except StaleError as error:
            level = logging.INFO if self._guard.is_away else logging.WARNING
            _logger.log(level, "The kvlease daemon has lost this engine's cache: %s", error.message)
            self.seek(current)
        except KVLeaseError as error:
            self._guard.trip(f"probe: {error.message}")
        else:
            if current.is_elsewhere:
                self.seek(current)
            else:
                self._guard.recover()


def _mapping_of(attachment: Attachment) -> Iterator[int]:
    """Return the iterator that maps an attachment's device memory ahead."""
    region = attachment.device
    for kind, device, inode in attachment.memory:
        if kind == "device" and region is not None:
            return mapped_ahead(region, (device, inode))
    return iter(())
