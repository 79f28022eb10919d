"""Own the verbs on workers (attach, detach, heartbeat), what their death leads to, and their return after a restart."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, Final

import structlog

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    LayoutMismatchError,
    NoSuchWorkerError,
    NotYoursError,
    WrongStateError,
)
from kvlease.ids import LeaseId, WorkerId
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.fields import JSON_INTEGER_MAX
from kvleased.access.callers import Caller
from kvleased.access.roles import Role
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.caches.key_counting import KeyCounting
from kvleased.caches.registry import TENANT_DEFAULT, Registry, new_token
from kvleased.calls import checks
from kvleased.calls.draining import draining
from kvleased.calls.idempotency import Answer, Replies
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core import effects as e
from kvleased.core.lease.ranks import Place
from kvleased.credentials.derived import tenant_key
from kvleased.memory.regions import device_kind
from kvleased.supervision.keeper import Kept, Note
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.telemetry.events import Events
from kvleased.verbs import replies
from kvleased.verbs.proofs import has_ended, own_pidfd, process_of, require_proof
from kvleased.verbs.resuming import require_same
from kvleased.verbs.runner import Runner, Verb
from kvleased.verbs.silent_workers import SilentWorkers

_PREFIX: Final = "worker/"
_LOG = structlog.get_logger()


class WorkerVerbs:
    """The verbs by which a process becomes a worker, says that it lives, and ends."""

    def __init__(
        self,
        registry: Registry,
        runner: Runner,
        settings: Settings,
        *,
        epoch: int,
        keeper: KeeperLink,
        events: Events,
    ) -> None:
        """Take what the verbs work with."""
        self._registry = registry
        self._runner = runner
        self._settings = settings
        self._epoch = epoch
        self._keeper = keeper
        self._events = events
        self._silent = SilentWorkers(registry, settings, self._end)
        self.counting = KeyCounting(epoch, settings.key_counts_bytes_max)
        """The regions of key counts, and the workers that read them."""
        self.root_secret = b""
        """The secret that tenants' keys are derived from; set before the first call."""

    @property
    def table(self) -> Mapping[str, Verb]:
        """The verbs by name."""
        return {"attach": self.attach, "detach": self.detach, "heartbeat": self.heartbeat}

    def attach(self, request: pb.AttachRequest, caller: Caller) -> Answer:
        """Make the caller a worker, or let it go on as the worker that it was."""
        checks.cache_name(request.cache)
        checks.label("worker_name", request.worker_name)
        checks.tenant(request.tenant)
        if request.engine:
            checks.name("engine", request.engine)
        checks.label("magazine", request.magazine)
        inventory = checks.lease_ids("lease_ids", request.lease_ids, self._settings.max_leases)
        if inventory and not request.resume_token:
            message = "lease_ids is set, but resume_token is not; only a resumed worker has leases"
            raise InvalidError(message, resource="lease_ids")
        entry = self._registry.cache(request.cache)
        fingerprint = entry.plan.layout_fingerprint
        if request.layout_fingerprint not in {"", fingerprint}:
            message = (
                f"cache {entry.name} has layout {fingerprint}, not {request.layout_fingerprint[:64]}; "
                "register this layout under another name"
            )
            raise LayoutMismatchError(message, resource="layout_fingerprint")
        entry.require_rank(request.rank)
        if request.resume_token:
            worker = self._resume(entry, request, caller, inventory)
        else:
            worker = self._admit(entry, request, caller)
        response = self._describe(worker, caller, is_resumed=bool(request.resume_token))
        if request.wants_key_counts and caller.transport == "local":
            response.regions.extend(self.counting.join(worker))
        else:
            self.counting.leave(worker.worker_id)
        return response

    def detach(self, request: pb.DetachRequest, caller: Caller) -> Answer:
        """End the calling worker; or, for an operator, any worker that is not watched, or whose end is forced."""
        worker = self._worker_to_end(request, caller)
        response = pb.DetachResponse(num_leases=self._end(worker))
        _LOG.info("worker_detached", **worker.told, leases=response.num_leases, **caller.who)
        return response

    def _worker_to_end(self, request: pb.DetachRequest, caller: Caller) -> WorkerEntry:
        worker_id = request.worker_id
        if not caller.token and not worker_id:
            message = (
                "worker_id is 0, which means the caller, and the caller is no worker; name a worker, as kvlease "
                "workers lists them"
            )
            raise InvalidError(message, resource="worker_id")
        if caller.token:
            own = self._registry.worker(caller.token)
            if worker_id not in (0, own.worker_id):
                message = (
                    f"worker {worker_id} is not the caller; only an operator may end another worker"
                )
                raise NotYoursError(message, resource="worker_id")
            return own
        worker = self._registry.by_id.get(WorkerId(worker_id))
        if worker is None:
            message = f"there is no worker {worker_id}, or it has ended; kvlease workers lists them"
            raise NoSuchWorkerError(message, resource="worker_id")
        if worker.pidfd is not None and not request.force:
            raise WrongStateError(
                f"the process of worker {worker_id} is watched; end the process, and the worker ends with it, or force "
                "its end (kvlease detach --force) if you are certain that the process writes no more",
                resource="worker_id",
                rule="watched",
            )
        return worker

    def heartbeat(self, request: pb.HeartbeatRequest, caller: Caller) -> Answer:
        """Renew the leases that the worker knows, and end those that it does not know."""
        worker = self._registry.worker(caller.token)
        lease_ids = checks.lease_ids("lease_ids", request.lease_ids, self._settings.max_leases)
        checks.count("newest_lease_id", request.newest_lease_id, 0, JSON_INTEGER_MAX)
        command = c.Heartbeat(
            worker_id=worker.worker_id,
            lease_ids=tuple(LeaseId(lease_id) for lease_id in lease_ids),
            newest_lease_id=LeaseId(request.newest_lease_id),
        )
        return self._runner.run(worker.entry, command, replies.beaten)

    def living(self, kept: Iterable[Kept | Note]) -> list[Kept | Note]:
        """Return the kept workers that live, and drop the others."""
        living = []
        for item in kept:
            if not item.name.startswith(_PREFIX):
                continue
            pidfd = _pidfd_of(item)
            if pidfd is not None and has_ended(pidfd):
                _LOG.info("worker_died", **_told(item.metadata), while_down=True)
                self._keeper.drop(item.name)
                os.close(pidfd)
            else:
                living.append(item)
        return living

    def tenants(self, living: Iterable[Kept | Note]) -> dict[str, dict[WorkerId, int]]:
        """Return the tenant digests of living workers, by cache and worker id."""
        found: dict[str, dict[WorkerId, int]] = {}
        for item in living:
            metadata, digest = item.metadata, item.metadata["tenant_digest"]
            found.setdefault(metadata["cache"], {})[WorkerId(metadata["worker_id"])] = digest
        return found

    def places(self, living: Iterable[Kept | Note]) -> dict[str, dict[WorkerId, Place]]:
        """Return the engines and ranks of living workers, by cache and worker id; those without an engine have none."""
        found: dict[str, dict[WorkerId, Place]] = {}
        for item in living:
            metadata = item.metadata
            # A worker that was kept by an earlier build has none.
            if engine := metadata.get("engine_digest", 0):
                place = Place(engine, metadata["rank"])
                found.setdefault(metadata["cache"], {})[WorkerId(metadata["worker_id"])] = place
        return found

    def magazines(self, living: Iterable[Kept | Note]) -> dict[str, dict[WorkerId, int]]:
        """Return the digests of the magazines that living workers share, by cache and worker id."""
        found: dict[str, dict[WorkerId, int]] = {}
        for item in living:
            metadata = item.metadata
            if digest := metadata.get("magazine_digest", 0):
                found.setdefault(metadata["cache"], {})[WorkerId(metadata["worker_id"])] = digest
        return found

    def recover(self, living: Iterable[Kept | Note]) -> None:
        """Bring back the living workers, with their tokens, and look for silent ones from now on."""
        self._silent.start()
        for item in living:
            pidfd = _pidfd_of(item)
            entry = self._registry.caches.get(item.metadata["cache"])
            if entry is None:
                self._keeper.drop(item.name)
                if pidfd is not None:
                    os.close(pidfd)
                continue
            self._watch(self._entry_of(entry, item.metadata, pidfd))

    def fds(self, worker_id: WorkerId) -> list[int]:
        """Return the descriptors of a worker's regions, in the order of its AttachResponse; the daemon owns them."""
        worker = self._registry.by_id[worker_id]
        own = [worker.entry.fds[device_kind(worker.rank)], worker.entry.tables_read_only_fd]
        return own + self.counting.fds(worker_id)

    def end_all(self, entry: CacheEntry) -> None:
        """End the workers of a cache that is given up; they learn of it by their next call."""
        for worker in [one for one in self._registry.by_id.values() if one.entry is entry]:
            _LOG.info("worker_given_up", **worker.told, leases=self._end(worker))

    def stop(self) -> None:
        """Stop watching the workers, and end the regions of key counts."""
        self._silent.stop()
        self.counting.close()
        for worker in self._registry.by_id.values():
            if worker.pidfd is not None:
                asyncio.get_running_loop().remove_reader(worker.pidfd)

    def _admit(self, entry: CacheEntry, request: pb.AttachRequest, caller: Caller) -> WorkerEntry:
        self._require_taking(entry)
        tenant, is_joiner = request.tenant or TENANT_DEFAULT, caller.role is Role.JOINER
        self._registry.require_another(tenant, is_joiner=is_joiner)
        worker_id = self._registry.next_worker_id()
        pidfd = own_pidfd(caller)
        metadata = {
            "worker_id": worker_id,
            "token": new_token(),
            "cache": entry.name,
            "tenant": tenant,
            "name": request.worker_name,
            "rank": request.rank,
            "engine": request.engine,
            "magazine": request.magazine,
            "proof": "none" if pidfd is None else "pidfd",
            "is_joiner": is_joiner,
            "process_id": 0 if pidfd is None else process_of(pidfd),
            "attached_at": monotonic(),
        }
        worker = self._entry_of(entry, metadata, pidfd)
        try:
            require_proof(request, pidfd)
            self._runner.apply(entry, _attach_command(worker))
        except KVLeaseError:
            if pidfd is not None:
                os.close(pidfd)
            raise
        digests = {
            "tenant_digest": worker.tenant_digest,
            "engine_digest": worker.engine_digest,
            "magazine_digest": worker.magazine_digest,
        }
        self._keep(worker, metadata | digests)
        self._watch(worker)
        self._events.append("worker_attached", entry.name, worker_id=worker_id)
        _LOG.info(
            "worker_attached",
            **worker.told,
            worker_name=worker.name,
            rank=worker.rank,
            death_proof=worker.death_proof,
            **caller.who_joins,
        )
        return worker

    def _require_taking(self, entry: CacheEntry) -> None:
        """Refuse a new worker while a drain would keep it from any lease; a worker that resumes may go on."""
        if entry.is_draining or self._registry.is_draining:
            whose = "the daemon" if self._registry.is_draining else f"cache {entry.name}"
            message = (
                f"{whose} is being drained and accepts no new workers; attach to another daemon"
            )
            raise draining(message, "daemon" if self._registry.is_draining else "cache")

    def _resume(
        self,
        entry: CacheEntry,
        request: pb.AttachRequest,
        caller: Caller,
        inventory: tuple[int, ...],
    ) -> WorkerEntry:
        worker = self._registry.worker(request.resume_token)
        require_same(worker, entry, request, caller)
        lease_ids = tuple(LeaseId(lease_id) for lease_id in inventory)
        newest = max(lease_ids, default=LeaseId(0))
        beat = c.Heartbeat(worker_id=worker.worker_id, lease_ids=lease_ids, newest_lease_id=newest)
        self._runner.apply(entry, beat)
        _LOG.info("worker_resumed", **worker.told, **caller.who_joins)
        return worker

    def _describe(
        self, worker: WorkerEntry, caller: Caller, *, is_resumed: bool
    ) -> pb.AttachResponse:
        entry = worker.entry
        return pb.AttachResponse(
            worker_id=worker.worker_id,
            token=worker.token,
            epoch=self._epoch,
            tenant_key=worker.tenant_key,
            info=entry.info(),
            regions=entry.regions_of(worker.rank) if caller.transport == "local" else [],
            heartbeat_seconds=self._settings.heartbeat_seconds,
            lease_seconds=self._settings.lease_seconds,
            lease_ids=entry.core.lease_ids_of(worker.worker_id) if is_resumed else b"",
            death_proof=worker.death_proof,
        )

    def _entry_of(
        self, entry: CacheEntry, metadata: Mapping[str, Any], pidfd: int | None
    ) -> WorkerEntry:
        return WorkerEntry(
            worker_id=WorkerId(metadata["worker_id"]),
            token=metadata["token"],
            entry=entry,
            tenant=metadata["tenant"],
            tenant_key=tenant_key(self.root_secret, metadata["tenant"]),
            name=metadata["name"],
            rank=metadata["rank"],
            pidfd=pidfd,
            replies=Replies(self._settings.max_remembered_replies),
            # A worker that was kept by an earlier build has none of these.
            attached_at=metadata.get("attached_at", monotonic()),
            engine=metadata.get("engine", ""),
            magazine=metadata.get("magazine", ""),
            is_joiner=metadata.get("is_joiner", False),
            process_id=metadata.get("process_id", 0),
        )

    def _keep(self, worker: WorkerEntry, metadata: Mapping[str, Any]) -> None:
        name = f"{_PREFIX}{worker.worker_id}"
        if worker.pidfd is None:
            self._keeper.note(name, metadata)
        else:
            self._keeper.keep(name, worker.pidfd, metadata)

    def _watch(self, worker: WorkerEntry) -> None:
        self._registry.add_worker(worker)
        if worker.pidfd is not None:
            asyncio.get_running_loop().add_reader(worker.pidfd, self._died, worker)

    def _died(self, worker: WorkerEntry) -> None:
        num_leases = self._finish(worker, c.WorkerDied(worker_id=worker.worker_id))
        self._events.append("worker_died", worker.entry.name, worker_id=worker.worker_id)
        _LOG.info("worker_died", **worker.told, leases=num_leases)

    def _end(self, worker: WorkerEntry) -> int:
        num_leases = self._finish(worker, c.Detach(worker_id=worker.worker_id))
        self._events.append("worker_detached", worker.entry.name, worker_id=worker.worker_id)
        return num_leases

    def _finish(self, worker: WorkerEntry, command: c.Detach | c.WorkerDied) -> int:
        """End a worker and its leases; return the number of leases."""
        reply = self._runner.apply(worker.entry, command)
        assert isinstance(reply, e.Detached), "an end answers Detached"
        if worker.pidfd is not None:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
        self.counting.leave(worker.worker_id)
        self._registry.drop_worker(worker)
        self._keeper.drop(f"{_PREFIX}{worker.worker_id}")
        return reply.num_leases


def _pidfd_of(item: Kept | Note) -> int | None:
    """Return the pidfd of a kept worker, or None if nothing can prove its death."""
    # With a worker without a pidfd, a supervisor of an earlier build kept another descriptor.
    if isinstance(item, Kept) and item.metadata["proof"] == "pidfd":
        return item.fd
    return None


def _told(metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return the log fields of a worker that is only kept, the same as of `WorkerEntry.told`."""
    found = {"worker": metadata["worker_id"], "cache": metadata["cache"]}
    return {**found, "tenant": metadata["tenant"], "worker_pid": metadata.get("process_id", 0)}


def _attach_command(worker: WorkerEntry) -> c.Attach:
    return c.Attach(
        worker_id=worker.worker_id,
        tenant_digest=worker.tenant_digest,
        engine=worker.engine_digest,
        rank=worker.rank,
        magazine=worker.magazine_digest,
    )
