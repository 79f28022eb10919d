"""How a simulated worker computes: which blocks of which groups it writes, with what marks, and what it may commit."""

from kvlease.groups import Keeps
from kvleased.core import commands
from kvleased.core.blocks.records import NULL
from tests.laws.actors import Held, Mark, Worker
from tests.laws.holders import name_blocks, write
from tests.laws.needs import room
from tests.laws.picks import is_forked
from tests.laws.world import World

_MOST_FIXED_TOKENS = 48
"""Tokens up to which a request is computed in a cache in which nothing grows."""
_ALIGNED = 0.6
"""Share of the commits that end where a prefix can end."""
_FROM_THE_START = 0.2
"""Share of the commits that name all keys again."""


def compute(world: World, worker: Worker, held: Held) -> tuple[int, int] | None:
    """Let a worker write the states of more tokens; return how many it may commit, and the first key to name."""
    most = min(room(world.shape.groups, held.ends), _MOST_FIXED_TOKENS)
    if most <= held.computed or is_forked(world, held):
        return None
    gives_back = any(group.gives_back for group in world.shape.groups)
    num_tokens = world.rng.randint(max(held.computed + 1, held.written * gives_back), most)
    if world.rng.random() < _ALIGNED:
        aligned = num_tokens // world.shape.hit_tokens * world.shape.hit_tokens
        if aligned > held.computed and aligned >= held.written * gives_back:
            num_tokens = aligned
    is_ahead = not gives_back and world.rng.random() < 0.5
    write_up_to(world, worker, held, max(held.written, most if is_ahead else num_tokens))
    first = held.computed // world.shape.hash_tokens
    return num_tokens, 0 if world.rng.random() < _FROM_THE_START else first


def keys_of(world: World, held: Held, num_tokens: int, first: int) -> bytes:
    """Return the packed keys of the full blocks among some tokens, from the first one on."""
    return b"".join(held.keys[first : num_tokens // world.shape.hash_tokens])


def commit_up_to(
    world: World, worker: Worker, held: Held, num_tokens: int, *, is_heard: bool = True
) -> None:
    """Let a worker compute and commit the first tokens of a lease."""
    write_up_to(world, worker, held, num_tokens)
    command = commands.Commit(
        worker_id=worker.worker_id,
        lease_id=held.lease_id,
        num_tokens=num_tokens,
        first_block=0,
        keys=keys_of(world, held, num_tokens, 0),
    )
    world.call(worker, command, held, is_heard=is_heard)


def write_up_to(world: World, worker: Worker, held: Held, num_tokens: int) -> None:
    """Write the states of all tokens up to this number."""
    name_blocks(world, worker, held, num_tokens)
    for at, group in enumerate(world.shape.groups):
        private: Mark = ("private", worker.tenant, held.lease_id, at, world.now)
        part, per_block = held.parts[at], group.tokens_per_block
        if group.keeps is Keeps.STATE:
            _write_state(world, held, at, num_tokens, private)
            continue
        places = range(held.written // per_block, -(-num_tokens // per_block))
        if group.keeps is Keeps.FIXED:
            places = range(len(part))
        for place in places:
            if place >= len(part) or part[place] == NULL:
                world.fail(f"lease {held.lease_id} has no block at {place} of group {at}")
            last = (place + 1) * group.keys_per_block - 1
            is_full = group.keys_per_block and (place + 1) * per_block <= num_tokens
            mark = ("key", held.keys[last], at) if is_full else private
            if held.marks[at][place] != mark:
                write(world, held, at, place, mark)
    held.written = max(held.written, num_tokens)


def _write_state(world: World, held: Held, at: int, num_tokens: int, private: Mark) -> None:
    """Write the state after so many tokens to its place, or to the first place behind it that has a block."""
    group = world.shape.groups[at]
    if num_tokens <= held.written:
        return
    place = (num_tokens - 1) // group.tokens_per_block
    slot = held.slot(at, place)
    if slot >= len(held.parts[at]):
        world.fail(f"lease {held.lease_id} has no block for a state of group {at}")
    is_full = slot == place and num_tokens % group.tokens_per_block == 0
    last = (place + 1) * group.keys_per_block - 1
    write(world, held, at, slot, ("key", held.keys[last], at) if is_full else private)


def know_states(world: World, held: Held) -> None:
    """Mark a newest state with its key if, since blocks have moved, it is where a block ends."""
    for at, group in enumerate(world.shape.groups):
        if (
            group.keeps is not Keeps.STATE
            or not held.written
            or held.written % group.tokens_per_block
        ):
            continue
        place = held.written // group.tokens_per_block - 1
        mark = held.marks[at][place] if place < len(held.parts[at]) else None
        if mark is not None and mark[0] == "private":
            last = (place + 1) * group.keys_per_block - 1
            write(world, held, at, place, ("key", held.keys[last], at))


def scribble(world: World, worker: Worker, held: Held) -> None:
    """Let a worker write anything to those of its private blocks that hold nothing it needs."""
    if is_forked(world, held):
        return
    for at, place, _, mark in list(held.places()):
        is_state = world.shape.groups[at].keeps is Keeps.STATE
        if mark is None or (mark[0] == "private" and not is_state):
            write(
                world,
                held,
                at,
                place,
                ("private", worker.tenant, held.lease_id, at, place, world.now),
            )
