"""Own the caches and workers, by each of their names and ids; what happens to their blocks is the core's business."""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from kvlease.errors import BusyError, InvalidError, UnknownCacheError, UnknownWorkerError
from kvlease.ids import CACHE_CHARACTERS_MAX, EPOCH_SHIFT, WorkerId
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.caches.worker_allowances import WorkerAllowances
from kvleased.memory.shortages import MemoryShortages

TENANT_DEFAULT: Final = "default"
_NAMES_MAX: Final = 8
"""Names in a message."""


class Registry:
    """All caches and workers."""

    def __init__(self, epoch: int, *, max_caches: int, max_workers: int) -> None:
        """Start empty; ids of this life start above those of all earlier ones."""
        self.caches: dict[str, CacheEntry] = {}
        self.by_pool: dict[int, CacheEntry] = {}
        self.by_token: dict[str, WorkerEntry] = {}
        self.by_id: dict[WorkerId, WorkerEntry] = {}
        self.known_tenants: dict[int, str] = {}
        """The names of the default tenant and of those that have settings, by digest."""
        self.allowances = WorkerAllowances({}, max_workers)
        """How many workers there may be, in all and of each tenant."""
        self.revisions: dict[int, int] = {}
        """The revisions of the tenants' limits that calls have set, by tenant digest."""
        self.memory_shortages = MemoryShortages()
        """The caches whose memory could not be had."""
        self.bytes_coming = 0
        """Bytes of the pools of a cache that is being made, so that no other takes their room."""
        self.is_draining = False
        """Whether an operator has drained the daemon with all of its caches."""
        self.is_stopping = False
        """Whether the daemon was told to stop."""
        self.on_drop: list[Callable[[CacheEntry, UnknownCacheError], None]] = []
        """Called with a cache that was just forgotten, to end with that error what goes on in it."""
        self._max_caches = max_caches
        self._next_worker_id = (epoch << EPOCH_SHIFT) + 1
        self._next_pool = 1

    def __repr__(self) -> str:
        """Show life: how many there are."""
        return f"<Registry {len(self.caches)} caches, {len(self.by_id)} workers>"

    def __iter__(self) -> Iterator[CacheEntry]:
        """Iterate over the caches by name."""
        return iter([self.caches[name] for name in sorted(self.caches)])

    @property
    def bytes_in_use(self) -> int:
        """Bytes that the pools of all caches take of the memory that this daemon may use."""
        return self.bytes_coming + sum(entry.bytes_in_use for entry in self)

    @property
    def num_leases(self) -> int:
        """Leases of all caches."""
        return sum(entry.core.census().num_leases for entry in self)

    def cache(self, name: str) -> CacheEntry:
        """Return the cache of a name.

        Raises:
            UnknownCacheError: there is none.
        """
        entry = self.caches.get(name)
        if entry is None:
            if len(name) > CACHE_CHARACTERS_MAX:
                raise UnknownCacheError.of_long_name(name, CACHE_CHARACTERS_MAX)
            why = self.memory_shortages.told(name)
            todo = "register it first" if name else "say which one is meant"
            message = f"there is no cache {name[:63]!r}; {why or todo}"
            raise UnknownCacheError(message, resource="cache")
        return entry

    def worker(self, token: str) -> WorkerEntry:
        """Return the worker of a token.

        Raises:
            UnknownWorkerError: there is none; the token is not repeated.
        """
        worker = self.by_token.get(token)
        if worker is None:
            raise UnknownWorkerError(resource="token")
        worker.is_heard = True
        return worker

    def cache_of(self, caller: Caller) -> CacheEntry:
        """Return the cache that a call is about: the worker's own, else the one that is named, else the only one.

        Raises:
            InvalidError: there are several caches, and the caller names none.
            UnknownCacheError: there is no such cache, or none at all.
        """
        if caller.token:
            return self.worker(caller.token).entry
        if caller.cache:
            return self.cache(caller.cache)
        if len(self.caches) > 1:
            message = f"no cache is named; name one of {', '.join(sorted(self.caches))}"
            raise InvalidError(message, resource="cache")
        if not self.caches:
            message = "there is no cache yet; register one first"
            raise UnknownCacheError(message, resource="cache")
        return next(iter(self.caches.values()))

    def tenant_names(self) -> dict[int, str]:
        """Return the names of the default tenant and of those that have settings or a worker, by digest."""
        attached = {one.tenant_digest: one.tenant for one in self.by_id.values()}
        return self.known_tenants | attached

    def take_pool_number(self) -> int:
        """Return a number for a cache's pools that this life has not given before."""
        self._next_pool += 1
        return self._next_pool - 1

    def require_room_for_cache(self) -> None:
        """Refuse one cache too many."""
        if len(self.caches) >= self._max_caches:
            idle = [name for name, entry in self.caches.items() if not entry.num_workers]
            message = (
                f"there are {len(self.caches)} caches already, as many as max_caches allows; raise it, or delete a "
                f"cache (kvlease delete NAME); without workers now: {', '.join(idle[:_NAMES_MAX]) or 'none'}"
            )
            raise BusyError(message, resource="caches", need=1, available=0, limit=self._max_caches)

    def add_cache(self, entry: CacheEntry) -> None:
        """Make a cache known."""
        assert entry.name not in self.caches, "cache known already"
        self.caches[entry.name] = entry
        self.by_pool[entry.pool] = entry

    def drop_cache(self, entry: CacheEntry) -> None:
        """Forget a cache, and end what goes on in it."""
        del self.caches[entry.name]
        del self.by_pool[entry.pool]
        error = UnknownCacheError(f"cache {entry.name} was deleted", resource="cache")
        for end in self.on_drop:
            end(entry, error)

    def require_another(self, tenant: str, *, is_joiner: bool) -> None:
        """Refuse one worker too many.

        Raises:
            BusyError: there are as many workers as are allowed, or the last places are kept for others.
        """
        workers = self.by_id.values()
        num_joiners = sum(one.is_joiner for one in workers) if is_joiner else None
        self.allowances.require_one(tenant, Counter(one.tenant for one in workers), num_joiners)

    def next_worker_id(self) -> WorkerId:
        """Return an id that no worker ever had."""
        self._next_worker_id += 1
        return WorkerId(self._next_worker_id - 1)

    def add_worker(self, worker: WorkerEntry) -> None:
        """Make a worker known."""
        self.by_id[worker.worker_id] = worker
        self.by_token[worker.token] = worker
        worker.entry.num_workers += 1

    def drop_worker(self, worker: WorkerEntry) -> None:
        """Forget a worker and close its pidfd."""
        del self.by_id[worker.worker_id]
        del self.by_token[worker.token]
        worker.entry.num_workers -= 1
        if worker.pidfd is not None:
            os.close(worker.pidfd)


def new_token() -> str:
    """Return a bearer token: 128 random bits in hex."""
    return secrets.token_hex(16)
