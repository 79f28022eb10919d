"""Own the whole state of one cache, and the small questions that every verb asks; the verbs decide."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import KVLeaseError, NotYoursError, UnknownLeaseError, UnknownWorkerError
from kvlease.groups import Keeps
from kvlease.ids import BYTES_PER_KEY, CopyId, Epoch, WorkerId
from kvleased.core.blocks.history import History
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.records import CacheRecords, key_digests
from kvleased.core.blocks.states import (
    BLOCK_TRANSITIONS,
    SLOT_TRANSITIONS,
    Event,
    compile_transitions,
)
from kvleased.core.commands import OfLease
from kvleased.core.effects import Copy, Direction, Effect, Notice, Reply, Tier, Wake
from kvleased.core.eviction import LeafFirstLRU, make_order
from kvleased.core.ids import IdCount, Ids
from kvleased.core.lease.allowances import Allowances
from kvleased.core.lease.charges import Charges
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.kernel_table import KernelTable
from kvleased.core.lease.leases import Lease, LeaseBook
from kvleased.core.lease.missing import MissingKeys
from kvleased.core.lease.pins import Pins
from kvleased.core.lease.ranks import Call, RankBook
from kvleased.core.magazines import MagazineBook
from kvleased.core.reasons import Detail
from kvleased.core.shape import CacheShape
from kvleased.core.suspects import Suspects
from kvleased.core.tier.dirt import Dirt
from kvleased.core.tier.flights import (
    DIRECTIONS,
    HELD_BY_LEASES,
    SOURCE_TIERS,
    Flight,
    Purpose,
    Remote,
)
from kvleased.core.tier.labels import pack_labels
from kvleased.core.tier.loading import Loading
from kvleased.core.unsettled import Unsettled
from kvleased.core.waiting import Asking, Waiter, WaitingRoom

TIER_NUMBERS: Final = {tier: number for number, tier in enumerate(Tier)}


class CacheState:
    """Everything that one cache knows."""

    def __init__(
        self,
        shape: CacheShape,
        records: CacheRecords,
        epoch: Epoch,
        id_count: IdCount | None = None,
    ) -> None:
        """Take over records in which every entry is unused; caches of one epoch share a count of ids."""
        self.shape = shape
        self.covering = Covering(shape)
        self.is_simple = shape.is_simple
        self.records = records
        self.pools = self.device, self.host, self.disk = _pools(shape, records)
        """The tiers whose blocks are known here, from the top."""
        self.tiers = tuple(pool for pool in self.pools if len(pool))
        """The pools that have any blocks."""
        self._limit_tenants()
        self.used_before: dict[int, int] = {}
        """Blocks that each tenant used when limits were set, or when this life began; its limits may be lower."""
        self.leases_before: dict[int, int] = {}
        """Leases that each tenant had then."""
        self.device.part_tenants(at_once=self.is_limited)
        self._ends = _ends(*self.pools)
        self.history = _history_of(self.pools)
        """What became of blocks that have left a tier."""
        self.missing = MissingKeys(shape.hash_tokens)
        """Keys that granted requests did not find, until it is looked up what became of them."""
        self.tiers_off: set[Tier] = set()
        """Lower tiers that do not work now: nothing is looked for in them, and nothing is copied to them."""
        self.is_disk_read = True
        """Whether everything in the disk store is known, so that a slot that is free here is free there, too."""
        self.suspects, self.pins = Suspects(), Pins()
        self.was_remote_away = False
        """Whether the remote store itself failed in this life, so that it may come back without what it had."""
        self.dirt = Dirt(shape, records)
        self.kernel = KernelTable(records.kernel_rows, shape.groups)
        self.leases = LeaseBook(
            records.rows, self.covering, self.kernel, are_charged=self.keeps_rows
        )
        self.magazines = MagazineBook(records.magazines)
        self.waiting = WaitingRoom(shape.max_waiting, shape.ageing_seconds)
        self.asking: dict[int, Asking] = {}
        """By ticket: calls that wait to learn what the remote store has; they hold nothing."""
        self.workers: dict[WorkerId, int] = {}
        """The tenant digest of every attached worker."""
        is_recurrent = any(group.keeps is Keeps.STATE for group in shape.groups)
        self.ranks = RankBook(shape.num_ranks, is_recurrent=is_recurrent)
        self.beside: dict[int, list[Call]] = {}
        """By ticket: all calls of a lease's members that get the same answer, the call of that ticket first."""
        self.flights: dict[CopyId, Flight] = {}
        self.loading = Loading(records.device.key)
        """Keys on their way to the device, so that a second caller joins the first."""
        self.unsettled = Unsettled()
        # A Counter would take three times as long, and every call counts several times.
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.effects: list[Effect] = []
        self.is_draining, self.drains_daemon, self.detail = False, False, Detail.ALL
        """Whether nothing new is granted; whether the whole daemon is drained; and how much refusals say."""
        self.id_count = id_count or IdCount(epoch)

    @classmethod
    def fresh(cls, shape: CacheShape, epoch: Epoch) -> Self:
        """Return the state of a new cache in ordinary memory."""
        return cls(shape, CacheRecords.plain(shape), epoch)

    def next_id(self) -> int:
        """Return an id that was never issued before."""
        count = self.id_count
        count.newest += 1
        return count.newest

    def leases_by_tenant(self) -> Counter[int]:
        """Count the live leases of each tenant that has any."""
        if self.leases.charges is not None:
            return self.leases.charges.counts
        return Counter(lease.tenant for lease in self.leases.by_id.values())

    def note_before(self) -> None:
        """Remember what tenants have when their limits are set, because limits take nothing away that they have."""
        self.used_before = {one: used for one, (used, _) in self.device.usage().items()}
        self.leases_before = dict(self.leases_by_tenant())

    def reshape(self, shape: CacheShape) -> None:
        """Apply a shape with other limits of tenants, or another number of blocks, from now on."""
        self.shape = shape
        self.covering.fit(shape)
        self._limit_tenants()
        if self.is_limited and self.device.owners is None:
            self.device.part_tenants(at_once=True)
        if self.keeps_rows and self.leases.charges is None:
            self.leases.charges = Charges(self.leases_by_tenant().elements())
        self.note_before()

    def _limit_tenants(self) -> None:
        """Take the limits of tenants from the shape."""
        self.is_limited, self.caps_leases = self.shape.limits_tenants, self.shape.caps_leases
        """Whether tenants have minima or maxima; and whether the number of leases of some is limited."""
        self.keeps_rows, self.row_allowances, self.pin_allowances = _allowances(self.shape)
        """Whether rows are kept for tenants, which is so if some have limits; and how many rows and pins are kept."""

    def bound(self, parked_blocks: int) -> None:
        """Note how many blocks of the device pool are out of use."""
        if parked_blocks != self.shape.parked_blocks:
            self.reshape(replace(self.shape, parked_blocks=parked_blocks))

    # Questions ----------------------------------------------------------------------------------------------------

    def tenant_of(self, worker_id: WorkerId) -> int:
        """Return the tenant digest of an attached worker."""
        try:
            return self.workers[worker_id]
        except KeyError:
            raise UnknownWorkerError from None

    def weight_of(self, tenant: int) -> float:
        """Return a tenant's weight: waiting calls of tenants are served in proportion to it."""
        return self.shape.tenants.get(tenant, self.shape.tenant_default).weight

    def lease_of(self, command: OfLease) -> Lease:
        """Return the lease that a command names, if it belongs to the worker that sent the command."""
        lease = self.leases.by_id.get(command.lease_id)  # type: ignore[arg-type]  # None is in no book
        if lease is None:
            raise UnknownLeaseError(resource="lease")
        if lease.worker_id != command.worker_id and (
            lease.members is None or command.worker_id not in lease.members.present
        ):
            raise NotYoursError("the lease belongs to another worker", resource="lease")
        return lease

    @property
    def callers(self) -> Iterator[Waiter]:
        """Go through all calls that hold nothing yet: those that wait for room, then those in `asking`."""
        return chain(self.waiting, (one.waiter for one in self.asking.values()))

    @property
    def is_crowded(self) -> bool:
        """Whether no other call may wait."""
        return len(self.waiting) + len(self.asking) >= self.waiting.max_waiting

    # Effects ------------------------------------------------------------------------------------------------------

    def wake(self, ticket: int | None, result: Reply | KVLeaseError) -> None:
        """Answer a waiting call, if there is one."""
        if ticket is None:
            return
        if self.beside and ticket in self.beside:
            for call in self.beside.pop(ticket):
                self.effects.append(Wake(ticket=call.ticket, result=call.answer(result)))
        else:
            self.effects.append(Wake(ticket=ticket, result=result))

    def wake_caller(self, flight: Flight, result: Reply | KVLeaseError) -> None:
        """Answer the call that waits for a flight, if there is one, even if it waits for other flights, too."""
        ticket, flight.ticket = flight.ticket, None
        self.wake(ticket, result)
        for other in self.flights.values():
            if other.ticket == ticket:
                other.ticket = None

    def tell(self, kind: str, lease: Lease | None = None, *, num_blocks: int = 0) -> None:
        """Tell watchers what happened."""
        if lease is None:
            self.effects.append(Notice(kind=kind, num_blocks=num_blocks))
        else:
            self.effects.append(
                Notice(
                    kind=kind,
                    worker_id=lease.worker_id,
                    lease_id=lease.lease_id,
                    num_blocks=num_blocks,
                )
            )

    def fly(
        self,
        purpose: Purpose,
        sources: Ids,
        targets: Ids,
        *,
        keyed: NDArray[np.bool_] | None = None,
        lease: Lease | None = None,
        remote: Remote | None = None,
    ) -> Flight:
        """Start a batch of copies: hold its sources, and take its free targets into use.

        If the batch moves a lease, the lease holds the targets from the start, too.
        """
        copy_id = CopyId(self.next_id())
        direction = DIRECTIONS[purpose]
        source_pool, target_pool = self.ends(direction)
        keyed = np.zeros(len(targets), np.bool_) if keyed is None else keyed
        self._take_ends(purpose, sources, targets, remote)
        if len(sources) and len(targets) and keyed.any():
            target_pool.records.position[targets] = source_pool.records.position[sources]
        flight = Flight(
            copy_id=copy_id,
            direction=direction,
            purpose=purpose,
            sources=sources,
            targets=targets,
            source_generations=source_pool.records.generation[sources],
            target_generations=target_pool.records.generation[targets],
            keyed=keyed,
            remote_keys=b"" if remote is None else remote.keys,
            lease_id=None if lease is None else lease.lease_id,
        )
        self.flights[copy_id] = flight
        if direction in SOURCE_TIERS and keyed.any():
            flight.is_joinable = True
            self._list_loading(flight)
        self.effects.append(
            Copy(
                copy_id=copy_id,
                direction=direction,
                source_ids=pack(sources),
                target_ids=pack(targets),
                checksums=self._checksums(flight, source_pool),
                labels=self._labels(flight),
            )
        )
        return flight

    def _take_ends(
        self, purpose: Purpose, sources: Ids, targets: Ids, remote: Remote | None
    ) -> None:
        """Hold the sources of a flight, and take its targets into use for the tenant whose bytes they get."""
        direction = DIRECTIONS[purpose]
        source_pool, target_pool = self.ends(direction)
        if direction is Direction.SCRUB:
            target_pool.take(targets, Event.SCRUB)
        elif remote is not None:
            target_pool.take(targets, Event.FILL, remote.tenant)
            target_pool.records.position[targets] = remote.positions
        else:
            source_pool.hold_to_copy(sources)
        if len(sources) and len(targets):
            target_pool.take(
                targets,
                Event.FILL,
                source_pool.tenants_of(sources),
                num_holders=2 if purpose in HELD_BY_LEASES else 1,
            )

    def _list_loading(self, flight: Flight) -> None:
        """List the keys that a flight brings to the device, so that other calls can find it."""
        coming = flight.targets[flight.keyed]
        self.device.expect(coming, self.keys_of(flight, flight.keyed))
        self.loading.add(coming, flight.copy_id)

    def ends(self, direction: Direction) -> tuple[Pool, Pool]:
        """Return the pools that a direction reads and writes; if it lacks one end, no block of that pool is named."""
        return self._ends.get(direction, (self.device, self.device))

    def keys_of(self, flight: Flight, chosen: NDArray[np.bool_]) -> bytes:
        """Return the packed keys of the chosen pairs of a flight."""
        if flight.direction is Direction.FETCH:
            return chosen_keys(flight.remote_keys, chosen)
        return self.ends(flight.direction)[0].keys_of(flight.sources[chosen])

    @staticmethod
    def _checksums(flight: Flight, source_pool: Pool) -> bytes:
        """Return the checksums that the sources' bytes must have, where known; for sources on the device, none are."""
        if flight.direction is Direction.FETCH:
            return bytes(8 * len(flight.targets))
        if flight.direction in (Direction.OFFLOAD, Direction.DUPLICATE, Direction.SCRUB):
            return b""
        return source_pool.records.checksum[flight.sources].tobytes()

    def _labels(self, flight: Flight) -> bytes:
        """Return the labels that a store gets with the blocks of a flight, or must have if they come from it."""
        generations: int | NDArray[np.uint64] = 0
        if flight.direction is Direction.STORE:
            generations = flight.target_generations
        elif flight.direction is Direction.LOAD:
            generations = flight.source_generations
        elif flight.direction not in (Direction.SHARE, Direction.FETCH):
            return b""
        source_pool, target_pool = self.ends(flight.direction)
        pool, ids = source_pool, flight.sources
        if flight.direction is Direction.FETCH:
            pool, ids = target_pool, flight.targets
        keys = flight.remote_keys or pool.keys_of(ids)
        columns = pool.records
        return pack_labels(keys, columns.tenant[ids], columns.position[ids], generations)


def _pools(shape: CacheShape, records: CacheRecords) -> tuple[Pool, Pool, Pool]:
    """Return the device pool, the host pool and the disk store."""
    of_blocks, of_slots = map(compile_transitions, (BLOCK_TRANSITIONS, SLOT_TRANSITIONS))
    num_blocks = shape.num_blocks - shape.null_blocks
    order = make_order(shape.eviction_policy, num_blocks, key_digests(records.device))
    device = Pool(records.device, of_blocks, order, shape.layout_digest, shape.null_blocks)
    host_order, disk_order = LeafFirstLRU(shape.num_slots), LeafFirstLRU(shape.num_disk_slots)
    host = Pool(records.host, of_slots, host_order, shape.layout_digest)
    return device, host, Pool(records.disk, of_slots, disk_order, shape.layout_digest)


def _allowances(shape: CacheShape) -> tuple[bool, Allowances, Allowances]:
    """Return whether rows are kept for tenants, and how many rows and pins are."""
    keeps_rows = shape.limits_tenants or shape.caps_leases
    return keeps_rows, Allowances.of_rows(shape), Allowances.of_pins(shape)


def _history_of(pools: Sequence[Pool]) -> History:
    """Return a history that remembers what leaves each of the tiers from now on; `pools` begin with the top tier."""
    history = History(sum(map(len, pools)))
    for number, pool in enumerate(pools):
        pool.history, pool.tier_number = history, number
    return history


def _ends(device: Pool, host: Pool, disk: Pool) -> dict[Direction, tuple[Pool, Pool]]:
    """Return the pools that each direction reads and writes, unless it involves the device pool alone."""
    return {
        Direction.OFFLOAD: (device, host),
        Direction.RELOAD: (host, device),
        Direction.STORE: (host, disk),
        Direction.LOAD: (disk, device),
        Direction.SHARE: (host, host),
    }


def split_keys(keys: bytes) -> list[bytes]:
    """Return packed keys one by one."""
    return [keys[at : at + BYTES_PER_KEY] for at in range(0, len(keys), BYTES_PER_KEY)]


def chosen_keys(keys: bytes, chosen: NDArray[np.bool_]) -> bytes:
    """Return the chosen ones of packed keys, packed again."""
    if chosen.all():
        return keys
    return np.frombuffer(keys, np.uint8).reshape(-1, BYTES_PER_KEY)[chosen].tobytes()


def pack(ids: NDArray[np.signedinteger]) -> bytes:
    """Return block ids as they travel: packed int32."""
    return ids.astype(np.int32).tobytes()
