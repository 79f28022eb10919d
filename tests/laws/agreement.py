"""What must be true of a lease that ranks share, whatever each of them knows: nobody loses it, and all have written."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.states import State
from tests.laws import needs
from tests.laws.holders import row_of, row_parts
from tests.laws.sharing import Shared, compare_row

if TYPE_CHECKING:
    from tests.laws.world import World


def compare_all(world: "World") -> None:
    """Every rank that lives has the leases that it was granted, with the blocks that it was told of."""
    rows = {
        lease_id: row
        for row, lease_id in enumerate(world.records.rows.lease_id.tolist())
        if lease_id
    }
    for worker in world.workers.values():
        for held in worker.leases.values():
            if held.rank is None or held.is_moving or held.is_evicted:
                continue
            if held.lease_id not in rows:
                world.fail(f"rank {held.rank} lives, and its lease {held.lease_id} does not")
            compare_row(world, held, row_parts(world, rows[held.lease_id]))


def compare_published(
    world: "World", shared: Shared, before: Sequence[Sequence[int]], was_ready: NDArray[np.bool_]
) -> None:
    """No block of a lease has become findable that one of the ranks has not committed."""
    is_new = ~was_ready & (world.records.device.state == State.READY)
    ranks = range(world.shape.num_ranks)
    done = min(shared.done.get(rank, shared.hit_tokens) for rank in ranks)
    for group, part in zip(world.shape.groups, before, strict=True):
        for place, block in enumerate(part):
            if block >= 0 and is_new[block] and (place + 1) * group.tokens_per_block > done:
                world.fail(f"block {block} is findable, and all ranks have committed {done} tokens")


def compare_due(world: "World", command: commands.Commit) -> None:
    """What a commit names, and all ranks have committed, is findable: as this block, or as another under its key."""
    row, shared = row_of(world, command.lease_id), world.shared.get(command.lease_id)
    if row is None or shared is None:
        return
    due = min(shared.is_due.get(rank, 0) for rank in range(world.shape.num_ranks))
    device = world.records.device
    is_cached = np.isin(device.state, (State.READY, State.FILLING))
    cached = {one.tobytes() for one in device.key[is_cached]}
    for at, (group, part) in enumerate(zip(world.shape.groups, row_parts(world, row), strict=True)):
        for place, block in enumerate(part if group.keys_per_block else ()):
            last = (place + 1) * group.keys_per_block - 1 - command.first_block
            key = command.keys[last * BYTES_PER_KEY : (last + 1) * BYTES_PER_KEY]
            is_due = last >= 0 and key and (place + 1) * group.tokens_per_block <= due
            is_findable = block < 0 or device.state[block] == State.READY
            if is_due and not is_findable and needs.kept_under(key, at) not in cached:
                world.fail(
                    f"all ranks have committed {due} tokens, and block {block} is not findable"
                )
