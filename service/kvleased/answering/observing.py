"""Own when the notes of requests are worked on: never before the caller has its answer."""

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic
from typing import TYPE_CHECKING, Final

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, NotYoursError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry
from kvleased.caches.registry import Registry
from kvleased.core.commands import Command
from kvleased.verbs.runner import Respond

if TYPE_CHECKING:
    from kvleased.traces.recording import Observer

_GHOST_SECONDS: Final = 0.002
"""Seconds that all ghosts may work in one go; calls wait meanwhile."""
_PAUSE_SECONDS: Final = 0.008
"""Seconds from the end of the ghosts' work to its next beginning."""


class Observing:
    """The traces of all caches, and the turns of their ghosts."""

    def __init__(self, registry: Registry) -> None:
        """Take the caches that are observed."""
        self._registry = registry
        registry.on_drop.append(_end_recordings)
        self._at_work: asyncio.TimerHandle | None = None

    def trace(
        self, request: pb.TraceRequest, caller: Caller
    ) -> AsyncGenerator[pb.TraceResponse, None]:
        """Return the requests of a cache as their leases end, until the cache is deleted.

        Raises:
            NotYoursError: a worker asks.
            UnknownCacheError: there is no such cache, or it was deleted.
            BusyError: there are too many recordings.
        """
        if caller.token:
            message = (
                "a trace has the requests of all workers; send a reader's or an operator's token, or none over a Unix "
                "socket"
            )
            raise NotYoursError(message, resource="token")
        return self._registry.cache(request.cache).observed().record(monotonic())

    def tick(self) -> None:
        """Note the leases that have ended without a call, and let the ghosts work."""
        for entry in self._registry:
            if entry.observer is not None:
                entry.observer.tick()
        if self._at_work is None:
            self._work()

    def stop(self) -> None:
        """Stop the ghosts' work."""
        if self._at_work is not None:
            self._at_work.cancel()

    def _work(self) -> None:
        """Have the ghosts that are behind replay keys, a little at a time."""
        self._at_work = None
        ghosts = (entry.ghosts for entry in self._registry)
        behind = [one for one in ghosts if one is not None and one.is_behind]
        for one in behind:
            one.work(_GHOST_SECONDS / len(behind))
        if behind:
            self._at_work = asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._work)


def _end_recordings(entry: CacheEntry, error: KVLeaseError) -> None:
    """End the recordings of a cache that was deleted."""
    if entry.observer is not None:
        entry.observer.close(error)


def noted(observer: "Observer", command: Command, respond: Respond) -> Respond:
    """Return a function that makes the response to a command, and has the observer note the reply."""

    def note(reply: object) -> Message:
        observer.saw(command, reply, monotonic())
        return respond(reply)

    return note
