"""Own what a worker must remember between calls: identity, leases, inventory; sending is the clients' business."""

import threading
from collections.abc import Iterable, Sequence
from weakref import ReferenceType, ref

import numpy as np
from google.protobuf.message import Message

from kvlease._calling.answers import misses
from kvlease._calling.failures import ends_lease
from kvlease._calling.grants import Grant, GroupedGrant, unpacked
from kvlease._calling.link import Link
from kvlease.errors import (
    IdReusedError,
    KVLeaseError,
    UnknownLeaseError,
)
from kvlease.groups import GroupShape, Keeps
from kvlease.keys import BlockKeys
from kvlease.memory.key_counts import KeyCounts
from kvlease.memory.mapped import WorkerMemory, identity_of, key_counts_of
from kvlease.plan import CachePlan
from kvlease.plan_groups import groups_of
from kvlease.transports._frames import close_all
from kvlease.transports.base import Attached
from kvlease.v1 import kvlease_pb2 as pb

Added = tuple[int, bytes, Sequence[int], int, int, Sequence[int]]
"""What an extend brought a lease: the lease's id, packed block ids, how many of them each group has, the tokens asked
for, the tokens that must be covered now, and the place at which each group's blocks end, if the daemon told it."""


class Floor:
    """An object that a reserve holds while it is on its way; however the reserve ends, its floor ends with it."""

    __slots__ = ("__weakref__",)


class Session:
    """What a worker knows of itself; threads share it, so values that belong together change under its lock."""

    def __init__(
        self,
        link: Link,
        request: pb.AttachRequest,
        *,
        raises: bool,
        registration: Message | None = None,
    ) -> None:
        """Remember how to attach, now and after every restart of the daemon."""
        self.link = link
        self.request = request
        self.registration = registration
        """The request that registers the cache again if it ended with the daemon; None if another client has it."""
        self.raises = raises
        self.worker_id = 0
        self.memory_generation = 0
        self.heartbeat_seconds = 1.0
        self.death_proof = "none"
        self.plan: CachePlan
        self.groups: tuple[GroupShape, ...] = ()
        self.has_plain_leases = False
        """Whether leases have only one group, which keeps everything, so that no place is ever empty."""
        self.keys: BlockKeys
        self.memory: WorkerMemory | None = None
        self.looked_at: WorkerMemory | None = None
        """The memory that was last given to callers, who may have views of it."""
        self.key_counts: KeyCounts | None = None
        """The key counts of the present attachment; None if it brought none, or has ended."""
        self.lock = threading.Lock()
        self.grants: dict[int, Grant] = {}
        self.doubtful: set[int] = set()
        """Leases that may have more blocks than we know, because the answer to an extend was lost."""
        self.refused_in_steps: set[int] = set()
        """Leases whose `refusal` comes from an operation of a step."""
        self._newest_lease_id = 0
        self._floors: dict[ReferenceType[Floor], int] = {}
        self._given_back: dict[int, int] = {}
        """For leases whose caller had gone, by id: the id that each came as; kept while a reserve may bring it."""

    # Attaching

    def adopt(self, attached: Attached, *, resumed: bool) -> None:
        """Take over an attach's answer: identity, memory, and which leases survived; closes its descriptors."""
        response = attached.response
        try:
            plan = CachePlan.from_proto(response.info.plan)
            if self.memory is None or self.memory.identity != identity_of(attached):
                old = self.memory
                self.memory = WorkerMemory.mapped(attached, plan, self.request.rank)
                self.memory_generation += 1
                if old is not None:
                    old.close()
            key_counts = key_counts_of(attached)
        finally:
            close_all(attached.fds)
        self.plan, self.groups = plan, groups_of(plan)
        self.has_plain_leases = [one.keeps for one in self.groups] == [Keeps.EVERYTHING]
        self.keys = BlockKeys(response.tenant_key, plan.layout_fingerprint, plan.model_digest)
        self.worker_id = response.worker_id
        self.heartbeat_seconds = response.heartbeat_seconds or self.heartbeat_seconds
        self.death_proof = response.death_proof
        survivors = set(np.frombuffer(response.lease_ids, "<i8").tolist()) if resumed else set()
        with self.lock:
            if not resumed:
                # This is another worker, perhaps of another cache of the same name, whose ids begin anew.
                self._newest_lease_id = 0
                self._given_back.clear()
            for grant in list(self.grants.values()):
                if grant.lease_id in survivors:
                    self._recall(grant)
                else:
                    message = f"lease {grant.lease_id} did not survive the daemon's restart"
                    self._lose(grant, UnknownLeaseError(message))
            self.link.token = response.token
            self.link.epoch = response.epoch
            self.key_counts = key_counts

    def resume_request(self) -> pb.AttachRequest:
        """Return the attach request that resumes this worker with its leases."""
        request = pb.AttachRequest()
        request.CopyFrom(self.request)
        request.resume_token = self.link.token
        request.lease_ids = self.lease_ids()
        return request

    # Leases

    def fresh_grant(self, request_id: str, refusal: KVLeaseError | None = None) -> Grant:
        """Return a grant for a lease that is to be asked for, or that was refused."""
        if self.has_plain_leases:
            tokens_per_block = self.groups[0].tokens_per_block
            return Grant(request_id=request_id, tokens_per_block=tokens_per_block, refusal=refusal)
        return GroupedGrant(request_id=request_id, groups=self.groups, refusal=refusal)

    def begin_reserve(self, floor: Floor) -> None:
        """Note, before a reserve is sent, that a lease may be on its way for as long as `floor` is referenced."""
        with self.lock:
            self._floors[ref(floor)] = self._newest_lease_id

    def end_reserve(self, floor: Floor) -> None:
        """Note that no lease is on its way from this reserve any more."""
        with self.lock:
            self._floors.pop(ref(floor), None)

    def is_leftover(self, granted: pb.ReserveResponse) -> bool:
        """Tell whether a lease was granted to an earlier reserve, whose answer was lost.

        An inventory may have left such a lease out, so a heartbeat on its way may be ending it right now: it must not
        be used. A lease above the floor of any reserve on its way is no leftover: no inventory so far covered its id,
        and it may be that reserve's. Call this only while a reserve is on its way.

        If another rank was granted the lease, the id under which this rank joined it counts.
        """
        lease_id, came_as = granted.lease_id, granted.joined_id or granted.lease_id
        with self.lock:
            is_old = came_as <= min(self._floors.values()) or lease_id in self._given_back
            return is_old and lease_id not in self.grants

    def gives_back(self, granted: pb.ReserveResponse) -> bool:
        """Tell whether a lease whose caller has gone is to be released; if so, no reserve of its request may use it.

        It is not to be released if another caller got it first, as reserves of one request share their lease.
        """
        lease_id, came_as = granted.lease_id, granted.joined_id or granted.lease_id
        with self.lock:
            if lease_id in self.grants:
                return False
            self._newest_lease_id = max(self._newest_lease_id, came_as)
            # Reserves sent from now on have a higher floor; only one on its way could still take the lease for its own.
            lowest = min(self._floors.values(), default=self._newest_lease_id)
            given_back = {**self._given_back, lease_id: came_as}
            self._given_back = {one: came for one, came in given_back.items() if came > lowest}
            return True

    def enter(self, grant: Grant, response: pb.ReserveResponse, epoch: int) -> Grant | None:
        """Take over a granted lease; refuse one that this worker holds already, as two callers would write its blocks.

        Retries are part of one call, so a grant comes here once. Return None if the daemon has restarted since, or if
        the lease is a leftover and must be released.
        """
        lease_id = response.lease_id
        with self.lock:
            if self.link.epoch != epoch:
                return None
            if (known := self.grants.get(lease_id)) is not None:
                grant.refusal = _held_already(known)
                return grant
            came_as = response.joined_id or lease_id
            # As in `is_leftover`, written out to save a function call in the most frequent verb.
            if came_as <= min(self._floors.values()) or lease_id in self._given_back:
                return None
            grant.lease_id, grant.row = lease_id, response.row
            grant.device_hit_tokens = response.device_hit_tokens
            grant.host_hit_tokens = response.host_hit_tokens
            grant.disk_hit_tokens = response.disk_hit_tokens
            grant.remote_hit_tokens = response.remote_hit_tokens
            if response.misses:
                grant.misses = misses(response.misses)
            if grant.has_groups:
                grant.cover(response.covered_tokens)
                grant.put(response.block_ids, unpacked(response.num_blocks))
                grant.compute(grant.hit_tokens)
            else:
                grant.put(response.block_ids)
            # A rank may join a lease that its engine has evicted to the host pool; every other grant has blocks.
            grant.is_live, grant.is_evicted, grant.refusal = True, not response.block_ids, None
            self.grants[lease_id] = grant
            self._newest_lease_id = max(self._newest_lease_id, came_as)
            return grant

    def extended(self, added: Iterable[Added], epoch: int) -> None:
        """Add blocks to leases; a lease that then does not cover what it should, and cannot be made up, is lost.

        Answers to simultaneous calls come in any order; blocks that the table has already told are not added again.
        """
        with self.lock:
            is_same_life, is_apart = self.link.epoch == epoch, bool(self.request.engine)
            if self.has_plain_leases and is_same_life and not (is_apart or self.doubtful):
                self._extended_plainly(added)
            else:
                self._extended_each(added, is_same_life=is_same_life, is_apart=is_apart)

    def _extended_plainly(self, added: Iterable[Added]) -> None:
        """Add blocks if nothing is in doubt, as nearly always; the loop runs once for each lease that got a block."""
        grant_of = self.grants.get
        for lease_id, packed, _, num_tokens, covered_tokens, _ in added:
            grant = grant_of(lease_id)
            if grant is not None and not grant.grow(packed, covered_tokens):
                self._make_up(grant, num_tokens, covered_tokens)

    def _extended_each(self, added: Iterable[Added], *, is_same_life: bool, is_apart: bool) -> None:
        doubtful, grant_of = self.doubtful, self.grants.get
        for lease_id, packed, num_added, num_tokens, covered_tokens, num_places in added:
            grant = grant_of(lease_id)
            if grant is None:
                continue
            if not is_same_life:
                self._recall(grant)
            elif is_apart or grant.has_groups:
                grant.add_unknown(packed, num_added, num_tokens, num_places)
            else:
                grant.grow(packed, covered_tokens)
            # If places may be empty, missing blocks leave no visible hole.
            is_doubtful = grant.has_groups and lease_id in doubtful
            if grant.covered_tokens < covered_tokens or is_doubtful:
                self._make_up(grant, num_tokens, covered_tokens)
            doubtful.discard(lease_id)

    def computed(self, grant: Grant, num_tokens: int) -> None:
        """Note that `num_tokens` of a lease's tokens are computed, so blocks that no later token needs have left it."""
        if grant.has_groups:
            with self.lock:
                grant.compute(num_tokens)

    def trimmed(self, grant: Grant, num_tokens: int, *, is_sure: bool) -> None:
        """Drop a lease's blocks behind the first `num_tokens`, even if it is not sure that they have left the lease."""
        with self.lock:
            grant.cut(num_tokens)
            if not is_sure:
                self.doubtful.add(grant.lease_id)

    def evicted(self, grant: Grant) -> None:
        """Note that a lease's blocks have left the device, or may have."""
        grant.is_evicted = True
        grant.put(b"")

    def reloaded(self, grant: Grant, response: pb.ReloadResponse, epoch: int) -> None:
        """Note a reloaded lease's blocks and what it covers, which is news to a rank that joined it while evicted."""
        with self.lock:
            if self.link.epoch == epoch:
                grant.cover(response.num_tokens)
                grant.put(response.block_ids, unpacked(response.num_blocks))
                grant.row, grant.is_evicted = response.row, False
            else:
                self._recall(grant)

    def released(self, *grants: Grant) -> None:
        """Forget leases that ended as intended; if the daemon does not know it yet, the next heartbeat tells it."""
        with self.lock:
            for grant in grants:
                grant.is_live = False
                grant.put(b"")
                self._forget(grant)

    def refused(self, grant: Grant, error: KVLeaseError) -> None:
        """Note why a verb failed; if the daemon no longer grants us the lease, the lease is lost."""
        with self.lock:
            grant.refusal = error
            if ends_lease(error):
                self._lose(grant, error)

    def heard(self, unknown_lease_ids: list[int], newest_lease_id: int, epoch: int) -> None:
        """Take over a heartbeat's answer: the newest id that the daemon issued, and leases that it does not know."""
        with self.lock:
            if self.link.epoch != epoch:
                return
            self._newest_lease_id = max(self._newest_lease_id, newest_lease_id)
            for lease_id in unknown_lease_ids:
                if grant := self.grants.get(lease_id):
                    self._lose(grant, UnknownLeaseError(f"lease {lease_id} ended in the daemon"))

    def forget_all(self) -> None:
        """End every lease, because the worker has ended."""
        self.key_counts = None
        with self.lock:
            for grant in list(self.grants.values()):
                message = f"lease {grant.lease_id} ended with its worker"
                self._lose(grant, UnknownLeaseError(message))

    # Inventory

    def lease_ids(self) -> bytes:
        """Return the packed ids of the leases that we hold."""
        return np.array(list(self.grants), "<i8").tobytes()

    def inventory(self) -> tuple[bytes, int]:
        """Return the packed ids, and the newest id up to which every lease that is not listed is not ours.

        So the daemon may end a lease whose answer was lost. Why it never ends a lease that we may yet use:

        - `_newest_lease_id` is at most the id that the daemon had issued when its last answer left. A reserve sent
          afterwards is granted a larger id, so its floor, noted before it is sent, lies below its lease.
        - While the reserve is on its way, no inventory's newest id is above that floor. This holds over any connection,
          for retries, which belong to the same reserve, and for a step, whose reserves share one floor.
        - No inventory before the reserve went above its floor, so one still on its way does not reach the lease.
        - A second reserve of a request whose answer was lost brings the old lease, which an inventory may have left out
          meanwhile. Then the lease is a leftover, because that inventory's newest id is not above the new floor.
        - After a restart, ids begin above all earlier ones; a lease that survived is listed, or lost as before.

        Why it ends a lost lease: once a heartbeat has told its id, and the last reserve that began before that has
        ended, all floors and the newest id are at least that id. Reserves that wait can delay this, but not for ever.
        """
        with self.lock:
            for floor in [floor for floor in self._floors if floor() is None]:
                del self._floors[floor]
            return self.lease_ids(), min([self._newest_lease_id, *self._floors.values()])

    def _make_up(self, grant: Grant, num_tokens: int, covered_tokens: int) -> None:
        """Find the blocks that a lease lacks: if the answer to an extend was lost, the lease's row has them."""
        grant.cover(num_tokens)
        is_known = self._recall(grant)
        is_short = grant.covered_tokens < covered_tokens or (grant.has_groups and not is_known)
        if grant.is_live and is_short:
            message = (
                f"lease {grant.lease_id} has blocks that this worker was not told of; reserve again"
            )
            self._lose(grant, UnknownLeaseError(message))

    def _recall(self, grant: Grant) -> bool:
        """Read a lease's blocks from its row, which outlives restarts; without a table the lease stays doubtful."""
        is_known = self._read(grant)
        if not is_known:
            self.doubtful.add(grant.lease_id)
        return is_known

    def _read(self, grant: Grant) -> bool:
        row = None if self.memory is None else self.memory.row(grant.row, grant.lease_id)
        if row is None:
            return False
        if row.is_active:
            grant.put(row.block_ids.tobytes(), row.num_blocks.tolist())
        else:
            grant.put(b"")
        grant.is_evicted = not row.is_active
        return True

    def _lose(self, grant: Grant, error: KVLeaseError) -> None:
        grant.is_live, grant.refusal = False, error
        grant.put(b"")
        self._forget(grant)

    def _forget(self, grant: Grant) -> None:
        self.grants.pop(grant.lease_id, None)
        self.doubtful.discard(grant.lease_id)
        self.refused_in_steps.discard(grant.lease_id)


def _held_already(grant: Grant) -> IdReusedError:
    message = f"request {grant.request_id!r} has lease {grant.lease_id}, which this worker holds; "
    return IdReusedError(
        f"{message}use or release that lease, or give the request another id", resource="request_id"
    )
