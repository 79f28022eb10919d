"""What others see of a simulated cache, compared with what the world knows: map, lookup, the table and the keys."""

import numpy as np

from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.effects import Found, Mapped, Outcome
from kvleased.core.records import TierRecords
from kvleased.core.states import State
from tests.laws.actors import Held, Mark, Worker
from tests.laws.world import World


def compare_map(world: World, worker: Worker, held: Held) -> None:
    """Let a worker publish a lease's row, and read it there."""
    command = commands.Map(worker_id=worker.worker_id, lease_id=held.lease_id)
    outcome = world.send(command)
    if not isinstance(outcome, Outcome) or not isinstance(outcome.reply, Mapped):
        world.fail("the map of an own lease on the device was refused")
        return
    rows, row = world.records.rows, outcome.reply.row
    published = world.records.kernel_rows.num_published[row, 0]
    count = outcome.reply.num_kernel_blocks
    if rows.lease_id[row] != held.lease_id or published != count:
        world.fail(f"row {row} is not that of the mapped lease {held.lease_id}")
    if rows.block_ids[row, :count].tolist() != held.blocks:
        world.fail(f"row {row} does not list the blocks that lease {held.lease_id} was granted")


def read_table(world: World) -> None:
    """Read every published row as a kernel would: it lists just what the lease's worker was granted."""
    rows, kernel = world.records.rows, world.records.kernel_rows
    for worker in world.workers.values():
        for held in worker.leases.values():
            (found,) = np.nonzero(rows.lease_id == held.lease_id)
            if held.is_moving or not len(found):
                continue
            row = found[0]
            published = kernel.kernel_ids[row, : kernel.num_published[row, 0]].tolist()
            if published not in ([], held.blocks) or (held.is_evicted and published):
                world.fail(f"lease {held.lease_id} is published with blocks {published}")


def compare_lookup(world: World, worker: Worker, keys: list[bytes]) -> None:
    """Look a prefix up: what is found is what the records have, and nothing for another tenant."""
    device, host = _ready(world.records.device), _ready(world.records.host)
    cached = device.keys() | host.keys()
    expected = next((at for at, key in enumerate(keys) if key not in cached), len(keys))
    found = _lookup(world, worker.tenant, keys)
    if found.num_device_blocks + found.num_host_blocks != expected:
        world.fail(f"{expected} blocks of a prefix are cached, and {found} were found")
    if found.num_host_blocks > sum(key not in device for key in keys[:expected]):
        world.fail("blocks on the device were looked for in the host pool")
    foreign = _lookup(world, worker.tenant + 1_000, keys)
    if foreign.num_device_blocks or foreign.num_host_blocks:
        world.fail("a tenant found another tenant's blocks")


def audit(world: World) -> None:
    """Read every block and slot that is findable: it holds the bytes of its key, unless a bit flipped meanwhile."""
    for name, records, memory in (
        ("block", world.records.device, world.device),
        ("slot", world.records.host, world.host),
    ):
        for key, at in _ready(records).items():
            expected: Mark = ("key", key)
            if memory[at] != expected and memory[at][0] != "flipped":
                world.fail(f"{name} {at} is findable and holds {memory[at]}, not {expected}")


def _lookup(world: World, tenant: int, keys: list[bytes]) -> Found:
    outcome = world.send(commands.Lookup(keys=b"".join(keys), tenant_digest=tenant))
    assert isinstance(outcome, Outcome)
    assert isinstance(outcome.reply, Found)
    return outcome.reply


def _ready(records: TierRecords) -> dict[bytes, int]:
    ready = np.flatnonzero(records.state == State.READY)
    packed = records.key[ready].tobytes()
    keys = (packed[at : at + BYTES_PER_KEY] for at in range(0, len(packed), BYTES_PER_KEY))
    return dict(zip(keys, ready.tolist(), strict=True))
