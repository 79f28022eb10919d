"""What a simulated worker learns from the answers to its calls: which blocks it has where, and what they must hold."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlease.groups import Keeps
from kvlease.ids import BYTES_PER_KEY
from kvleased.core import commands
from kvleased.core.blocks.records import NULL
from kvleased.core.effects import Extended, Forked, Reloaded, Reserved
from tests.laws import needs, sharing
from tests.laws.actors import Call, Held, Mark, Worker
from tests.laws.holders import check_fresh, read_row, row_of, verify

if TYPE_CHECKING:
    from tests.laws.world import World


def numbers(packed: bytes) -> list[int]:
    """Return packed int32 numbers as a list."""
    return [int(one) for one in np.frombuffer(packed, np.int32)]


def parts_of(world: "World", block_ids: bytes, num_blocks: bytes) -> list[list[int]]:
    """Return the places of each group in an answer; block 0, which is never granted, stands for no block."""
    ids = numbers(block_ids)
    ends = numbers(num_blocks) or [len(ids)]
    if sum(ends) != len(ids):
        world.fail(f"{len(ids)} blocks were told of, and {ends} of each group")
    parts, start = [], 0
    for end in ends:
        parts.append([block or NULL for block in ids[start : start + end]])
        start += end
    return parts


def _unknown(parts: Sequence[Sequence[int]]) -> list[list[Mark | None]]:
    return [[None] * len(part) for part in parts]


# Grants ---------------------------------------------------------------------------------------------------------------


def granted(world: "World", worker: Worker, command: commands.Reserve, reply: Reserved) -> None:
    """Take up a new lease: its prefix holds the bytes of its keys, and every place that needs a block has one."""
    worker.newest_lease_id = max(worker.newest_lease_id, reply.joined_id or reply.lease_id)
    if reply.lease_id in worker.leases:
        sharing.told_again(world, worker.leases[reply.lease_id])
        return
    world.granted[reply.lease_id] = (worker.worker_id, command.request_id)
    keys = [
        command.keys[at : at + BYTES_PER_KEY] for at in range(0, len(command.keys), BYTES_PER_KEY)
    ]
    hit_tokens, is_resumed = _hit_tokens(world, reply), sharing.is_resumed(world, reply.lease_id)
    most = hit_tokens if is_resumed else len(keys) * world.shape.hash_tokens
    if (hit_tokens % world.shape.hit_tokens and not is_resumed) or hit_tokens > most:
        world.fail(f"{hit_tokens} tokens of {len(keys)} keys were found")
    world.seen["hits"] += hit_tokens // world.shape.hash_tokens
    parts = parts_of(world, reply.block_ids, reply.num_blocks)
    held = Held(
        reply.lease_id,
        command.request_id,
        keys,
        parts,
        _unknown(parts),
        computed=hit_tokens,
        written=hit_tokens,
        rank=worker.rank,
    )
    worker.leases[reply.lease_id] = held
    num_tokens = command.num_tokens if held.rank is None else sharing.join(world, worker, held)
    if num_tokens is None:
        return
    groups = world.shape.groups
    hits = needs.hit_places(groups, hit_tokens)
    _compare_tenants(world, worker, held, hits)
    ends = [
        places.stop or needs.needed_from(group, hit_tokens)
        for group, places in zip(groups, hits, strict=True)
    ]
    fresh: Sequence[Sequence[int]] = needs.growth(groups, hit_tokens, num_tokens, ends)
    if held.rank is not None:
        fresh = sharing.grown(world, held, hits, fresh)
    _compare_places(world, held, hits, fresh)
    for at, places in enumerate(hits):
        for place in places:
            last = (place + 1) * groups[at].keys_per_block - 1
            held.marks[at][place] = ("key", keys[last], at)
    _compare_cover(world, held, num_tokens, reply.covered_tokens)
    blocks = [parts[at][place] for at, places in enumerate(fresh) for place in places]
    check_fresh(world, worker, held, sharing.untold(world, held, blocks))
    verify(world, held)


def _compare_tenants(world: "World", worker: Worker, held: Held, hits: Sequence[range]) -> None:
    """Check that nothing is found under another tenant's keys; a worker that used them goes on with its own keys."""
    if any(world.tenant_of_key.get(key, worker.tenant) != worker.tenant for key in held.keys):
        if any(hits):
            world.fail(f"places {hits} were found under another tenant's keys")
        held.keys = []


def _hit_tokens(world: "World", reply: Reserved) -> int:
    """Return the tokens that were found, and check that only tiers that exist have found any."""
    shape = world.shape
    disk_tokens, remote_tokens = reply.disk_hit_tokens, reply.remote_hit_tokens
    if (disk_tokens and not shape.num_disk_slots) or (remote_tokens and not shape.uses_remote):
        world.fail(f"{reply} tells of tiers that there are not")
    tokens = (reply.device_hit_tokens, reply.host_hit_tokens, disk_tokens, remote_tokens)
    if min(tokens) < 0:
        world.fail(f"{reply} tells of less than nothing")
    world.seen["disk hits"] += disk_tokens
    world.seen["remote hits"] += remote_tokens
    return sum(tokens)


def _compare_places(
    world: "World", held: Held, hits: Sequence[range], fresh: Sequence[Sequence[int]]
) -> None:
    for at, part in enumerate(held.parts):
        filled = [place for place, block in enumerate(part) if block != NULL]
        if filled != [*hits[at], *fresh[at]]:
            world.fail(
                f"lease {held.lease_id} has blocks at {filled} of group {at}, not at {hits[at]} and {fresh[at]}"
            )


def _compare_cover(world: "World", held: Held, num_tokens: int, told: int) -> None:
    expected = needs.covered(world.shape.groups, held.ends, num_tokens)
    if told != expected:
        world.fail(f"lease {held.lease_id} is said to cover {told} tokens and covers {expected}")


def forked(world: "World", worker: Worker, call: Call, reply: Forked) -> None:
    """Take up a lease that forks off: shared blocks are the parent's own, and copied blocks hold equal bytes."""
    command, parent, lease = call.command, call.parent, reply.lease
    assert isinstance(command, commands.Fork)
    assert parent is not None
    worker.newest_lease_id = max(worker.newest_lease_id, lease.joined_id or lease.lease_id)
    if lease.lease_id in worker.leases:
        sharing.told_again(world, worker.leases[lease.lease_id])
        return
    world.granted[lease.lease_id] = (worker.worker_id, command.request_id)
    parts = parts_of(world, lease.block_ids, lease.num_blocks)
    computed = lease.device_hit_tokens
    keys = parent.keys[: computed // world.shape.hash_tokens]
    child = Held(
        lease.lease_id,
        command.request_id,
        keys,
        parts,
        _unknown(parts),
        computed=computed,
        written=computed,
        rank=worker.rank,
    )
    worker.leases[lease.lease_id] = child
    if child.rank is not None and len(world.shared[lease.lease_id].ranks) > 1:
        sharing.join_fork(world, worker, child, parent)
        return
    num_shared, num_copied, fresh = 0, 0, []
    for at, place, block, _ in list(child.places()):
        source = _source_of(world, child, parent, at, place)
        if source is None:
            fresh.append(block)
            continue
        mark = child.marks[at][place] = parent.marks[at][source]
        if parent.parts[at][source] != block:
            num_copied += 1
            fresh.append(block)
            continue
        num_shared += 1
        if mark is None or mark[0] != "key":
            world.fail(f"a fork shares block {block}, which is not committed")
    if (num_shared, num_copied) != (reply.num_shared, reply.num_copied):
        world.fail(f"a fork shares {num_shared} and copies {num_copied} blocks, and says {reply}")
    _compare_cover(world, child, command.num_tokens, lease.covered_tokens)
    check_fresh(world, worker, child, sharing.untold(world, child, fresh))
    verify(world, child)
    world.seen["forked"] += 1
    world.seen["fork copied"] += num_copied


def _source_of(world: "World", child: Held, parent: Held, at: int, place: int) -> int | None:
    """Return the parent's place whose bytes a child's place has, if there is one."""
    group, computed = world.shape.groups[at], child.computed
    first = needs.needed_from(group, computed)
    if group.keeps is Keeps.FIXED:
        return place
    if group.keeps is Keeps.STATE:
        is_newest = computed > 0 and place == child.slot(at, first)
        return parent.slot(at, first) if is_newest else None
    return place if first <= place < -(-computed // group.tokens_per_block) else None


# Changes --------------------------------------------------------------------------------------------------------------


def extended(world: "World", worker: Worker, held: Held, num_tokens: int, reply: Extended) -> None:
    """Put the blocks that a lease got at the places that need them."""
    added = numbers(reply.block_ids)
    counts = numbers(reply.num_blocks) or [len(added)]
    if held.rank is not None:
        sharing.grow(world, worker, held, num_tokens, (counts, added, numbers(reply.num_places)))
        return
    if held.is_behind or (added and {*added} <= {block for part in held.parts for block in part}):
        # Either the answer to another call was lost, so that the worker has read its row meanwhile. Or the answer to a
        # commit is yet to come that gave blocks back from other places. The table tells, as it does to a real client.
        _read_again(world, held, {*added})
        return
    grow(world, worker, held, num_tokens, (counts, added))
    _compare_cover(world, held, num_tokens, reply.covered_tokens)


def _read_again(world: "World", held: Held, added: set[int]) -> None:
    """Let a worker read its row; a block that has come to another place does not hold what the worker wrote."""
    before = {(at, place): block for at, place, block, _ in held.places()}
    read_row(world, held)
    for at, place, block, _ in list(held.places()):
        if block in added and before.get((at, place)) != block:
            held.marks[at][place] = None


def grow(
    world: "World",
    worker: Worker,
    held: Held,
    num_tokens: int,
    told: tuple[Sequence[int], list[int]],
) -> None:
    """Put blocks, so many for each group, where a lease needs them to cover some tokens; check their number."""
    counts, added = told
    grown = missing(world, held, num_tokens)
    if [len(places) for places in grown] != list(counts) or sum(counts) != len(added):
        world.fail(f"an extend to {num_tokens} tokens added {counts} blocks, and needs {grown}")
    start, fresh = 0, []
    afters = [places.stop for places in grown]
    left = needs.moved_on(world.shape.groups, held.ends, afters)
    for at, places in enumerate(grown):
        part, marks = held.parts[at], held.marks[at]
        part += [NULL] * (places.stop - len(part))
        marks += [None] * (len(part) - len(marks))
        new = added[start : start + len(places)]
        moved = [part[place] for place in left[at]]
        if new[: len(moved)] != moved:
            world.fail(
                f"lease {held.lease_id} passes over blocks {moved}, and has {new} further on"
            )
        part[left[at].start : left[at].stop] = [NULL] * len(moved)
        marks[left[at].start : left[at].stop] = [None] * len(moved)
        part[places.start : places.stop] = new
        start += len(places)
        fresh += new[len(moved) :]
        world.seen["moved on"] += len(moved)
    check_fresh(world, worker, held, fresh)


def missing(world: "World", held: Held, num_tokens: int) -> list[range]:
    """Return the places of each group that a lease must fill to cover some tokens."""
    row = row_of(world, held.lease_id)
    computed = held.computed if row is None else int(world.records.rows.num_computed[row])
    if held.rank is not None:
        # It grows as far as the rank that is furthest will need.
        computed = sharing.furthest_of_all(world, held)
    return needs.growth(world.shape.groups, computed, num_tokens, held.ends)


def committed(world: "World", held: Held, num_tokens: int, num_given_back: int | None) -> None:
    """Forget the blocks that no later token needs."""
    # The answer to an extend that the commit made room for comes first, and tells of both.
    is_known = held.computed >= num_tokens or held.rank is not None
    held.computed = max(held.computed, num_tokens)
    count = 0
    for at, group in enumerate(world.shape.groups):
        first = min(needs.needed_from(group, held.computed), len(held.parts[at]))
        count += first - held.parts[at][:first].count(NULL)
        held.parts[at][:first] = [NULL] * first
        held.marks[at][:first] = [None] * first
    if num_given_back is not None and not is_known and count != num_given_back:
        world.fail(
            f"a commit of {num_tokens} tokens gave {num_given_back} blocks back, not {count}"
        )


def trim(world: "World", held: Held, num_tokens: int) -> int:
    """Forget the blocks behind a token, except the newest state; return how many they are."""
    before, held.is_trimming = held.num_blocks, True
    # A rank whose commit was not answered does not learn from the row how far it has come: the row is of all ranks.
    computed = held.computed if held.rank is None else sharing.furthest(world, held)
    for at, group in enumerate(world.shape.groups):
        part, marks = held.parts[at], held.marks[at]
        end = min(len(part), needs.end_of(group, computed, num_tokens))
        if group.keeps is Keeps.STATE:
            _move_down(world, held, at, end)
        del part[end:], marks[end:]
    return before - held.num_blocks


def _move_down(world: "World", held: Held, at: int, end: int) -> None:
    """Move the newest state to the first of the places that are left, and the blocks behind it after it."""
    group, part, marks = world.shape.groups[at], held.parts[at], held.marks[at]
    first = needs.needed_from(group, held.computed)
    to = max(first, end - 1 - group.extra_blocks)
    kept = [(part[place], marks[place]) for place in range(to, len(part)) if part[place] != NULL]
    part[to:] = [NULL] * (len(part) - to)
    marks[to:] = [None] * (len(marks) - to)
    for place, (block, mark) in zip(range(to, end), kept, strict=False):
        part[place], marks[place] = block, mark


def reloaded(world: "World", held: Held, reply: Reloaded) -> None:
    """Learn where the blocks of a lease are now; they have the same bytes as before."""
    held.is_evicted = False
    parts = parts_of(world, reply.block_ids, reply.num_blocks)
    row = row_of(world, held.lease_id)
    if row is not None and held.rank is None:
        held.computed = int(world.records.rows.num_computed[row])
    marks = _unknown(parts)
    for at, part in enumerate(parts):
        for place in range(min(len(part), len(held.parts[at]))):
            if held.parts[at][place] != NULL and part[place] != NULL:
                marks[at][place] = held.marks[at][place]
    held.parts, held.marks = parts, marks
    sharing.know_prefix(world, held)
    verify(world, held)
