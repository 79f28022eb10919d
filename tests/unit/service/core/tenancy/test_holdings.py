"""Laws of holdings: what a refusal says of who has the blocks adds up, is true, and names no other tenant."""

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import Holding, KVLeaseError
from kvlease.ids import CopyId, LeaseId, PinId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.pool import Pool
from kvleased.core.effects import Copy
from kvleased.core.tenancy.holdings import holdings
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    STRANGER,
    TENANT,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reserve,
    cached,
    committed,
    evict,
    evicted,
    keys,
    land,
    leases_of,
    on_host,
    release,
    reload,
    reload_keys,
    reserve,
    the_copy,
    tick,
)

Held = list[tuple[str, str, int]]


def held(cache: Cache, *, tenant: int | None = TENANT, host: bool = False) -> Held:
    """Return the holdings of a pool as a tenant is told them."""
    cache.settle()
    state = cache._state
    pool = state.host if host else state.device
    return sorted(astuple(one) for one in holdings(state, pool, tenant))


def test_everything_of_a_new_cache_is_free() -> None:
    """Before the first call all blocks are free; null blocks are not counted."""
    assert held(a_cache(8, null_blocks=2)) == [("nobody", "free", 6)]


def test_leases_are_told_by_owner() -> None:
    """A tenant learns what its own workers have, and what all other tenants have together."""
    cache = a_cache(8)
    reserve(cache, 1, "a")
    reserve(cache, 2, "b", worker_id=MATE)
    reserve(cache, 4, "c", worker_id=STRANGER)

    assert held(cache) == [("nobody", "free", 1), ("others", "leased", 4), ("you", "leased", 3)]
    assert held(cache, tenant=None) == [("nobody", "free", 1), ("others", "leased", 7)]


def test_cached_and_pinned_blocks_are_told_apart() -> None:
    """Pinned blocks are told apart from cached ones that may leave; pinned blocks that a lease holds too are leased."""
    cache = a_cache(8)
    cached(cache, keys(1, 2, 3))
    cache.handle(c.Pin(keys=keys(1, 2)), 0.0)
    assert held(cache) == [("nobody", "free", 5), ("you", "cached", 1), ("you", "pinned", 2)]

    reserve(cache, 2, "r", keys(1))

    assert held(cache) == [
        ("nobody", "free", 4), ("you", "cached", 1), ("you", "leased", 2), ("you", "pinned", 1),
    ]  # fmt: skip


def test_blocks_on_their_way_down_are_copying() -> None:
    """Blocks that a copy takes from a leaving lease are copying, also in the host pool, not leased or cached."""
    cache = a_cache(4, 8)
    lease = committed(cache, keys(1, 2), more=1)
    down = the_copy(evict(cache, lease.lease_id))
    assert held(cache) == [("nobody", "free", 1), ("you", "copying", 3)]
    assert held(cache, host=True) == [("nobody", "free", 5), ("you", "copying", 3)]

    land(cache, down)

    assert held(cache) == [("nobody", "free", 4)]
    assert held(cache, host=True) == [("nobody", "free", 5), ("you", "leased", 3)]


def test_blocks_of_a_lease_that_ended_on_its_way_down_are_copying() -> None:
    """If a copy outlives its lease, the blocks that it holds are copying."""
    cache = a_cache(4, 8)
    lease = reserve(cache, 2)
    evict(cache, lease.lease_id)

    release(cache, lease.lease_id)

    assert held(cache) == [("nobody", "free", 2), ("you", "copying", 2)]


def test_pinned_blocks_that_are_copied_are_copying() -> None:
    """A pinned block that a copy reads counts once, as copying."""
    cache = a_cache(4, 8)
    cached(cache, keys(1, 2))
    cache.handle(c.Evict(keys=keys(1, 2)), 0.0)

    cache.handle(c.Pin(keys=keys(1)), 0.0)

    assert held(cache) == [("nobody", "free", 2), ("you", "copying", 2)]


def test_blocks_on_their_way_up_are_copying() -> None:
    """Blocks that a copy fills are copying; so are their sources in the host pool, unless a lease has those."""
    cache = a_cache(4, 8)
    on_host(cache, keys(1, 2))
    reload_keys(cache, keys(1, 2))

    assert held(cache) == [("nobody", "free", 2), ("you", "copying", 2)]
    assert held(cache, host=True) == [("nobody", "free", 6), ("you", "copying", 2)]


def test_quarantine_scrubbing_and_damage_are_told() -> None:
    """Quarantined, scrubbing and retired blocks are each told by a word of their own."""
    cache = a_cache(4, 4)
    lease = evicted(cache, keys(1), worker_id=STRANGER)
    land(cache, the_copy(reload(cache, lease.lease_id, worker_id=STRANGER)), failed=(0,))
    reserve(cache, 2, "late", worker_id=MATE)
    tick(cache, LEASE_SECONDS)
    cache.handle(a_reserve(2, wait_ms=WAIT_MS), LEASE_SECONDS)

    assert held(cache) == [
        ("nobody", "free", 1), ("nobody", "scrubbing", 1), ("you", "quarantined", 2),
    ]  # fmt: skip
    assert held(cache, host=True) == [("nobody", "bad", 1), ("nobody", "free", 3)]


# The law --------------------------------------------------------------------------------------------------------------

WORKERS = (WORKER, MATE, STRANGER)


class Walk:
    """A cache that random acts bring into random states."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.cache = a_cache(8, 6, null_blocks=1, table_blocks=4)
        self.copies: dict[CopyId, Copy] = {}
        self.now = 0.0

    def send(self, command: c.Command) -> None:
        """Send a command to the cache, and keep the copies that it starts."""
        effects = self.cache.take_effects()
        try:
            effects += self.cache.handle(command, self.now).effects
        except KVLeaseError:
            effects += self.cache.take_effects()
        self.copies.update({one.copy_id: one for one in effects if isinstance(one, Copy)})

    def act(self, kind: str, worker_id: WorkerId, pick: int) -> None:
        """Do one thing."""
        own = leases_of(self.cache, worker_id)
        lease_id = LeaseId(own[pick % len(own)] if own else 1)
        chain = keys(*(worker_id // 3 * 100 + at for at in range(1 + pick % 4)))
        if kind == "reserve":
            wait_ms = WAIT_MS * (pick % 2)
            self.send(
                a_reserve(1 + pick % 4, f"{pick} {self.now}", worker_id=worker_id, wait_ms=wait_ms)
            )
        elif kind == "prefix":
            self.send(
                a_reserve(4, f"{pick} {self.now}", chain, worker_id=worker_id, wait_ms=WAIT_MS)
            )
        elif kind == "commit":
            self._commit(worker_id, lease_id, chain)
        elif kind in ("land", "fail", "lose") and self.copies:
            self._end(kind, [*self.copies][pick % len(self.copies)])
        elif kind == "time":
            self.now += pick * 5
            self.send(c.Tick())
        else:
            pin_id = min(self.cache._state.pins, default=PinId(0))
            commands: dict[str, c.Command] = {
                "release": c.Release(worker_id=worker_id, lease_id=lease_id),
                "evict": c.Evict(worker_id=worker_id, lease_id=lease_id),
                "reload": c.Reload(worker_id=worker_id, lease_id=lease_id, wait_ms=WAIT_MS),
                "prefetch": c.Reload(worker_id=worker_id, keys=chain),
                "displace": c.Evict(keys=chain),
                "pin": c.Pin(keys=chain),
                "unpin": c.Unpin(pin_id=pin_id),
            }
            self.send(commands.get(kind, c.Tick()))

    def _commit(self, worker_id: WorkerId, lease_id: LeaseId, chain: bytes) -> None:
        num_tokens = len(chain) // 32 * 4
        self.send(
            c.Commit(
                worker_id=worker_id,
                lease_id=lease_id,
                num_tokens=num_tokens,
                first_block=0,
                keys=chain,
            )
        )

    def _end(self, kind: str, copy_id: CopyId) -> None:
        if kind == "lose":
            self.send(c.CopyLost(copy_id=copy_id))
            return
        del self.copies[copy_id]
        self.send(c.CopyDone(copy_id=copy_id) if kind == "land" else c.CopyFailed(copy_id=copy_id))


KINDS = (
    "reserve", "prefix", "commit", "release", "evict", "reload", "prefetch", "displace", "pin", "unpin", "land", "fail",
    "lose", "time",
)  # fmt: skip
walks = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(WORKERS), st.integers(0, 7)), max_size=40
)


@given(walks)
def test_holdings_add_up(acts: list[tuple[str, WorkerId, int]]) -> None:
    """In every state of a cache, and whoever asks, the holdings are all blocks that can be granted, each once."""
    walk = Walk()
    for act in acts:
        walk.act(*act)
    walk.cache.settle()
    state = walk.cache._state
    for tenant in (TENANT, None):
        for pool in (state.device, state.host):
            told = holdings(state, pool, tenant)

            assert sum(one.num_blocks for one in told) == pool.num_usable
            assert all(one.num_blocks > 0 for one in told)
            assert len({(one.owner, one.state) for one in told}) == len(told)
            _compare(pool, _by_state(told))


def _by_state(told: tuple[Holding, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in told:
        counts[one.state] = counts.get(one.state, 0) + one.num_blocks
    return counts


def _compare(pool: Pool, told: dict[str, int]) -> None:
    """Assert that free and cached blocks are the available ones, and that states of one word have the pool's counts."""
    counts = pool.counts()
    assert told.get("free", 0) + told.get("cached", 0) == pool.num_available
    for word in ("free", "quarantined", "scrubbing", "bad"):
        assert told.get(word, 0) == counts[word]
