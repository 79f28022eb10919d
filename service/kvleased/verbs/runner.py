"""Own the interface of the daemon that the verbs use."""

from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import Message

from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry
from kvleased.calls.idempotency import Answer
from kvleased.core.commands import Command

Verb = Callable[[Any, Caller], Answer]
"""A verb; each takes its own kind of request."""

Respond = Callable[[Any], Message]
"""Turns a reply of the core into a response; each takes its own kind of reply."""


class Runner(Protocol):
    """Gives commands to a core, and carries out what they lead to."""

    def run(
        self, entry: CacheEntry, command: Command, respond: Respond, wait_ms: int = 0
    ) -> Answer:
        """Return the response, or a future of it if the core makes the caller wait.

        Raises:
            KVLeaseError: the core refuses.
        """
        ...

    def settle(self) -> None:
        """Carry out what the last response left to be done; call this after each `run` outside of a call."""
        ...

    def apply(self, entry: CacheEntry, command: Command) -> object:
        """Return the core's reply to a command that never waits."""
        ...
