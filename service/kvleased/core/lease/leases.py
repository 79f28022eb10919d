"""Own the leases of a cache: what each holds, which phase of its life it is in, and its row of the block table.

The row is the only list of a lease's blocks. `covering` tells which places of the row a lease has, and when; `phases`
tells which phase follows which; `states` tells what the phases mean for blocks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.groups import Counts
from kvlease.ids import CopyId, LeaseId, WorkerId
from kvleased.core.blocks.records import NULL, LeaseRows
from kvleased.core.commands import Fork, Reload, Reserve
from kvleased.core.effects import Missed, Tier
from kvleased.core.ids import Ids
from kvleased.core.lease.charges import Charges
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.digests import asked_digest, request_digest
from kvleased.core.lease.kernel_table import KernelTable
from kvleased.core.lease.naming import RowNames
from kvleased.core.lease.phases import BEGINNINGS, MOVING, PHASE_TRANSITIONS, Phase
from kvleased.core.lease.ranks import Member, Members
from kvleased.core.tier.flights import Flight, TierTokens
from kvleased.core.untold import Untold

_ACTIVE: Final = Phase.ACTIVE

NOWHERE: Final[Ids] = np.empty(0, np.intp)

Pieces = tuple[Ids, ...]
"""The entries of a group's places, in pieces that follow one another."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A right to blocks until it is released or its worker is proven dead."""

    lease_id: LeaseId
    worker_id: WorkerId
    """The worker that has the lease; if ranks share it, one of them."""
    tenant: int
    request: Reserve | Fork | None
    """What was asked for; None after a restart."""
    row: int
    phase: Phase
    deadline: float
    """Monotonic seconds at which the lease expires unless renewed."""
    granted_at: float = 0.0
    """Monotonic seconds at which its caller was answered; -inf after a restart, which no waiting answer outlives."""
    tier_tokens: TierTokens = (0, 0, 0, 0)
    """Tokens of its prefix that were found, for each tier: in that tier and those above it."""
    brought: tuple[Flight, ...] = ()
    """While LOADING: the copies that were begun for its prefix, also by earlier tries."""
    skipped: frozenset[Tier] = frozenset()
    """Tiers from which a copy for its prefix has failed."""
    tiers_off: frozenset[Tier] = frozenset()
    """Tiers that did not work when its prefix was looked for."""
    unserved_keys: frozenset[bytes] = frozenset()
    """Keys of failed copies from the remote store, which has no index."""
    untold: Untold | None = None
    """The keys of its call of which the remote store said nothing; None if there are none, or if it was not asked."""
    num_left_before: int = 0
    """Departures, as the history counts them, before the search for its prefix."""
    misses: tuple[Missed, ...] | None = None
    """Why the rest of its prefix was not found; None while nobody has asked."""
    num_shared: int = 0
    """Blocks that a fork shares with its parent."""
    num_copied: int = 0
    """Blocks of the parent that were copied for a fork."""
    num_reloading: int = 0
    """Blocks that the last reload had to copy."""
    pending: set[CopyId] = field(default_factory=set)
    """Copies that must be done before the phase changes."""
    ticket: int | None = None
    """The call that waits for the phase to change."""
    ticket_deadline: float = 0.0
    next_reload: Reload | None = None
    """While EVICTING: the reload that `ticket` stands for, if one waits to bring the lease back once it is down."""
    moving_to: Ids
    """Where the entries of the row go while EVICTING (slots) or RELOADING (blocks), in the order of `blocks_of`."""
    members: Members | None = None
    """The ranks that share it; None if one process calls for all ranks."""

    @property
    def hit_tokens(self) -> tuple[int, int, int, int]:
        """Tokens of its prefix that were found in each tier: device, host, disk and remote."""
        on_device, on_host, on_disk, everywhere = self.tier_tokens
        return on_device, on_host - on_device, on_disk - on_host, everywhere - on_disk

    @property
    def active_worker(self) -> int:
        """The worker of an active lease that no ranks share, else 0; the fast way through a step takes only those."""
        return self.worker_id if self.phase is _ACTIVE and self.members is None else 0

    @property
    def is_on_host(self) -> bool:
        """Whether its row lists slots of the host pool."""
        return self.phase in (Phase.EVICTED, Phase.RELOADING)

    @property
    def holder(self) -> int:
        """Whose request the lease is for: the worker's id, or, if ranks share it, minus the engine's number."""
        return self.worker_id if self.members is None else -self.members.engine


class LeaseBook:
    """All leases, findable by id, by worker and by the engine's request."""

    def __init__(
        self, rows: LeaseRows, covering: Covering, kernel: KernelTable, *, are_charged: bool = False
    ) -> None:
        """Take over unused rows, and the table that shows mapped leases to kernels."""
        self.rows = rows
        self.covering = covering
        self.kernel = kernel
        self.num_blocks: NDArray[np.int32] = rows.num_blocks[:, 0]
        """By row: where the places in use of the first group end; a simple cache has no other group."""
        self._num_published: NDArray[np.int32] = kernel.rows.num_published[:, 0]
        self.by_id: dict[LeaseId, Lease] = {}
        self.by_request: dict[tuple[int, int], LeaseId] = {}
        """By holder and digest of the request; if an engine has asked for a request anew, the newest lease of it."""
        self._older: dict[tuple[int, int], set[LeaseId]] = {}
        """The older leases of requests asked for anew; when the newest one ends, the next newest takes its place."""
        self.by_worker: defaultdict[WorkerId, set[LeaseId]] = defaultdict(set)
        self.charges: Charges | None = Charges([]) if are_charged else None
        """How many leases each tenant has; None if nobody needs to know."""
        self.free_rows: list[int] = list(range(len(rows.lease_id)))[::-1]
        self.names = RowNames(rows.lease_id)
        """The rows that the ids of active leases name, for the fast way through a step."""

    def __len__(self) -> int:
        """Count the leases."""
        return len(self.by_id)

    # Entries ------------------------------------------------------------------------------------------------------

    def blocks_of(self, lease: Lease) -> Ids:
        """Return the entries of the lease's row: block ids, or slot ids while EVICTED or RELOADING.

        They come in the order of the tokens at which they end, over all groups, without places that need no block.
        """
        row = lease.row
        if self.covering.is_simple:
            return self.rows.block_ids[row, : self.num_blocks.item(row)].astype(np.intp)
        return self.entries_at(row, self.places_of(row))

    def num_entries(self, lease: Lease) -> int:
        """Count the entries of the lease's row."""
        if self.covering.is_simple:
            return int(self.num_blocks[lease.row])
        return len(self.places_of(lease.row))

    def packed(self, row: int) -> bytes:
        """Return the entries of a row of a simple cache as replies carry them: packed int32."""
        return self.rows.block_ids[row, : self.num_blocks.item(row)].tobytes()

    def places_of(self, row: int) -> Ids:
        """Return the places of a row that have a block, in the order of the tokens at which they end."""
        used = self.covering.used(self.rows.num_blocks[row].tolist())
        used = used[self.rows.block_ids[row, used] != NULL]
        in_order: Ids = used[self.covering.end_tokens[used].argsort(kind="stable")]
        return in_order

    def entries_at(self, row: int, places: Ids) -> Ids:
        """Return the entries at some places of a row."""
        entries: Ids = self.rows.block_ids[row, places].astype(np.intp)
        return entries

    def part(self, row: int, group: int) -> NDArray[np.int32]:
        """Return a view of a group's part of a row, with all of its places, to be read or written."""
        start = self.covering.starts[group]
        end = start + self.covering.groups[group].table_blocks
        part: NDArray[np.int32] = self.rows.block_ids[row, start:end]
        return part

    def parts_of(self, row: int) -> list[NDArray[np.int32]]:
        """Return for each group the entries of the places in use, NULL where no block is needed."""
        ends = self.rows.num_blocks[row].tolist()
        return [self.part(row, group)[:end] for group, end in enumerate(ends)]

    def find(self, holder: int, request_id: str) -> Lease | None:
        """Return the live lease of a holder's request."""
        lease_id = self.by_request.get((holder, request_digest(request_id)))
        return None if lease_id is None else self.by_id[lease_id]

    def open(
        self,
        lease: Lease,
        request_id: str,
        parts: Sequence[Pieces],
        num_tokens: int,
        num_computed: int,
    ) -> None:
        """Write a new lease's row and make the lease known; the blocks must already be in their states.

        `parts` are the entries of each group, from its first place on.
        """
        assert lease.phase in BEGINNINGS, f"no lease begins as {lease.phase.name}"
        rows, row = self.rows, lease.row
        digest = request_digest(request_id)
        # One number is read in a tenth of the time that a row takes.
        if not self.covering.is_simple or self._num_published.item(row):
            self.kernel.clear(row)
        rows.worker_id[row] = lease.worker_id
        rows.request_digest[row] = digest
        rows.asked[row] = 0 if lease.request is None else asked_digest(lease.request)
        rows.num_tokens[row] = num_tokens
        rows.num_computed[row] = rows.hit_tokens[row] = num_computed
        for group, pieces in enumerate(parts):
            start = end = self.covering.starts[group]
            for piece in pieces:
                rows.block_ids[row, end : end + len(piece)] = piece
                end += len(piece)
            rows.num_blocks[row, group] = end - start
        if lease.members is not None:
            ends = rows.num_blocks[row].tolist()
            lease.members.begin(lease.lease_id, ends, num_tokens, num_computed)
            self._write_members(lease, lease.members)
        rows.phase[row] = lease.phase
        rows.lease_id[row] = lease.lease_id
        self.adopt(lease, digest)

    def adopt(self, lease: Lease, digest: int) -> None:
        """Make a lease known; its row must already be written."""
        self.by_id[lease.lease_id] = lease
        if self.charges is not None:
            self.charges.charge(lease.tenant)
        self.names.name(lease.lease_id, lease.row, lease.active_worker)
        if lease.members is not None:
            self._adopt_shared(lease, lease.members, digest)
            return
        self.by_request[lease.worker_id, digest] = lease.lease_id
        self.by_worker[lease.worker_id].add(lease.lease_id)

    def append(self, lease: Lease, blocks: Ids, num_tokens: int) -> None:
        """Add blocks, already in their states, to the end of a lease's row in a simple cache."""
        rows, row = self.rows, lease.row
        before = int(self.num_blocks[row])
        after = before + len(blocks)
        rows.block_ids[row, before:after] = blocks
        rows.num_tokens[row] = num_tokens
        self.num_blocks[row] = after
        self.kernel.append(row, 0, before, blocks)

    def append_many(
        self,
        rows: NDArray[np.intp],
        counts: NDArray[np.int32],
        blocks: Ids,
        num_tokens: NDArray[np.int32],
    ) -> None:
        """Add blocks, already in their states, to the ends of several rows: `counts[i]` of them to `rows[i]`.

        This is for simple caches; `growing` is for all caches.
        """
        columns = self.rows
        before = self.num_blocks[rows]
        after = before + counts
        if len(blocks) == len(rows):
            columns.block_ids[rows, before] = blocks
        else:
            starts = before - counts.cumsum() + counts
            within = starts.repeat(counts) + np.arange(len(blocks))
            columns.block_ids[rows.repeat(counts), within] = blocks
        columns.num_tokens[rows] = num_tokens
        self.num_blocks[rows] = after
        if self.kernel.is_used:
            self.kernel.append_many(rows, before[:, None], counts[:, None], blocks)

    def give_back(self, lease: Lease, num_computed: int) -> Ids:
        """Empty the places that no token after `num_computed` needs; return their blocks, ordered by where they end."""
        rows, row = self.rows, lease.row
        before = int(rows.num_computed[row])
        # A crash from here on leaves blocks at these places; recovery empties them.
        rows.num_computed[row] = num_computed
        left: list[NDArray[np.int32]] = []
        ends: list[Counts] = []
        for group in self.covering.giving_back:
            part = self.part(row, group)
            first = self.covering.first_needed(group, before)
            end = self.covering.first_needed(group, num_computed)
            end = min(end, int(rows.num_blocks[row, group]))
            if first >= end:
                continue
            held = first + (part[first:end] != NULL).nonzero()[0]
            left.append(part[held])
            ends.append(self.covering.end_tokens[self.covering.starts[group] + held])
            part[first:end] = NULL
            self.kernel.give_back(row, group, first, end)
        if not left:
            return NOWHERE
        order = np.concatenate(ends).argsort(kind="stable")
        return np.concatenate(left)[order].astype(np.intp)

    def enter(self, lease: Lease, phase: Phase) -> None:
        """Change a lease's phase: one transition of the table."""
        assert phase in PHASE_TRANSITIONS[lease.phase], f"{phase.name} after {lease.phase.name}"
        lease.phase = phase
        self.rows.phase[lease.row] = phase
        self.names.give(lease.row, lease.active_worker)

    def rewrite(self, lease: Lease, entries: Ids, phase: Phase) -> None:
        """Replace the entries of a lease's row, in the order of `blocks_of`.

        A crash in between leaves a row that a restart does not believe.
        """
        rows, row = self.rows, lease.row
        self.kernel.clear(row)
        rows.phase[row] = MOVING
        self.put(row, entries)
        self.enter(lease, phase)

    def put(self, row: int, entries: Ids) -> None:
        """Write the entries of a row that is not published to kernels."""
        if self.covering.is_simple:
            self.rows.block_ids[row, : len(entries)] = entries
        else:
            self.rows.block_ids[row, self.places_of(row)] = entries

    def close(self, lease: Lease) -> None:
        """Forget a lease; the caller ends its holds on blocks."""
        self.rows.lease_id[lease.row] = 0
        self.names.give(lease.row, 0)
        del self.by_id[lease.lease_id]
        if self.charges is not None:
            self.charges.refund(lease.tenant)
        if lease.members is None:
            del self.by_request[lease.worker_id, int(self.rows.request_digest[lease.row])]
            self.by_worker[lease.worker_id].discard(lease.lease_id)
        else:
            self._close_shared(lease, lease.members)
        self.free_rows.append(lease.row)

    # Leases that ranks share --------------------------------------------------------------------------------------

    def share(self, lease: Lease, members: Members, member: Member) -> None:
        """Let a rank share a lease."""
        members.join(member)
        self._write_members(lease, members)
        self.by_worker[member.worker_id].add(lease.lease_id)

    def unshare(self, lease: Lease, members: Members, worker_id: WorkerId) -> None:
        """Take a rank out of a lease that other ranks keep."""
        members.part(worker_id, has_learned=lease.phase is not Phase.LOADING)
        lease.worker_id = next(iter(members.present))
        self._write_members(lease, members)
        self.by_worker[worker_id].discard(lease.lease_id)

    def _adopt_shared(self, lease: Lease, members: Members, digest: int) -> None:
        key = (lease.holder, digest)
        other_id = self.by_request.get(key)
        if other_id is not None:
            self._older.setdefault(key, set()).add(min(other_id, lease.lease_id))
        self.by_request[key] = max(other_id or lease.lease_id, lease.lease_id)
        for worker_id in members.present:
            self.by_worker[worker_id].add(lease.lease_id)

    def _close_shared(self, lease: Lease, members: Members) -> None:
        rows, row = self.rows, lease.row
        rows.engine[row] = rows.ranks[row] = rows.ranks_ever[row] = 0
        key = (lease.holder, int(rows.request_digest[row]))
        older = self._older.pop(key, set())
        if self.by_request[key] != lease.lease_id:
            older.remove(lease.lease_id)
        elif older:
            self.by_request[key] = max(older)
            older.remove(self.by_request[key])
        else:
            del self.by_request[key]
        if older:
            self._older[key] = older
        for worker_id in members.present:
            self.by_worker[worker_id].discard(lease.lease_id)

    def _write_members(self, lease: Lease, members: Members) -> None:
        """Write into a row which ranks share its lease."""
        rows, row = self.rows, lease.row
        rows.worker_id[row] = lease.worker_id
        # Written before `ranks`, so that a crash in between cannot leave out a rank that is there.
        rows.ranks_ever[row] = members.mask_ever
        rows.engine[row], rows.ranks[row] = members.engine, members.mask
