"""Own the check that a process may resume a worker; the resuming itself is the verbs' business."""

from kvlease.errors import InvalidError, NotYoursError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.verbs.proofs import same_process


def require_same(
    worker: WorkerEntry, entry: CacheEntry, request: pb.AttachRequest, caller: Caller
) -> None:
    """Refuse to let another process resume a worker, or the same process with other arguments.

    Raises:
        InvalidError: cache, tenant, engine, magazine or rank differ.
        NotYoursError: the token is another process's.
    """
    if worker.entry is not entry:
        message = f"resume_token belongs to a worker of cache {worker.entry.name}, not {entry.name}"
        raise InvalidError(message, resource="resume_token")
    if request.tenant and request.tenant != worker.tenant:
        message = "tenant differs from the one that the worker attached with"
        raise InvalidError(message, resource="tenant")
    if request.engine and request.engine != worker.engine:
        message = "engine differs from the one that the worker attached with"
        raise InvalidError(message, resource="engine")
    if request.magazine and request.magazine != worker.magazine:
        message = "magazine differs from the one that the worker attached with"
        raise InvalidError(message, resource="magazine")
    if request.engine and request.rank != worker.rank:
        message = f"rank is {request.rank}, but the worker attached as rank {worker.rank}"
        raise InvalidError(message, resource="rank", need=request.rank, limit=worker.rank)
    if (
        worker.pidfd is not None
        and caller.pidfd is not None
        and not same_process(worker.pidfd, caller.pidfd)
    ):
        # The first process may still write; only its end proves that it does not.
        message = "resume_token belongs to another process; each process must attach for itself"
        raise NotYoursError(message, resource="resume_token")
