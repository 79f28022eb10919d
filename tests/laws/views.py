"""What others see of a simulated cache, compared with what the world knows: map, lookup, the table and the keys."""

import numpy as np

from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.blocks.records import TierRecords
from kvleased.core.blocks.states import State
from kvleased.core.effects import Found, Mapped, Outcome, Tier
from kvleased.core.tier.flights import SOURCE_TIERS
from tests.laws.actors import Held, Worker, is_of
from tests.laws.answers import numbers
from tests.laws.holders import row_of, row_parts
from tests.laws.needs import has_prefix, hit_places, kept_under
from tests.laws.sharing import compare_row
from tests.laws.stores import Label
from tests.laws.world import World


def compare_map(world: World, worker: Worker, held: Held) -> None:
    """Let a worker publish a lease's row, and read it there."""
    command = commands.Map(worker_id=worker.worker_id, lease_id=held.lease_id)
    outcome = world.send(command)
    if not isinstance(outcome, Outcome) or not isinstance(outcome.reply, Mapped):
        world.fail("the map of an own lease on the device was refused")
        return
    row, groups = outcome.reply.row, world.shape.groups
    if world.records.rows.lease_id[row] != held.lease_id:
        world.fail(f"row {row} is not that of the mapped lease {held.lease_id}")
    known = _known(world, held, row)
    counts = [
        len(part) * group.kernel_blocks_per_block for part, group in zip(known, groups, strict=True)
    ]
    told = numbers(outcome.reply.kernel_blocks) or [outcome.reply.num_kernel_blocks]
    if told != counts or sum(counts) != outcome.reply.num_kernel_blocks:
        world.fail(f"lease {held.lease_id} is mapped with {told} kernel blocks, not {counts}")
    if row_parts(world, row) != known:
        world.fail(f"row {row} does not list the blocks that lease {held.lease_id} was granted")
    if _as_kernels_read(world, row) != _expanded(world, known):
        world.fail(f"kernels read other blocks than lease {held.lease_id} was granted")


def _known(world: World, held: Held, row: int) -> list[list[int]]:
    """Return the blocks that a row must list: those that the worker knows or, if ranks share it, those of all ranks."""
    if held.rank is None:
        return held.parts
    parts = row_parts(world, row)
    compare_row(world, held, parts)
    return parts


def read_table(world: World) -> None:
    """Read every published row as a kernel would, and check that it lists just what the lease's worker was granted."""
    kernel = world.records.kernel_rows
    if (kernel.sequence & 1).any():
        world.fail("a kernel row is being written")
    for worker in world.workers.values():
        for held in worker.leases.values():
            row = row_of(world, held.lease_id)
            # A rank that has not asked for its lease again does not know that another rank has brought it back.
            is_unknown = held.rank is not None and held.is_evicted
            if held.is_moving or is_unknown or row is None:
                continue
            is_published = bool(kernel.num_published[row].any())
            if is_published and held.is_evicted:
                world.fail(f"lease {held.lease_id} is published while it is in the host pool")
            if is_published and _as_kernels_read(world, row) != _expanded(
                world, _known(world, held, row)
            ):
                world.fail(f"kernels read other blocks than lease {held.lease_id} has")


def _as_kernels_read(world: World, row: int) -> list[list[int]]:
    """Return the kernel blocks of each group that are in a row."""
    kernel, start, parts = world.records.kernel_rows, 0, []
    for at, group in enumerate(world.shape.groups):
        end = start + int(kernel.num_published[row, at])
        parts.append(kernel.kernel_ids[row, start:end].tolist())
        start += group.table_blocks * group.kernel_blocks_per_block
    return parts


def _expanded(world: World, parts: list[list[int]]) -> list[list[int]]:
    """Return the kernel blocks that these blocks consist of; at a place without a block, kernels read block 0."""
    return [
        [
            max(block, 0) * group.kernel_block_stride + within
            for block in part
            for within in range(group.kernel_blocks_per_block)
        ]
        for group, part in zip(world.shape.groups, parts, strict=True)
    ]


def _on_the_way(world: World, tenant: int) -> set[bytes]:
    """Return the keys that copies bring to the device for a tenant, without those from a tier that is off.

    A call joins neither a copy from such a tier, nor one that another tenant has asked for with stolen keys.
    """
    state, device = world.cache._state, world.records.device
    blocks = state.loading.blocks
    works = [
        SOURCE_TIERS[state.flights[copy_id].direction] not in state.tiers_off
        for copy_id in state.loading.copy_ids(blocks)
    ]
    own = blocks[np.array(works, np.bool_) & (device.tenant[blocks] == tenant)]
    return {key.tobytes() for key in device.key[own]}


def compare_lookup(world: World, worker: Worker, keys: list[bytes]) -> None:
    """Look up a prefix, and check that exactly what the records have is found, and nothing for another tenant."""
    off = world.cache._state.tiers_off
    device = _ready(world.records.device)
    host = _ready(world.records.host) if Tier.HOST not in off else {}
    disk = _ready(world.records.disk) if Tier.DISK not in off else {}
    tenants = world.records.disk.tenant
    disk = {key: slot for key, slot in disk.items() if tenants[slot] == worker.tenant}
    loading = _on_the_way(world, worker.tenant)
    cached = device.keys() | host.keys() | disk.keys() | loading
    groups, hit_tokens = world.shape.groups, world.shape.hit_tokens
    most = len(keys) * world.shape.hash_tokens // hit_tokens * hit_tokens
    if not world.shape.shares_prefixes:
        most = 0
    expected = next(
        tokens
        for tokens in range(most, -1, -hit_tokens)
        if has_prefix(groups, keys, cached, tokens)
    )
    found = _lookup(world, worker.tenant, keys)
    num_blocks = sum(len(places) for places in hit_places(groups, expected))
    if found.hit_tokens != expected:
        world.fail(f"{expected} tokens of a prefix are cached, and {found.hit_tokens} were found")
    if found.num_device_blocks + found.num_host_blocks + found.num_disk_blocks != num_blocks:
        world.fail(f"{num_blocks} blocks of a prefix are cached, and {found} were found")
    places = enumerate(hit_places(groups, expected))
    wanted = [
        kept_under(keys[(place + 1) * groups[at].keys_per_block - 1], at)
        for at, of_group in places
        for place in of_group
    ]
    if found.num_host_blocks > sum(key not in device for key in wanted):
        world.fail("blocks on the device were looked for in the host pool")
    if found.num_disk_blocks > sum(key not in device and key not in host for key in wanted):
        world.fail("blocks of the pools were looked for on disk")
    foreign = _lookup(world, worker.tenant + 1_000, keys)
    if foreign.num_device_blocks or foreign.num_host_blocks or foreign.num_disk_blocks:
        world.fail("a tenant found another tenant's blocks")


def audit(world: World) -> None:
    """Check that every findable block and slot holds the bytes of its key, unless a bit flipped meanwhile."""
    for name, records, memory in (
        ("block", world.records.device, world.device),
        ("slot", world.records.host, world.host),
    ):
        for key, at in _ready(records).items():
            mark = memory[at]
            if mark[0] != "flipped" and not is_of(mark, key):
                world.fail(f"{name} {at} is findable and holds {mark}, not the bytes of {key!r}")
    _audit_disk(world)
    audit_shared(world)


def audit_shared(world: World) -> None:
    """Check that what counts as shared was in the remote store, by key alone: a false label may name another tenant."""
    records = (world.records.device, world.records.host, world.records.disk)
    ever_shared = {key for _, key in world.stores.ever_shared}
    for tier, marks in zip(records, world.cache._state.dirt.remote, strict=True):
        for key, at in _ready(tier).items() if marks.size else ():
            if marks[at] and key not in ever_shared:
                world.fail(f"{key!r} counts as shared and never was")


def _audit_disk(world: World) -> None:
    """Check that every findable disk slot has its label and bytes on disk, unless it was damaged."""
    records = world.records.disk
    for key, slot in _ready(records).items():
        if slot in world.stores.damaged:
            continue
        told = Label(
            key,
            int(records.tenant[slot]),
            int(records.generation[slot]),
            int(records.position[slot]),
        )
        mark, label = world.stores.disk[slot]
        if label != told or not is_of(mark, key):
            world.fail(f"disk slot {slot} is findable as {told} and holds {mark}, labelled {label}")


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
