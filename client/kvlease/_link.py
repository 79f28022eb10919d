"""Own how the calls of one caller go out, and whether the last ones arrived; what is leased is the session's."""

import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.message import Message

from kvlease.errors import InvalidError, UnknownWorkerError
from kvlease.tracing import Traceparent

RESTART_SECONDS: Final = 2.0
"""Seconds that a first call waits for a daemon whose socket is there; a control process starts in one."""


@dataclass(slots=True, kw_only=True)
class Link:
    """How the calls of one caller go out, and whether the last ones arrived."""

    deadline_seconds: float
    clock: Callable[[], float] = time.monotonic
    token: str = ""
    epoch: int = 0
    socket_path: str = ""
    """The daemon's Unix socket, where the calls go there."""
    is_reached: bool = False
    """Whether the daemon was there lately; where it was not, a call tries once and does not wait for it."""
    patience_ends_at: float | None = None
    """Monotonic seconds until which calls wait for a daemon that was never reached; None before the first failure."""
    is_detached: bool = False
    """Whether the caller has said that it is done; then nothing attaches again, and no call goes out."""
    has_ended: bool = False
    """Whether the daemon, too, knows that it is done."""
    registrations: dict[str, Message] = field(default_factory=dict)
    """What caches were registered by, by name: workers that attach next can do it again."""
    traceparent: Traceparent | None = None
    """What tells the span that calls are made in; None where nothing is traced."""
    process_id: int = field(default_factory=os.getpid)
    _key_prefix: str = field(default_factory=lambda: os.urandom(8).hex())
    _key_numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def fresh_key(self) -> str:
        """Return an idempotency key that was never used."""
        return f"{self._key_prefix}-{next(self._key_numbers)}"

    @property
    def is_forked(self) -> bool:
        """Whether this is another process than the one that opened the link."""
        return os.getpid() != self.process_id

    def check_process(self) -> None:
        """Refuse to go on in a forked child, whose death would not end the parent's leases.

        Raises:
            InvalidError: this is such a child.
        """
        if os.getpid() != self.process_id:
            message = f"this session belongs to process {self.process_id}; a forked child must open and attach its own"
            raise InvalidError(message, resource="process")

    def check_attached(self) -> None:
        """Refuse to call for a worker that was closed.

        Raises:
            UnknownWorkerError: it was.
        """
        if self.is_detached:
            raise UnknownWorkerError("this worker was closed; attach another")

    def is_worth_waiting(self) -> bool:
        """Tell whether a daemon that cannot be reached may be back soon.

        One that was there lately may; so may one that was never reached but has left its socket, for a moment: its
        control process may just be starting again.
        """
        if self.is_reached:
            return True
        if self.patience_ends_at is None:
            if not Path(self.socket_path).is_socket():
                return False
            self.patience_ends_at = self.clock() + RESTART_SECONDS
        return self.clock() < self.patience_ends_at

    def give_up(self) -> None:
        """Note that the daemon was waited for in vain, so that the next calls do not wait."""
        self.is_reached, self.patience_ends_at = False, self.clock()

    def jitter(self) -> float:
        """Return a factor that keeps callers who failed together from coming back together."""
        return random.uniform(0.5, 1)  # noqa: S311 - no secret
