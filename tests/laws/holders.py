"""What a simulated worker reads in its blocks and in the block table, compared with what it knows."""

from collections.abc import Sequence
from functools import cache as remember
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvlease.groups import Keeps
from kvlease.ids import LeaseId
from kvleased.core import Cache
from kvleased.core.blocks.records import NULL
from tests.laws.actors import Held, Mark, Worker, every_part, key_of, part_of, with_part
from tests.laws.needs import is_moved_on, needed_from

if TYPE_CHECKING:
    from tests.laws.world import World

_COUNTED_TENANTS: Final = (7, 8)
_NUM_BUCKETS: Final = 16


def remember_places(cache: Cache) -> Cache:
    """Let a small cache calculate each of its few places only once, because every event asks for them; count keys.

    Keys of two tenants are counted, in so few buckets that many keys share one.
    """
    for tenant in _COUNTED_TENANTS:
        cache.count_keys(tenant, np.zeros(_NUM_BUCKETS, np.uint32))
    covering: Any = cache._state.covering
    covering.first_needed = remember(covering.first_needed)
    covering.last_covered = remember(covering.last_covered)
    return cache


def row_of(world: "World", lease_id: LeaseId) -> int | None:
    """Return the row of a lease; None if it has none."""
    (found,) = np.nonzero(world.records.rows.lease_id == lease_id)
    return int(found[0]) if len(found) else None


def row_parts(world: "World", row: int) -> list[list[int]]:
    """Return the places of each group as a row lists them."""
    rows, start, parts = world.records.rows, 0, []
    for group, end in zip(world.shape.groups, rows.num_blocks[row].tolist(), strict=True):
        parts.append(rows.block_ids[row, start : start + end].tolist())
        start += group.table_blocks
    return parts


def check_fresh(world: "World", worker: Worker, held: Held, blocks: Sequence[int]) -> None:
    """Check granted blocks: nobody else counts on them, and they hold no other tenant's bytes."""
    if not blocks:
        return
    groups = world.shape.groups
    elsewhere = {
        block: lease.lease_id
        for other in world.workers.values()
        for lease in other.leases.values()
        if lease.lease_id != held.lease_id and not lease.is_evicted and not lease.is_moving
        for block in lease.blocks(groups)
    }
    for block in blocks:
        if block in elsewhere:
            world.fail(f"block {block} was granted while lease {elsewhere[block]} has it")
        generation = int(world.records.device.generation[block])
        if generation <= world.granted_under[block]:
            world.fail(f"block {block} was granted twice under generation {generation}")
        world.granted_under[block] = generation
        if any(
            tenant_of(world, part) not in (None, worker.tenant)
            for part in every_part(world.device[block])
        ):
            world.fail("a fresh block holds another tenant's bytes")


def tenant_of(world: "World", mark: Mark) -> object:
    """Return whose bytes a mark stands for; None if they are nobody's."""
    if mark[0] == "private":
        return mark[1]
    return world.tenant_of_key.get(bytes(mark[1])) if mark[0] == "key" else None  # type: ignore[call-overload]


def verify(world: "World", held: Held) -> None:
    """Read a lease's blocks as its worker would: those that later tokens need are there and hold what was written."""
    if held.is_evicted or held.is_moving:
        return
    groups = world.shape.groups
    for at, place, block, mark in held.places():
        # A rank whose commit was not answered does not learn from the row which blocks the commit has given back.
        is_gone = held.rank is not None and place < needed_from(groups[at], held.written)
        if mark is not None and not is_gone and part_of(world.device[block], held.rank) != mark:
            world.fail(
                f"block {block} of lease {held.lease_id}, at {place} of group {at}, holds "
                f"{world.device[block]}, not {mark}"
            )
    for at, group in enumerate(groups):
        if group.keeps is Keeps.FIXED or not held.written:
            continue
        part, first = held.parts[at], needed_from(group, held.written)
        if group.keeps is Keeps.STATE:
            is_whole = held.slot(at, first) < len(part)
        else:
            end = -(-held.written // group.tokens_per_block)
            is_whole = len(part) >= end and NULL not in part[first:end]
        if not is_whole:
            world.fail(f"lease {held.lease_id} lacks a block of group {at} that its tokens need")


def read_row(world: "World", held: Held) -> None:
    """Let a worker learn from the block table what became of a call whose answer was lost."""
    row = row_of(world, held.lease_id)
    if row is not None and held.rank is not None:
        # The row tells of all that its mates have, too; the worker reads only what it is told is its own.
        held.vain_tokens = int(world.records.rows.num_tokens[row])
        return
    held.is_behind = held.is_moving
    if row is None or held.is_evicted or held.is_moving:
        return
    parts = row_parts(world, row)
    held.computed = int(world.records.rows.num_computed[row])
    known: dict[int, Mark | None] = {block: mark for _, _, block, mark in held.places()}
    if not held.is_trimming:
        _compare_row(world, held, row, parts)
    held.parts, held.is_trimming = parts, False
    held.marks = [[known.get(block) if block != NULL else None for block in part] for part in parts]


def _compare_row(world: "World", held: Held, row: int, parts: list[list[int]]) -> None:
    """Check that the row has all that the worker counts on, and that kernels see either all of it or nothing."""
    for at, group in enumerate(world.shape.groups):
        first = needed_from(group, held.written)
        mine = held.parts[at]
        listed = [
            block if not is_moved_on(group, mine, place, parts[at]) else NULL
            for place, block in enumerate(mine)
        ]
        if len(parts[at]) < len(mine) or parts[at][first : len(mine)] != listed[first:]:
            world.fail(f"row {row} lost blocks of lease {held.lease_id} in group {at}")
    published = world.records.kernel_rows.num_published[row].tolist()
    whole = [
        len(part) * group.kernel_blocks_per_block
        for part, group in zip(parts, world.shape.groups, strict=True)
    ]
    if any(published) and published != whole:
        world.fail(f"row {row} is published without its last blocks")


def write(world: "World", held: Held, at: int, place: int, mark: Mark) -> None:
    """Write one private block, or a rank's part of it, as a worker does, without asking anybody."""
    held.marks[at][place] = mark
    block = held.parts[at][place]
    world.device[block] = with_part(world.device[block], held.rank, mark, world.shape.num_ranks)


def name_blocks(world: "World", worker: Worker, held: Held, num_tokens: int) -> None:
    """Give a lease's chain keys for all its full blocks; every worker that computes the request gets the same keys."""
    while len(held.keys) < num_tokens // world.shape.hash_tokens:
        parent = held.keys[-1] if held.keys else b"root" + held.request_id.encode()
        key = key_of(worker.tenant, (int.from_bytes(parent[:6], "little"), len(held.keys)))
        held.keys.append(key)
        world.tenant_of_key[key] = worker.tenant
