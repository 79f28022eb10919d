"""Own how one caller's calls are sent, and whether the last ones arrived; leases are the session's business."""

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.message import Message

from kvlease.errors import InvalidError, NotYoursError, RefusedError, UnknownWorkerError
from kvlease.wire.traceparent import Traceparent

RESTART_SECONDS: Final = 2.0
"""Seconds that a first call waits for a daemon whose socket exists; a control process starts within one second."""


@dataclass(slots=True, kw_only=True)
class Link:
    """How one caller's calls are sent, and whether the last ones arrived."""

    deadline_seconds: float
    clock: Callable[[], float] = time.monotonic
    token: str = ""
    epoch: int = 0
    socket_path: str = ""
    """The daemon's Unix socket, if the calls go there."""
    is_reached: bool = False
    """Whether the daemon was reached lately; if not, a call tries once and does not wait for the daemon."""
    patience_ends_at: float | None = None
    """Monotonic seconds until which calls wait for a daemon that was never reached; None before the first failure."""
    is_detached: bool = False
    """Whether the caller has begun to detach; then nothing attaches again, and no other call is sent."""
    has_ended: bool = False
    """Whether the daemon, too, knows that the caller is done."""
    registrations: dict[str, Message] = field(default_factory=dict)
    """The requests that registered caches, by name: workers that attach later can send them again."""
    traceparent: Traceparent | None = None
    """A function that returns the span of the calls; None if nothing is traced."""
    process_id: int = field(default_factory=os.getpid)
    _key_prefix: str = field(default_factory=lambda: os.urandom(8).hex())
    _key_numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def fresh_key(self) -> str:
        """Return an idempotency key that was never used."""
        return f"{self._key_prefix}-{next(self._key_numbers)}"

    @contextmanager
    def deleting(self, cache: str) -> Iterator[None]:
        """Forget how a cache was registered, unless its delete is refused and the cache is still there."""
        is_there = False
        try:
            yield
        except (InvalidError, NotYoursError, RefusedError):
            is_there = True
            raise
        finally:
            # Any other error leaves open whether the cache is gone, or says that it is.
            if not is_there:
                self.registrations.pop(cache, None)

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that opened the link."""
        return os.getpid() != self.process_id

    def check_process(self) -> None:
        """Refuse to go on in a forked child, whose death would not end the parent's leases.

        Raises:
            InvalidError: this process is a forked child.
        """
        if os.getpid() != self.process_id:
            message = f"this session belongs to process {self.process_id}; a forked child must open and attach its own"
            raise InvalidError(message, resource="process")

    def check_attached(self) -> None:
        """Refuse calls of a worker that was closed.

        Raises:
            UnknownWorkerError: the worker was closed.
        """
        if self.is_detached:
            raise UnknownWorkerError("this worker was closed; attach another")

    def is_worth_waiting(self) -> bool:
        """Tell whether a daemon that cannot be reached may be back soon.

        A daemon that was reached lately may be. So may one that was never reached, if its socket exists, but only for a
        moment: its control process may just be restarting.
        """
        if self.is_reached:
            return True
        if self.patience_ends_at is None:
            try:
                is_there = Path(self.socket_path).is_socket()
            except OSError:  # in a directory of another user's, or at no possible path
                is_there = False
            if not is_there:
                return False
            self.patience_ends_at = self.clock() + RESTART_SECONDS
        return self.clock() < self.patience_ends_at

    def give_up(self) -> None:
        """Note that waiting for the daemon was in vain, so that the next calls do not wait."""
        self.is_reached, self.patience_ends_at = False, self.clock()

    def jitter(self) -> float:
        """Return a random factor for pauses, so that callers that failed together do not come back together."""
        return random.uniform(0.5, 1)  # noqa: S311 - no secret
