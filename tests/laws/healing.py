"""The end of every simulated history: faults stop, and then everything must be available again.

It shows the liveness laws L1 to L3, L5, L6, L8 and L10 of `docs/reliability.md`.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from kvlease.errors import DrainingError, PoolFullError
from kvlease.groups import most_blocks
from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.blocks.states import State
from kvleased.core.effects import Mover, Outcome, Reserved, Tier
from tests.laws.actors import Worker
from tests.laws.below import answer_one, find_all, mend
from tests.laws.calling import commit_one
from tests.laws.faults import bury_mover
from tests.laws.hanging import may_hang
from tests.laws.mover import land
from tests.laws.needs import cost
from tests.laws.picks import pick_chain
from tests.laws.stores import has_stores
from tests.laws.world import LONGEST_WAIT_SECONDS, World

_ROUNDS: Final = 8
"""Rounds in which everything that waits must end."""
_TRIES: Final = 6
"""How often a caller tries again, each time when it was told to, before it must have been served."""
_COMMITS: Final = 8
"""Commits within which a request is almost always fully computed."""
_OTHER: Final = 2
_REST_SECONDS: Final = 2.0
"""Seconds after which a mover that failed is given work again."""
_UNPINNED: Final = 0.7
_WAIT_MS: Final = 60_000


def heal(world: World) -> None:
    """Stop all faults; then every call is answered, and every live worker can have the whole unpinned tier."""
    _end_faults(world)
    world.end_engines()
    _wait_for_answers(world)
    _end_all_leases(world)
    for worker in world.workers.values():
        _lose_answers(world, worker)
    _settle(world)
    _disown(world)
    _serve_everyone(world)
    for worker in world.workers.values():
        _have_it_all(world, worker)
    _rise(world)
    _need_no_mover(world)
    _obey(world)
    _leave_nothing(world)
    _copy_down(world)
    _drain(world)


def _end_faults(world: World) -> None:
    """Let deaths be noticed, sleepers wake, and the mover end its lost copies, or itself."""
    for worker_id in world.dead_unknown:
        world.send(commands.WorkerDied(worker_id=worker_id))
    world.dead_unknown.clear()
    for worker in world.workers.values():
        worker.is_stalled = False
    world.stores.failures = 0.0
    if world.rng.random() < 0.5:
        for mover in Mover if has_stores(world) else (Mover.MEMORY,):
            bury_mover(world, mover)
    if has_stores(world):
        mend(world)
        find_all(world)
    if Tier.HOST in world.cache._state.tiers_off:
        world.send(commands.TierChanged(tier=Tier.HOST, is_on=True))
    _settle(world, all_of_them=False)
    while world.pins and (world.rng.random() < _UNPINNED or not _is_room_for_one(world)):
        world.send(commands.Unpin(pin_id=world.pins.pop()))


def _is_room_for_one(world: World) -> bool:
    """Tell whether pins leave room for the longest request."""
    most = sum(most_blocks(group, world.longest_tokens) for group in world.shape.groups)
    return sum(world.pinned().values()) + most <= world.shape.usable_blocks


def _settle(world: World, *, all_of_them: bool = True) -> None:
    """Let the movers end their copies, and the remote store answer: all of them, or every other one."""
    while True:
        for probe_id in [one for one in world.stores.probes if all_of_them or one % _OTHER == 0]:
            answer_one(world, probe_id)
        jobs = [job for job in world.jobs.values() if all_of_them or job.copy.copy_id % _OTHER == 0]
        if not jobs:
            return
        land(world, jobs[0])


def _wait_for_answers(world: World) -> None:
    """Let the longest wait pass while every other copy ends; a call that still waits then would wait for ever."""
    for _ in range(_ROUNDS):
        for worker in world.workers.values():
            world.beat(worker)
        world.tick(LONGEST_WAIT_SECONDS / _ROUNDS + 0.1)
        _settle(world, all_of_them=False)
    if world.calls:
        world.fail(f"calls {list(world.calls)} were never answered")
    _settle(world)
    census = world.cache.census()
    if census.num_waiting or census.num_asking or census.num_copies:
        world.fail("something waits or is on its way for nobody")


def _end_all_leases(world: World) -> None:
    for worker in world.workers.values():
        # A call that waits may get the blocks before the release is answered.
        leases, worker.leases = worker.leases, {}
        for lease_id in leases:
            world.send(commands.Release(worker_id=worker.worker_id, lease_id=lease_id))
    world.unsure.clear()


def _lose_answers(world: World, worker: Worker) -> None:
    """Let a worker reserve all there is and never learn what was granted."""
    for at in range(
        1 + world.shape.usable_blocks // cost(world.shape.groups, world.longest_tokens)
    ):
        world.send(_reserve(worker, f"lost-{at}", world.longest_tokens, wait_ms=0))


def _disown(world: World) -> None:
    """Send one heartbeat to learn how far the core has granted, and one to disown what no answer told of."""
    for worker in world.workers.values():
        world.beat(worker)
    world.now += world.shape.lease_seconds / 2
    for worker in world.workers.values():
        world.beat(worker)
    _settle(world)
    if world.known_ids():
        world.fail(f"leases {sorted(world.known_ids())} are left that nobody knows of")


def _serve_everyone(world: World) -> None:
    """Let all workers ask at once for as much as one may have: each is served in its turn, and none is refused."""
    wanted = {f"everyone-{at}": worker for at, worker in enumerate(world.workers.values())}
    for request_id, worker in wanted.items():
        command = _reserve(worker, request_id, world.longest_tokens)
        if has_stores(world):
            chain = pick_chain(
                world, worker.tenant, world.longest_tokens // world.shape.hash_tokens
            )
            command = replace(command, keys=b"".join(chain))
        world.call(worker, command)
    for _ in range(_ROUNDS):
        _settle(world)
        _end_all_leases(world)
    unserved = wanted.keys() - {request_id for _, request_id in world.granted.values()}
    if unserved:
        world.fail(f"of {len(wanted)} that asked at once {sorted(unserved)} were not served")


def _reserve(
    worker: Worker, request_id: str, num_tokens: int, wait_ms: int = _WAIT_MS
) -> commands.Reserve:
    return commands.Reserve(
        worker_id=worker.worker_id,
        request_id=request_id,
        keys=b"",
        num_tokens=num_tokens,
        wait_ms=wait_ms,
    )


def _have_it_all(world: World, worker: Worker) -> None:
    expected = _fill(world, worker)
    got = sum(held.num_blocks for held in worker.leases.values())
    if got != expected:
        world.fail(f"after healing a worker got {got} of {expected} blocks")
    _end_all_leases(world)
    if (world.records.device.state == State.FILLING).any():
        world.fail("something is still being filled")


def _fill(world: World, worker: Worker) -> int:
    """Let a worker ask for all that it may have, as long as a request fits; return how many blocks that is."""
    groups, left = world.shape.groups, world.limit_of(worker)
    expected = 0
    for num_tokens in range(world.longest_tokens, 0, -1):
        num_blocks = cost(groups, num_tokens)
        while num_blocks <= left:
            request_id = f"all-{num_tokens}-{left}"
            world.call(worker, _reserve(worker, request_id, num_tokens))
            _settle(world)
            left -= num_blocks
            expected += num_blocks
    return expected


def _rise(world: World) -> None:
    """Check that a call that has waited long enough is served before a later one, whatever their priorities."""
    holder, *others = world.workers.values()
    if world.shape.limits_tenants or not others:
        return
    _fill(world, holder)
    low = _reserve(others[0], "low", world.longest_tokens)
    world.call(others[0], replace(low, priority=0))
    world.tick(2 * world.shape.ageing_seconds + 1)
    high = _reserve(others[-1], "high", world.longest_tokens)
    world.call(others[-1], replace(high, priority=2))
    for lease_id in list(holder.leases):
        del holder.leases[lease_id]
        world.send(commands.Release(worker_id=holder.worker_id, lease_id=lease_id))
        _settle(world)
    turns = [name for _, (_, name) in sorted(world.granted.items()) if name in ("low", "high")]
    if turns[:1] != ["low"]:
        world.fail(f"of a request that waited and one that came later were served: {turns}")
    _end_all_leases(world)
    _settle(world)
    _end_all_leases(world)


def _need_no_mover(world: World) -> None:
    """Check that, while the memory mover hangs, a tenant's own cached blocks make room and nobody waits for a copy."""
    if not may_hang(world):
        return
    worker = next(iter(world.workers.values()))
    num_tokens, limit = world.longest_tokens, world.limit_of(worker)
    while cost(world.shape.groups, num_tokens) > limit:
        num_tokens -= 1
    for at in range(1 + limit // cost(world.shape.groups, num_tokens)):
        num_keys = num_tokens // world.shape.hash_tokens
        keys = [world.rng.randbytes(BYTES_PER_KEY) for _ in range(num_keys)]
        world.tenant_of_key.update(dict.fromkeys(keys, worker.tenant))
        command = _reserve(worker, f"computed-{at}", num_tokens)
        _compute_one(world, worker, replace(command, keys=b"".join(keys)))
    tenants = world.records.device.tenant[-world.shape.usable_blocks :]
    num_own = np.count_nonzero(np.isin(tenants, (0, worker.tenant)))
    world.send(commands.TierChanged(tier=Tier.HOST, is_on=False))
    world.call(worker, _reserve(worker, "no mover", num_tokens))
    if num_own < cost(world.shape.groups, num_tokens):
        _settle(world)  # a block with another tenant's bytes waits for the mover to zero it
    if "no mover" not in {request_id for _, request_id in world.granted.values()}:
        world.fail("a call waits for a mover that hangs")
    world.send(commands.TierChanged(tier=Tier.HOST, is_on=True))
    _settle(world)
    _end_all_leases(world)
    _settle(world)


def _compute_one(world: World, worker: Worker, command: commands.Reserve) -> None:
    """Let a worker compute and commit a whole request, so that its blocks are cached when it ends."""
    world.call(worker, command)
    _settle(world)
    for held in list(worker.leases.values()):
        for _ in range(_COMMITS):
            commit_one(world, worker, held)
    _end_all_leases(world)
    _settle(world)


def _obey(world: World) -> None:
    """Check that a caller that tries again when it was told to is served within a few tries."""
    for at, worker in enumerate(world.workers.values()):
        command = _reserve(worker, f"obey-{at}", world.longest_tokens, 0)
        for _ in range(_TRIES):
            outcome = world.send(command)
            if isinstance(outcome, Outcome) and isinstance(outcome.reply, Reserved):
                release = commands.Release(
                    worker_id=worker.worker_id, lease_id=outcome.reply.lease_id
                )
                world.send(release)
                break
            assert isinstance(outcome, PoolFullError)
            world.tick((outcome.retry_after_ms or 0) / 1000)
            _settle(world)
        else:
            world.fail("a caller that came again as it was told was never served")
    _settle(world)


def _leave_nothing(world: World) -> None:
    """Check that, when nobody has anything, no block is on its way, and only pins hold blocks."""
    state, census = world.cache._state, world.cache.census()
    if census.num_leases or census.num_waiting or census.num_asking or census.num_copies:
        world.fail(f"something is left: {census}")
    for pool in state.pools:
        if np.isin(pool.records.state, (State.FREE, State.READY, State.BAD), invert=True).any():
            world.fail(f"blocks are in use by nobody: {pool}")
    if state.host.holds.any() or state.disk.holds.any():
        world.fail("slots are held by nobody")


def _copy_down(world: World) -> None:
    """Check that everything that is to be written through is copied down in the end, even after failures."""
    state = world.cache._state
    if not state.dirt.writes_through:
        return
    is_ready, dirt = state.host.records.state == State.READY, state.dirt
    # Each slot that the store does not take makes it rest once before all others have had their turn; and if a copy
    # ends in parts, the next copy begins with the next command.
    for _ in range(len(world.flipped) + 2 + len(state.host)):
        world.tick(_REST_SECONDS)
        _settle(world)
        is_ready = state.host.records.state == State.READY
        if not (dirt.shares and (is_ready & dirt.share).any()):
            break
    is_ready[list(world.flipped)] = False
    if dirt.shares and (is_ready & ~dirt.remote[1]).any():
        world.fail("a slot is never shared")
    is_ready = state.host.records.state == State.READY
    if dirt.stores and state.disk.num_available:
        (slots,) = (is_ready & dirt.store).nonzero()
        if state.host.is_unknown_to(state.disk, slots).any():
            world.fail("a slot is never stored")


def _drain(world: World) -> None:
    """Check that after a drain has begun nothing is granted, and that no call waits to be granted something."""
    worker = next(iter(world.workers.values()))
    if has_stores(world):
        key = world.rng.randbytes(BYTES_PER_KEY)
        asking = _reserve(worker, "asking", world.shape.hash_tokens)
        world.call(worker, replace(asking, keys=key))
        if world.stores.probes:
            world.seen["asked before a drain"] += 1
    world.send(commands.Drain())
    if world.calls:
        world.fail(f"calls {list(world.calls)} wait while nothing is granted")
    if not isinstance(world.send(_reserve(worker, "late", 1)), DrainingError):
        world.fail("a lease was granted after a drain had begun")
    world.send(commands.Drain(is_daemon=True))
    refused = world.send(_reserve(worker, "late", 1))
    if not (isinstance(refused, DrainingError) and refused.resource == "daemon"):
        world.fail("a drain of the daemon is told as one of the cache")
