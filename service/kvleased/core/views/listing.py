"""Own the lists of leases, pins and magazines that people read; `census` counts how many there are."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from kvlease.ids import LeaseId, PinId, WorkerId
from kvleased.core.lease.leases import Lease
from kvleased.core.magazines import contents, id_of
from kvleased.core.state import CacheState
from kvleased.core.tenancy.keeping import only_owner
from kvleased.core.tenancy.tenants import is_foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """One lease at one instant; its keys and tokens are not shown."""

    lease_id: LeaseId
    worker_id: WorkerId
    tenant_digest: int
    request_digest: int
    """64 bits that stand for the engine's request id."""
    phase: str
    num_blocks: int
    """Blocks that its row lists, or slots while it is in the host pool."""
    num_tokens: int
    age_seconds: float | None
    """None if it was granted in an earlier life of the daemon."""
    seconds_left: float
    """Seconds until it expires unless it is renewed; 0 if it has expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinFacts:
    """One pin."""

    pin_id: PinId
    num_blocks: int
    tenant_digest: int
    """The tenant whose blocks it holds; 0 if they are of several tenants."""
    pinned_at: float
    """Monotonic seconds at which it was made."""


def list_leases(state: CacheState, after_id: int, limit: int, now: float) -> tuple[LeaseFacts, ...]:
    """Return up to `limit` leases whose ids are above `after_id`, by id."""
    page = _page(state.leases.by_id, after_id, limit)
    return tuple(_facts(state, state.leases.by_id[LeaseId(number)], now) for number in page)


def list_pins(
    state: CacheState, after_id: int, limit: int, tenant: int | None = None
) -> tuple[PinFacts, ...]:
    """Return up to `limit` pins whose ids are above `after_id`, by id; with a tenant, only those of its own blocks."""
    own = [one for one, blocks in state.pins.items() if not is_foreign(state, blocks, tenant)]
    page = [PinId(number) for number in _page(own, after_id, limit)]
    return tuple(_pin(state, one) for one in page)


def _pin(state: CacheState, pin_id: PinId) -> PinFacts:
    blocks = state.pins[pin_id]
    return PinFacts(
        pin_id=pin_id,
        num_blocks=len(blocks),
        tenant_digest=only_owner(state, blocks),
        pinned_at=state.pins.made_at[pin_id],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MagazineFacts:
    """One magazine at one instant."""

    magazine_id: int
    """Its place plus one."""
    name: int
    """64 bits that stand for the name under which its processes attached."""
    tenant_digest: int
    worker_ids: tuple[WorkerId, ...]
    num_private: int
    num_held: int
    """Findable blocks."""
    sequence: int
    """The sequence of its last exchange."""
    age_seconds: float | None
    """Seconds since that exchange; None if it was in an earlier life of the daemon, or never."""


def list_magazines(state: CacheState, now: float) -> tuple[MagazineFacts, ...]:
    """Return all magazines, by place."""
    book = state.magazines
    blocks = {place: counts for place, *counts in contents(book, state.device.records.state)}
    return tuple(
        MagazineFacts(
            magazine_id=id_of(one.place),
            name=one.name,
            tenant_digest=one.tenant,
            worker_ids=tuple(sorted(one.workers)),
            num_private=blocks[one.place][0],
            num_held=blocks[one.place][1],
            sequence=int(book.records.sequence[one.place]),
            age_seconds=None if one.exchanged_at is None else now - one.exchanged_at,
        )
        for one in sorted(book.by_name.values(), key=lambda one: one.place)
    )


def _page(ids: Iterable[int], after_id: int, limit: int) -> list[int]:
    return sorted(one for one in ids if one > after_id)[:limit]


def _facts(state: CacheState, lease: Lease, now: float) -> LeaseFacts:
    rows, row = state.leases.rows, lease.row
    return LeaseFacts(
        lease_id=lease.lease_id,
        worker_id=lease.worker_id,
        tenant_digest=lease.tenant,
        request_digest=int(rows.request_digest[row]),
        phase=lease.phase.name.lower(),
        num_blocks=len(state.leases.blocks_of(lease)),
        num_tokens=int(rows.num_tokens[row]),
        age_seconds=now - lease.granted_at if isfinite(lease.granted_at) else None,
        seconds_left=max(0.0, lease.deadline - now),
    )
