"""Own what a caller must remember between calls: identity, leases, inventory; sending is the clients' business."""

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    NotYoursError,
    RefusedError,
    StaleError,
    UnknownLeaseError,
)
from kvlease.keys import BlockKeys
from kvlease.memory import WorkerMemory, identity_of
from kvlease.plan import CachePlan
from kvlease.transports._frames import close_all
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb

NO_BLOCKS: Final[NDArray[np.int32]] = np.empty(0, np.int32)
"""The block ids of a lease that has none."""


@dataclass(slots=True, kw_only=True)
class Link:
    """How the calls of one caller go out, and whether the last ones arrived."""

    deadline_seconds: float
    clock: Callable[[], float] = time.monotonic
    token: str = ""
    epoch: int = 0
    is_reached: bool = False
    """Whether the daemon was there lately; where it was not, a call tries once and does not wait for it."""
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

    def jitter(self) -> float:
        """Return a factor that keeps callers who failed together from coming back together."""
        return random.uniform(0.5, 1)  # noqa: S311 - no secret


@dataclass(slots=True, kw_only=True, eq=False)
class Grant:
    """What is known of one lease."""

    request_id: str
    lease_id: int = 0
    block_ids: NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    row: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    is_live: bool = False
    is_evicted: bool = False
    refusal: KVLeaseError | None = None
    """Why there is no lease, or why its last verb was refused."""


class Session:
    """A worker as it knows itself; threads share it, so what goes together changes under its lock."""

    def __init__(self, link: Link, request: pb.AttachRequest, *, raises: bool) -> None:
        """Remember how to attach, now and after every restart of the daemon."""
        self.link = link
        self.request = request
        self.raises = raises
        self.worker_id = 0
        self.memory_generation = 0
        self.heartbeat_seconds = 1.0
        self.death_proof = "none"
        self.plan: CachePlan
        self.keys: BlockKeys
        self.memory: WorkerMemory | None = None
        self.lock = threading.Lock()
        self.grants: dict[int, Grant] = {}
        self.doubtful: set[int] = set()
        """Leases that an extend may have reached whose answer did not reach us."""
        self._newest_lease_id = 0
        self._floors: list[int] = []

    # Attaching

    def adopt(self, attached: Attached, *, resumed: bool) -> None:
        """Take over an attach's answer: identity, memory, and which leases survived; closes its descriptors."""
        response = attached.response
        try:
            plan = CachePlan.from_proto(response.info.plan)
            if self.memory is None or self.memory.identity != identity_of(attached):
                old, self.memory = self.memory, WorkerMemory.mapped(attached, plan)
                self.memory_generation += 1
                if old is not None:
                    old.close()
        finally:
            close_all(attached.fds)
        self.plan = plan
        self.keys = BlockKeys(response.tenant_key, plan.layout_fingerprint, plan.model_digest)
        self.worker_id = response.worker_id
        self.heartbeat_seconds = response.heartbeat_seconds or self.heartbeat_seconds
        self.death_proof = response.death_proof
        survivors = set(np.frombuffer(response.lease_ids, "<i8").tolist()) if resumed else set()
        with self.lock:
            for grant in list(self.grants.values()):
                if grant.lease_id in survivors:
                    self._recall(grant)
                else:
                    self._lose(
                        grant,
                        UnknownLeaseError(
                            f"lease {grant.lease_id} did not survive the daemon's restart"
                        ),
                    )
            self.link.token = response.token
            self.link.epoch = response.epoch

    def resume_request(self) -> pb.AttachRequest:
        """Return the attach that goes on with the leases of this worker."""
        request = pb.AttachRequest()
        request.CopyFrom(self.request)
        request.resume_token = self.link.token
        request.lease_ids = self.lease_ids()
        return request

    # Leases

    def begin_reserve(self) -> int:
        """Note that a lease may be on its way; returns the newest id of which we know, for `end_reserve`."""
        with self.lock:
            self._floors.append(self._newest_lease_id)
            return self._newest_lease_id

    def end_reserve(self, floor: int) -> None:
        """Note that no lease is on its way from this reserve any more."""
        with self.lock:
            self._floors.remove(floor)

    def is_leftover(self, lease_id: int, floor: int) -> bool:
        """Tell whether a lease was granted to an earlier reserve, whose answer was lost.

        The inventory did not list it, so a heartbeat on its way may be ending it right now: it must not be used.
        """
        return lease_id <= floor and lease_id not in self.grants

    def enter(self, grant: Grant, response: pb.ReserveResponse, epoch: int) -> Grant | None:
        """Take over a granted lease; an id that we have keeps its grant. None where the daemon restarted since."""
        with self.lock:
            if self.link.epoch != epoch:
                return None
            known = self.grants.get(response.lease_id)
            if known is not None:
                return known
            grant.lease_id, grant.row = response.lease_id, response.row
            grant.block_ids = np.frombuffer(response.block_ids, "<i4")
            grant.device_hit_tokens, grant.host_hit_tokens = (
                response.device_hit_tokens,
                response.host_hit_tokens,
            )
            grant.is_live, grant.refusal = True, None
            self.grants[grant.lease_id] = grant
            self._newest_lease_id = max(self._newest_lease_id, grant.lease_id)
            return grant

    def extended(self, grant: Grant, added: NDArray[np.int32], epoch: int, num_tokens: int) -> None:
        """Add blocks to a lease, and make sure that it covers what was asked for, else it is lost."""
        with self.lock:
            if self.link.epoch == epoch:
                grant.block_ids = np.concatenate((grant.block_ids, added))
            else:
                self._recall(grant)
            if not self._covers(grant, num_tokens):
                # An earlier extend was carried out and its answer lost: the row knows its blocks.
                self._recall(grant)
            if grant.is_live and not self._covers(grant, num_tokens):
                message = f"lease {grant.lease_id} has blocks that this worker was not told of; reserve again"
                self._lose(grant, UnknownLeaseError(message))
            self.doubtful.discard(grant.lease_id)

    def evicted(self, grant: Grant) -> None:
        """Note that a lease's blocks left the device, or may have."""
        grant.is_evicted, grant.block_ids = True, NO_BLOCKS

    def reloaded(self, grant: Grant, response: pb.ReloadResponse, epoch: int) -> None:
        """Note where an evicted lease's blocks are now."""
        with self.lock:
            if self.link.epoch == epoch:
                grant.block_ids = np.frombuffer(response.block_ids, "<i4")
                grant.row, grant.is_evicted = response.row, False
            else:
                self._recall(grant)

    def released(self, grant: Grant) -> None:
        """Forget a lease that ended as it should; where the daemon does not know yet, the next heartbeat tells it."""
        with self.lock:
            grant.is_live, grant.block_ids = False, NO_BLOCKS
            self._forget(grant)

    def refused(self, grant: Grant, error: KVLeaseError) -> None:
        """Note why a verb failed; a lease that the daemon does not grant us any more is lost."""
        with self.lock:
            grant.refusal = error
            if isinstance(error, StaleError | NotYoursError):
                self._lose(grant, error)

    def forget_unknown(self, lease_ids: list[int], epoch: int) -> None:
        """Mark leases as lost that the daemon does not know."""
        with self.lock:
            if self.link.epoch != epoch:
                return
            for lease_id in lease_ids:
                if grant := self.grants.get(lease_id):
                    self._lose(grant, UnknownLeaseError(f"lease {lease_id} ended in the daemon"))

    def forget_all(self) -> None:
        """End every lease, because the worker has ended."""
        with self.lock:
            for grant in list(self.grants.values()):
                self._lose(
                    grant, UnknownLeaseError(f"lease {grant.lease_id} ended with its worker")
                )

    # Inventory

    def lease_ids(self) -> bytes:
        """Return the packed ids of the leases that we hold."""
        return np.array(list(self.grants), "<i8").tobytes()

    def inventory(self) -> tuple[bytes, int]:
        """Return the packed ids, and the newest id of which we can say that every older one not listed is not ours.

        An answer on its way carries an id above all that were known when its reserve began.
        """
        with self.lock:
            return self.lease_ids(), min([self._newest_lease_id, *self._floors])

    def _covers(self, grant: Grant, num_tokens: int) -> bool:
        return len(grant.block_ids) * self.plan.tokens_per_block >= num_tokens

    def _recall(self, grant: Grant) -> None:
        """Read a lease's blocks from its row, which outlives restarts; without a table they stay doubtful."""
        row = None if self.memory is None else self.memory.row(grant.row, grant.lease_id)
        if row is None:
            self.doubtful.add(grant.lease_id)
        elif row.is_on_device:
            grant.block_ids, grant.is_evicted = row.block_ids, False
        else:
            grant.block_ids, grant.is_evicted = NO_BLOCKS, True

    def _lose(self, grant: Grant, error: KVLeaseError) -> None:
        grant.is_live, grant.block_ids, grant.refusal = False, NO_BLOCKS, error
        self._forget(grant)

    def _forget(self, grant: Grant) -> None:
        self.grants.pop(grant.lease_id, None)
        self.doubtful.discard(grant.lease_id)


def is_doubt(error: KVLeaseError) -> bool:
    """Tell whether a call that failed like this may have been carried out all the same."""
    return not isinstance(error, RefusedError | StaleError | NotYoursError | InvalidError)
