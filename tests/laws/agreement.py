"""Laws of a lease that ranks share: nobody loses it, all have written it, and nobody wants what leaves it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlease.groups import Keeps
from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.blocks.states import State
from tests.laws import needs
from tests.laws.actors import Held
from tests.laws.holders import row_of, row_parts
from tests.laws.sharing import Shared, compare_row

if TYPE_CHECKING:
    from tests.laws.world import World


def compare_all(world: "World") -> None:
    """Check that every living rank has the leases that it was granted, with the blocks that it was told of."""
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
    """Check that no block of a lease has become findable before all of its ranks have committed it."""
    is_new = ~was_ready & (world.records.device.state == State.READY)
    ranks = range(world.shape.num_ranks)
    done = min(shared.done.get(rank, shared.hit_tokens) for rank in ranks)
    stops = set.intersection(*(shared.stops.get(rank, set()) for rank in ranks))
    for group, part in zip(world.shape.groups, before, strict=True):
        for place, block in enumerate(part):
            if block < 0 or not is_new[block]:
                continue
            end_tokens = (place + 1) * group.tokens_per_block
            if end_tokens > done:
                world.fail(f"block {block} is findable, and all ranks have committed {done} tokens")
            if group.keeps is Keeps.STATE and end_tokens not in stops:
                world.fail(
                    f"a state of {end_tokens} tokens is findable, and all stopped at {stops}"
                )


def _due(world: "World", shared: Shared) -> int:
    """Return the tokens up to which all ranks have committed everything; if there are states, all in one commit."""
    ranks = range(world.shape.num_ranks)
    if any(group.keeps is Keeps.STATE for group in world.shape.groups):
        stops = set.intersection(*(shared.due_stops.get(rank, set()) for rank in ranks))
        return max(stops, default=0)
    return min(shared.is_due.get(rank, 0) for rank in ranks)


def cached_keys(world: "World") -> set[bytes]:
    """Return the keys under which blocks are cached, or are about to be."""
    device = world.records.device
    is_cached = np.isin(device.state, (State.READY, State.FILLING))
    return {one.tobytes() for one in device.key[is_cached]}


def compare_due(world: "World", command: commands.Commit, cached_before: set[bytes]) -> None:
    """Check that what a commit names, once all ranks have committed it, is findable: as this block or under its key.

    A block that was cached under the key before may already have made room for a call that waited for what the commit
    gave back.
    """
    row, shared = row_of(world, command.lease_id), world.shared.get(command.lease_id)
    if row is None or shared is None:
        return
    due = _due(world, shared)
    device, cached = world.records.device, cached_before | cached_keys(world)
    for at, (group, part) in enumerate(zip(world.shape.groups, row_parts(world, row), strict=True)):
        for place, block in enumerate(part if group.keys_per_block else ()):
            last = (place + 1) * group.keys_per_block - 1 - command.first_block
            key = command.keys[last * BYTES_PER_KEY : (last + 1) * BYTES_PER_KEY]
            end_tokens = (place + 1) * group.tokens_per_block
            is_due = last >= 0 and key and end_tokens <= due
            if group.keeps is Keeps.STATE:
                is_due = is_due and end_tokens == due == command.num_tokens
            is_findable = block < 0 or device.state[block] == State.READY
            if is_due and not is_findable and needs.kept_under(key, at) not in cached:
                world.fail(
                    f"all ranks have committed {due} tokens, and block {block} is not findable"
                )


def left_by_trim(world: "World", held: Held) -> tuple[int, int]:
    """Return the fewest and the most blocks that leave a lease when a rank has trimmed its part of it."""
    row, shared = row_of(world, held.lease_id), world.shared[held.lease_id]
    assert row is not None
    if len(shared.ranks | shared.perhaps) < world.shape.num_ranks:
        return 0, 0
    parts = {
        one: world.workers[one].leases.get(held.lease_id)
        for one in shared.wants.keys() & world.workers.keys()
    }
    known = [shared.wants[one] for one, part in parts.items() if part is not None]
    groups, num_computed = world.shape.groups, int(world.records.rows.num_computed[row])
    # Windows do not move while a rank is ahead, and a rank that may be ahead has what it needs where it is.
    done = [shared.done.get(rank, 0) for rank in shared.ranks]
    is_even = max(done) <= num_computed or not any(group.gives_back for group in groups)
    least, most = (
        sum(
            max(0, len(part) - needs.end_of(group, at_tokens, max(known)))
            for part, group in zip(row_parts(world, row), groups, strict=True)
        )
        for at_tokens in (max(known), num_computed)
    )
    # Of the other ranks nobody knows whether they already or still have a part in it. Nor is it known how much a rank
    # may have been told of that asked for the lease to come back and has had no answer.
    are_all_known = len(known) == len(shared.wants) and not shared.is_resumed
    are_all_known &= not any(part.is_moving for part in parts.values() if part is not None)
    return least if are_all_known and is_even else 0, most
