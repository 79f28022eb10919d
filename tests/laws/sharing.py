"""What ranks that call apart learn of a lease that they share, and what must be true of all of them.

Each rank knows its own part: which blocks it was told of, how far it has come, and what it still wants. What the ranks
know together is noted apart whenever one is answered, whether it hears the answer or not. The core is never asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlease.groups import Keeps
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import commands
from kvleased.core.blocks.records import NULL
from kvleased.core.blocks.states import State
from kvleased.core.effects import Committed, Extended, Forked, Reloaded, Reserved, Trimmed
from kvleased.core.lease.phases import Phase
from kvleased.core.verbs.stepping import StepVerb
from tests.laws import needs
from tests.laws.actors import Held, Mark, Worker
from tests.laws.holders import check_fresh, name_blocks, row_of, row_parts

if TYPE_CHECKING:
    from tests.laws.world import World


@dataclass(eq=False)
class Shared:
    """One lease, as somebody would know it who watches all of its ranks."""

    engine: int
    request_id: str
    hit_tokens: int
    """Tokens whose bytes all ranks had from the beginning."""
    ranks: set[int] = field(default_factory=set)
    """All ranks that ever had a part in it."""
    perhaps: set[int] = field(default_factory=set)
    """Ranks that may have had a part, because the control process died while it heard their requests."""
    wants: dict[WorkerId, int] = field(default_factory=dict)
    """Tokens that it is to cover for each process that has a part in it."""
    done: dict[int, int] = field(default_factory=dict)
    """The tokens that each rank has ever committed."""
    is_due: dict[int, int] = field(default_factory=dict)
    """The same, since it last joined and since the control process began; this must not be forgotten."""
    stops: dict[int, set[int]] = field(default_factory=dict)
    """By rank: the counts of tokens that it has ever committed, each of which belongs to a state."""
    due_stops: dict[int, set[int]] = field(default_factory=dict)
    """The same, since it last joined and since the control process began."""
    fresh: dict[int, int] = field(default_factory=dict)
    """The generations of blocks that were nobody's when the first of its ranks was told of them."""
    is_resumed: bool = False
    """Whether it has outlived a control process; the next one remembers no more than what all ranks had."""

    def commit(self, rank: int, num_tokens: int) -> None:
        """Note how far a rank has come."""
        self.done[rank] = max(self.done.get(rank, self.hit_tokens), num_tokens)
        self.is_due[rank] = max(self.is_due.get(rank, 0), num_tokens)
        self.stops.setdefault(rank, set()).add(num_tokens)
        self.due_stops.setdefault(rank, set()).add(num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Note that what ranks have committed behind so many tokens is gone, together with its blocks."""
        self.done = {rank: min(done, num_tokens) for rank, done in self.done.items()}
        self.is_due = {rank: min(done, num_tokens) for rank, done in self.is_due.items()}


# What is noted --------------------------------------------------------------------------------------------------------


def note(world: "World", worker: Worker, command: object, reply: object) -> None:
    """Note what the answer to a rank means for its lease, whether or not the rank hears it."""
    assert worker.place is not None
    if isinstance(reply, Forked):
        reply = reply.lease
    if isinstance(reply, Reserved):
        assert isinstance(command, commands.Reserve | commands.Fork)
        _note_part(world, worker, command.request_id, reply)
        return
    shared = world.shared.get(getattr(command, "lease_id", LeaseId(0)))
    if shared is None:
        return
    worker_id, rank = worker.worker_id, worker.place.rank
    if isinstance(command, commands.Extend) and isinstance(reply, Extended):
        shared.wants[worker_id] = max(shared.wants.get(worker_id, 0), command.num_tokens)
    elif isinstance(command, commands.Trim) and isinstance(reply, Trimmed):
        shared.wants[worker_id] = min(shared.wants.get(worker_id, 0), command.num_tokens)
        row = row_of(world, command.lease_id)
        assert row is not None, "a lease that was trimmed has a row"
        ends = [len(part) for part in row_parts(world, row)]
        shared.cut(needs.room(world.shape.groups, ends))
    elif isinstance(command, commands.Commit) and isinstance(reply, Committed):
        shared.commit(rank, command.num_tokens)
    elif isinstance(command, commands.Reload) and isinstance(reply, Reloaded):
        shared.wants[worker_id] = _asked_tokens(world, command.lease_id or LeaseId(0))
    elif isinstance(command, commands.Release):
        shared.wants.pop(worker_id, None)


def note_operation(
    world: "World", worker: Worker, verb: StepVerb, operation: tuple[LeaseId, int]
) -> None:
    """Note what an operation in a rank's step means for its lease; it was carried out."""
    lease_id, num_tokens = operation
    shared, worker_id = world.shared[lease_id], worker.worker_id
    assert worker.place is not None
    if verb is StepVerb.EXTEND:
        shared.wants[worker_id] = max(shared.wants.get(worker_id, 0), num_tokens)
    elif verb is StepVerb.COMMIT:
        shared.commit(worker.place.rank, num_tokens)
    else:
        shared.wants.pop(worker_id, None)


def _note_part(world: "World", worker: Worker, request_id: str, reply: Reserved) -> None:
    """Note that a rank has a part in a lease; it must be the others' lease, unless the rank has left theirs."""
    assert worker.place is not None
    lease_id, (engine, rank) = reply.lease_id, worker.place
    for mate in world.workers.values():
        if mate.place is None or mate.place.engine != engine:
            continue
        for held in mate.leases.values():
            is_there = held.request_id == request_id and not held.is_moving and not held.is_evicted
            if (
                is_there
                and lease_id not in world.shared
                and rank not in world.shared[held.lease_id].ranks
            ):
                world.fail(
                    f"rank {rank} got lease {lease_id} beside {held.lease_id} of its request"
                )
    shared = world.shared.setdefault(lease_id, Shared(engine, request_id, hit_tokens_of(reply)))
    if (shared.engine, shared.request_id) != (engine, request_id):
        world.fail(
            f"lease {lease_id} of {shared.request_id} was told to one that asks {request_id}"
        )
    shared.ranks.add(rank)
    shared.wants[worker.worker_id] = _asked_tokens(world, lease_id)
    if lease_id not in worker.leases:
        shared.is_due.pop(rank, None)
        shared.due_stops.pop(rank, None)


def note_unanswered(world: "World", worker: Worker, command: object) -> None:
    """Note that a rank may have joined a lease of its request: the control process died of the call."""
    assert worker.place is not None
    asked = command.reserves if isinstance(command, commands.Step) else (command,)
    request_ids = {getattr(one, "request_id", None) for one in asked}
    for shared in world.shared.values():
        if shared.engine == worker.place.engine and shared.request_id in request_ids:
            shared.perhaps.add(worker.place.rank)


def hit_tokens_of(reply: Reserved) -> int:
    """Return the tokens of a prefix that was found in any tier."""
    tokens = (reply.device_hit_tokens, reply.host_hit_tokens)
    return sum(tokens) + reply.disk_hit_tokens + reply.remote_hit_tokens


def begin_anew(world: "World") -> None:
    """Note that a new control process assumes that every rank wants all that there is."""
    for lease_id, shared in world.shared.items():
        asked = _asked_tokens(world, lease_id)
        shared.wants = {one: asked for one in shared.wants if one in world.workers}
        shared.is_resumed = True
        shared.is_due.clear()
        shared.due_stops.clear()
    for worker in world.workers.values():
        for held in worker.leases.values():
            told_again(world, held)


def _asked_tokens(world: "World", lease_id: LeaseId) -> int:
    row = row_of(world, lease_id)
    return 0 if row is None else int(world.records.rows.num_tokens[row])


# What a rank makes of answers -----------------------------------------------------------------------------------------


def untold(world: "World", held: Held, blocks: Sequence[int]) -> Sequence[int]:
    """Return those of a lease's blocks that no rank has been told of before, and note that one has been told now."""
    if held.rank is None:
        return blocks
    known = world.shared[held.lease_id].fresh
    generations = world.records.device.generation
    new = [block for block in blocks if known.get(block) != int(generations[block])]
    known.update((block, int(generations[block])) for block in new)
    return new


def told_again(world: "World", held: Held) -> None:
    """Let a rank know that it may have been told of all present blocks without having heard it."""
    if held.rank is not None:
        held.vain_tokens = _asked_tokens(world, held.lease_id)


def join(world: "World", worker: Worker, held: Held) -> int | None:
    """Let a rank take up its part of a lease, perhaps one that others have made longer since.

    Returns the tokens that it covers; None if its blocks are in the host pool, so that the rank is told of none.
    """
    row = row_of(world, held.lease_id)
    assert row is not None, "a lease that was granted has a row"
    name_blocks(world, worker, held, held.computed)
    if world.records.rows.phase[row] in (Phase.EVICTING, Phase.EVICTED, Phase.RELOADING):
        if any(held.parts):
            world.fail(
                f"a rank joined lease {held.lease_id}, which is leaving, and was told of blocks"
            )
        held.is_evicted = True
        return None
    return int(world.records.rows.num_tokens[row])


def grown(
    world: "World", held: Held, hits: Sequence[range], fresh: Sequence[range]
) -> list[Sequence[int]]:
    """Return the places that a rank finds filled behind a prefix, including those that others have added."""
    found: list[Sequence[int]] = []
    for at, (group, part) in enumerate(zip(world.shape.groups, held.parts, strict=True)):
        if group.keeps is not Keeps.STATE:
            found.append(range(fresh[at].start, max(fresh[at].stop, len(part))))
            continue
        # Others have states where they stopped before.
        filled = [place for place, block in enumerate(part) if block != NULL]
        found.append([place for place in filled if place not in hits[at]])
        if not {*fresh[at]} <= {*filled}:
            world.fail(f"lease {held.lease_id} has states at {filled}, and none at {fresh[at]}")
    return found


def join_fork(world: "World", worker: Worker, child: Held, parent: Held) -> None:
    """Let a rank take up its part of a lease that another rank has forked off, with copies made at that time."""
    if join(world, worker, child) is None:
        return
    for at, place, block, _ in list(child.places()):
        is_shared = place < len(parent.parts[at]) and parent.parts[at][place] == block
        mark = parent.marks[at][place] if is_shared else _committed(world, child, at, place)
        child.marks[at][place] = mark if mark is not None and mark[0] == "key" else None
    blocks = [block for *_, block, _ in child.places()]
    shared = {block for part in parent.parts for block in part}
    # The parent may have given blocks back since that it still shares with the fork.
    shared |= {*world.shared[parent.lease_id].fresh}
    new = untold(world, child, [block for block in blocks if block not in shared])
    check_fresh(world, worker, child, new)


def _committed(world: "World", child: Held, at: int, place: int) -> Mark | None:
    """Return what a committed block of a fork holds, which its parent may have given back since; None for another."""
    last = (place + 1) * world.shape.groups[at].keys_per_block - 1
    if not 0 <= last < len(child.keys):
        return None
    records, block = world.records.device, child.parts[at][place]
    key = records.key[block].tobytes()
    is_there = records.state[block] == State.READY and key == needs.kept_under(child.keys[last], at)
    return ("key", child.keys[last], at) if is_there else None


def know_prefix(world: "World", held: Held) -> None:
    """Let a rank that joined a lease in the host pool learn what the blocks of the prefix hold."""
    if held.rank is None:
        return
    for at, group in enumerate(world.shape.groups):
        # It is told of what slower ranks still need, too.
        first = min(needs.needed_from(group, held.computed), len(held.parts[at]))
        held.parts[at][:first] = [NULL] * first
        held.marks[at][:first] = [None] * first
    for at, place, _, mark in list(held.places()):
        group = world.shape.groups[at]
        end_tokens = (place + 1) * group.tokens_per_block
        is_state = group.keeps is Keeps.STATE and end_tokens != held.computed
        if mark is None and not is_state and group.keys_per_block and end_tokens <= held.computed:
            held.marks[at][place] = ("key", held.keys[(place + 1) * group.keys_per_block - 1], at)


def is_resumed(world: "World", lease_id: LeaseId) -> bool:
    """Tell whether a lease that ranks share has outlived a control process."""
    shared = world.shared.get(lease_id)
    return shared is not None and shared.is_resumed


def grow(
    world: "World",
    worker: Worker,
    held: Held,
    num_tokens: int,
    told_of: tuple[Sequence[int], list[int], Sequence[int]],
) -> None:
    """Put blocks where a rank needs them; blocks that it was told of in vain it reads in the block table.

    `told_of` has, for each group, how many blocks there are, the blocks, and the number of places with which they end.
    """
    row = row_of(world, held.lease_id)
    if row is None or held.lease_id not in worker.leases:
        return
    counts, added, num_places = told_of
    start, rows, most_computed = 0, row_parts(world, row), furthest(world, held)
    for at, group in enumerate(world.shape.groups):
        part, marks = held.parts[at], held.marks[at]
        before = len(part)
        told = [block or NULL for block in added[start : start + counts[at]]]
        start += counts[at]
        end = needs.end_of(group, held.computed, num_tokens)
        if group.keeps is Keeps.STATE:
            end = max(end, _end_of_states(rows[at], end, 1 + group.extra_blocks))
        end = max(before, end)  # places known before do not move the end of the states
        most = max(end, needs.end_of(group, most_computed, num_tokens))
        if told and told[-1] in rows[at]:
            # A rank that has committed more than it knows of is told of what comes behind that.
            end = min(most, max(end, rows[at].index(told[-1]) + 1))
        if told:
            _compare_end(world, num_places[at : at + 1], end)
        least = min(end, max(before, needs.end_of(group, most_computed, held.vain_tokens)))
        piece = rows[at][before:end]
        if len(piece) != end - before or piece[len(piece) - len(told) :] != told:
            world.fail(f"a rank extends lease {held.lease_id} by {piece}, and is told of {told}")
        # The empty places before a state are not mentioned.
        lacking = piece[least - before : len(piece) - len(told)]
        if any(group.keeps is not Keeps.STATE or block != NULL for block in lacking):
            world.fail(f"a rank lacks places {least} to {end} of lease {held.lease_id}: got {told}")
        for place in [place for place in range(before) if part[place] != NULL]:
            if part[place] in piece:
                part[place], marks[place] = NULL, None
        part += piece
        marks += [None] * len(piece)
        blocks = [block for block in piece if block != NULL]
        check_fresh(world, worker, held, untold(world, held, blocks))


def _compare_end(world: "World", told: Sequence[int], end: int) -> None:
    """Check that a rank is told the place with which its blocks of a group end, unless one group keeps everything."""
    if list(told) != [end] * (not world.shape.is_simple):
        world.fail(f"a rank is told of blocks that end with {end} places as ending with {told}")


def _end_of_states(row: Sequence[int], end: int, num_states: int) -> int:
    """Return the end of a rank's newest states: they are at the same places as those of a rank that asked for more."""
    held = [place for place in range(max(0, end - num_states), len(row)) if row[place] != NULL]
    return held[min(num_states, len(held)) - 1] + 1 if held else end


def furthest(world: "World", held: Held) -> int:
    """Return the most tokens that a rank may count as having committed, whether or not it has heard of that."""
    shared = world.shared[held.lease_id]
    assert held.rank is not None, "only ranks share leases"
    known = max(held.computed, shared.is_due.get(held.rank, 0))
    if not shared.is_resumed:
        return known
    # A control process that does not remember how far a rank has come assumes that it is as far as possible.
    row = row_of(world, held.lease_id)
    assert row is not None, "a lease that is asked about has a row"
    has_room = needs.room(world.shape.groups, [len(part) for part in row_parts(world, row)])
    return max(known, has_room, _asked_tokens(world, held.lease_id))


def furthest_of_all(world: "World", held: Held) -> int:
    """Return the most tokens of a lease that any rank may count as having committed."""
    return max([furthest(world, held), *world.shared[held.lease_id].done.values()])


def parent_of(world: "World", held: Held | None, command: object) -> Held | None:
    """Return what a worker knows of a lease that it forks; a rank also knows places that only slower ranks need."""
    if held is None or not isinstance(command, commands.Fork):
        return None
    parent, row = held.snapshot(), row_of(world, held.lease_id)
    if parent.rank is None or row is None or parent.is_evicted:
        return parent
    for at, (group, part) in enumerate(zip(world.shape.groups, row_parts(world, row), strict=True)):
        for place, block in enumerate(part[: len(parent.parts[at])]):
            last = (place + 1) * group.keys_per_block - 1
            if parent.parts[at][place] == NULL != block and last < len(parent.keys):
                parent.parts[at][place] = block
                parent.marks[at][place] = ("key", parent.keys[last], at)
    return parent


def compare_row(world: "World", held: Held, parts: list[list[int]]) -> None:
    """Check that the row of a shared lease begins, in each group, with what each of its ranks was told."""
    for at, (group, part) in enumerate(zip(world.shape.groups, held.parts, strict=True)):
        first = needs.needed_from(group, held.written)
        row = parts[at][first : len(part)]
        listed = part[first:]
        if group.keeps is Keeps.STATE:
            # Others have states where this rank needs none, and have moved past guesses that it still knows.
            row = [
                block if mine != NULL else NULL for block, mine in zip(row, listed, strict=False)
            ]
            listed = [
                NULL if needs.is_moved_on(group, part, place, parts[at], held.written) else block
                for place, block in enumerate(part)
            ][first:]
        if row != listed:
            world.fail(
                f"rank {held.rank} has blocks {part} of lease {held.lease_id}, whose row lists {parts[at]}"
            )


# Ranks that come back -------------------------------------------------------------------------------------------------


def may_be_back(world: "World", worker_id: WorkerId, held: Held) -> bool:
    """Tell whether a rank that has released a lease may have joined it again, whether or not it has heard of that."""
    return worker_id in world.shared[held.lease_id].wants


def is_asked_anew(world: "World", held: Held) -> bool:
    """Tell whether an engine has had several leases for one request, of which only the newest can be joined."""
    shared = world.shared[held.lease_id]
    return any(
        one is not shared and (one.engine, one.request_id) == (shared.engine, shared.request_id)
        for one in world.shared.values()
    )
