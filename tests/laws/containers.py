"""Start all processes of the simulated node anew: the device is empty, and only what was in files is left."""

from dataclasses import fields, replace
from typing import Final

from kvlease.ids import Epoch
from kvleased.core import Cache, recovery
from kvleased.core.blocks.records import CacheRecords, TierRecords
from kvleased.core.blocks.states import State
from tests.laws.actors import ZERO, is_of
from tests.laws.holders import remember_places
from tests.laws.stores import TORN
from tests.laws.world import World

_SHARE_OF_FILES: Final = 0.5
"""Share of the restarts after which the host pool is still there."""
_SHARE_WIPED: Final = 0.2
"""Share of those after which the disk is a different one."""


def restart_container(world: World) -> None:
    """End all processes and memory, and start a new node: the disk is left, and perhaps the host pool.

    The keys are the same as before, because the secret is in a file, too. The disk must tell anew what it has.
    """
    has_files = world.rng.random() < _SHARE_OF_FILES
    tenants = [worker.tenant for worker in world.workers.values()]
    _forget(world)
    _zero(world.records, world.records.device)
    _zero(world.records, world.records.disk)
    if not has_files:
        world.host = [ZERO] * world.shape.num_slots
        world.flipped.clear()
        _zero(world.records, world.records.host)
    elif world.rng.random() < _SHARE_WIPED:
        world.stores.disk = [(TORN, None)] * world.shape.num_disk_slots
    world.stores.damaged = {
        slot
        for slot, (mark, label) in enumerate(world.stores.disk)
        if label is None or not is_of(mark, label.key)
    }
    recovery.give_back_retired(world.records)
    world.shape = replace(world.shape, parked_blocks=0)
    world.epoch = Epoch(world.epoch + world.rng.randint(1, 3))
    world.cache = remember_places(
        Cache.recovered(world.shape, world.records, world.epoch, {}, world.now)
        if has_files
        else Cache(world.shape, world.records, world.epoch)
    )
    if (world.records.host.state == State.BAD).any():
        world.fail("a slot is out of use because of what was in other memory")
    world.generations = world.count_generations()
    world.check()
    world.check_whole()
    for tenant in tenants:
        world.start_worker(tenant)


def _forget(world: World) -> None:
    """Make everybody forget everything from before."""
    for known in (
        world.workers,
        world.dead_unknown,
        world.jobs,
        world.calls,
        world.pins,
        world.ended,
        world.unsure,
        world.stores.probes,
        world.stores.found,
    ):
        known.clear()
    world.about_to_move = None
    world.device = [ZERO] * world.shape.num_blocks
    world.granted_under = [-1] * world.shape.num_blocks


def _zero(records: CacheRecords, tier: TierRecords) -> None:
    """Set the columns of a tier, and the rows, to those of a new cache."""
    for table in (tier, records.rows, records.kernel_rows, records.magazines):
        for column in fields(table):
            getattr(table, column.name)[...] = 0
