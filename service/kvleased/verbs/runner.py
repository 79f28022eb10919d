"""Own what the verbs need of the daemon; how it does that is the daemon's business."""

from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import Message

from kvleased.access.callers import Caller
from kvleased.core.commands import Command
from kvleased.idempotency import Answer
from kvleased.registry import CacheEntry

Verb = Callable[[Any, Caller], Answer]
"""One verb; each takes its own kind of request."""

Respond = Callable[[Any], Message]
"""How a reply of the core becomes a response; each takes its own kind of reply."""


class Runner(Protocol):
    """Hand commands to a core and carry out what they lead to."""

    def run(
        self, entry: CacheEntry, command: Command, respond: Respond, wait_ms: int = 0
    ) -> Answer:
        """Return the response, or the promise of one where the core has the caller wait.

        Raises:
            KVLeaseError: the core refuses.
        """
        ...

    def settle(self) -> None:
        """Carry out what the last response left to be done; `run` outside of a call must be followed by it."""
        ...

    def apply(self, entry: CacheEntry, command: Command) -> object:
        """Return the core's reply to a command that never waits."""
        ...
