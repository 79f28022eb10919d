"""Own the end of silent workers that have no leases and whose death cannot be proven, or that have never called.

A silent worker with a lease is kept for ever: time proves nothing, and it may still write to its blocks. One that has
not called since it attached holds nothing: its caller may have gone before it learnt that it attached.
"""

import asyncio
from collections.abc import Callable

import structlog

from kvleased.caches.entries import WorkerEntry
from kvleased.caches.registry import Registry
from kvleased.config.settings import Settings

_LOG = structlog.get_logger()


class SilentWorkers:
    """Looks for such workers once in a heartbeat, from `start` to `stop`."""

    def __init__(
        self, registry: Registry, settings: Settings, end: Callable[[WorkerEntry], object]
    ) -> None:
        """Take the registry, the settings, and the function that ends a worker."""
        self._registry = registry
        self._look_seconds = settings.heartbeat_seconds
        self._silent_seconds_max = settings.lease_seconds
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = 0.0

    def start(self) -> None:
        """Begin to look."""
        loop = asyncio.get_running_loop()
        self._looked_at = loop.time()
        self._timer = loop.call_later(self._look_seconds, self._look_again)

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self, now: float) -> None:
        """End the workers that were silent for `lease_seconds`; `now` is in seconds of the loop's clock.

        After a pause of this process no worker counts as silent: its calls may still be unread.
        """
        has_paused = now - self._looked_at > 2 * self._look_seconds
        self._looked_at = now
        workers = self._registry.by_id.values()
        for worker in [one for one in workers if one.pidfd is None or not one.has_called]:
            if worker.is_heard or has_paused:
                # At the first look a worker was heard because it attached.
                worker.has_called |= worker.is_heard and worker.heard_at > 0
                worker.is_heard, worker.heard_at = False, now
            elif now - worker.heard_at >= self._silent_seconds_max:
                self._consider(worker)

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._look_seconds, self._look_again)
        self.look(loop.time())

    def _consider(self, worker: WorkerEntry) -> None:
        """End a silent worker that neither has a lease nor waits for one."""
        if worker.entry.core.is_idle(worker.worker_id):
            _LOG.info("worker_silent", **worker.told)
            self._end(worker)
