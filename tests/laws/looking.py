"""What an operator sees of a simulated cache: each view is available at any instant, is true, and changes nothing."""

from itertools import pairwise

from kvlease.errors import KVLeaseError, WrongStateError
from kvleased.core import commands
from kvleased.core.effects import Explained, Missed, Tier
from tests.laws.turns import let_nothing_happen
from tests.laws.world import World

_ALL = 1_000


def look_around(world: World) -> None:
    """Look at everything that there is to see."""
    # Work that has been due since a restart begins with the first command, whatever it is.
    let_nothing_happen(world)
    before, cache, now = world.digest(), world.cache, world.now
    census = cache.survey(now).census
    leases = cache.list_leases(0, _ALL, now)
    if [one.lease_id for one in leases] != sorted(world.lease_ids):
        world.fail("the leases that are listed are not those that are there")
    waiting = cache.list_waiting(0, _ALL, now)
    if len(waiting) != census.num_waiting or len(leases) != census.num_leases:
        world.fail("what is listed is not what is counted")
    if sorted(one.position for one in waiting) != [*range(len(waiting))]:
        world.fail("two calls wait at one place")
    if len(cache.list_pins(0, _ALL)) != len(world.cache._state.pins):
        world.fail("the pins that are listed are not those that are there")
    cache.list_magazines(now)
    used = sum(one.used_blocks for one in cache.list_tenants())
    if used > world.shape.usable_blocks:
        world.fail(f"tenants use {used} blocks of {world.shape.usable_blocks}")
    _look_at_tiers(world)
    for lease in leases:
        _explain(world, commands.Explain(worker_id=None, lease_id=lease.lease_id))
    if before != world.digest():
        world.fail("to look at a cache changed it")


def _look_at_tiers(world: World) -> None:
    """Look at each tier as a whole, and at every block of the device."""
    tenants = sorted({worker.tenant for worker in world.workers.values()})
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        world.cache.picture(tier, tenants)
    for block in range(world.shape.null_blocks, world.shape.num_blocks):
        world.cache.block_facts(Tier.DEVICE, block, world.now)


def _explain(world: World, command: commands.Explain) -> None:
    """Ask why a lease's prefix was as long as it was: blocks that were not found are told without a gap."""
    try:
        outcome = world.cache.handle(command, world.now)
    except WrongStateError:
        return
    except KVLeaseError as error:
        world.fail(f"a lease that is listed cannot be explained: {error}")
        return
    world.carry_out(outcome.effects)
    assert isinstance(outcome.reply, Explained)
    world.seen["explained"] += 1
    hit_tokens = sum(outcome.reply.hit_tokens.values())
    misses = [one for one in outcome.reply.misses if not one.num_tokens]
    if misses and misses[0].first_block != hit_tokens // world.shape.hash_tokens:
        world.fail(f"{outcome.reply} does not begin where the prefix ends")
    if any(_end(one) != other.first_block for one, other in pairwise(misses)):
        world.fail(f"{outcome.reply} leaves blocks out")
    for one in misses:
        world.seen[f"missed: {one.reason.value}"] += 1


def _end(run: Missed) -> int:
    return run.first_block + run.num_blocks
