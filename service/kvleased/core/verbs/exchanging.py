"""Own the verbs on a magazine: the exchange, which changes what is in it, and the inventory of what it holds.

An exchange is carried out column by column, and within a column as if entry by entry: an entry that repeats a block or
key finds it changed by the first. Its sequence is written first, so it is not carried out again if its answer was lost.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import IdReusedError, InvalidError, WrongStateError
from kvlease.ids import BYTES_PER_KEY
from kvleased.core.admission.room import num_available, room
from kvleased.core.blocks.states import Event, State
from kvleased.core.commands import Exchange, Inventory
from kvleased.core.effects import Outcome
from kvleased.core.ids import Ids, first_of_each
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.magazine_replies import Exchanged, Inventoried
from kvleased.core.magazines import Magazine
from kvleased.core.prefix.chains import are_distinct
from kvleased.core.prefix.looking import EVERYWHERE, are_foreign, is_any_below, look_below
from kvleased.core.prefix.overtaking import are_others
from kvleased.core.state import CacheState, chosen_keys, pack, split_keys
from kvleased.core.tenancy.tenants import is_held_back, may_take_free
from kvleased.core.verbs.committing import make_findable
from kvleased.core.verbs.prefetching import prefetch
from kvleased.counted import counted

_DONE, _REFUSED, _NOT_SO = 1, 2, 3
"""The byte in an answer for each entry."""
_NOT_THERE, NOT_HELD = -1, -2
"""Stand in an answer for a block that is not held: it is cached nowhere, or it is cached."""
_NO_KEY: Final = bytes(BYTES_PER_KEY)
"""Stands for a private block in an inventory, so no findable block may have this key."""
_BYTES_PER_BLOCK: Final = 4
# Reading a member of an enumeration costs as much as a small array operation.
_READY: Final = int(State.READY)
_RESERVED: Final = int(State.RESERVED)


def exchange(state: CacheState, command: Exchange, now: float) -> Outcome:
    """Publish, retract, drop, hold and take, in this order."""
    state.tenant_of(command.worker_id)
    magazine = state.magazines.of(command.worker_id)
    _check_columns(command)
    _check_sequence(state, magazine, command.sequence)
    if command.holds_all:
        _check_alone(state, magazine)
    magazine.is_vouched, magazine.exchanged_at = True, now
    state.records.magazines.sequence[magazine.place] = command.sequence
    state.counters["exchanges"] += 1
    published = retracted = dropped = held = b""
    if command.publish_blocks:
        published = _publish(state, magazine, command)
    if command.retract_blocks:
        retracted = _retract(state, magazine, command.retract_blocks)
    if command.drop_blocks:
        dropped = _drop(state, magazine, command.drop_blocks)
    if command.hold_keys:
        held = _hold(state, magazine, command)
    if command.missed_keys:
        state.counters["magazine_keys_missed"] += len(command.missed_keys) // BYTES_PER_KEY
    held_all = _hold_all(state, magazine) if command.holds_all else NOWHERE
    running, new = _take(state, magazine, command, now)
    return Outcome(
        reply=Exchanged(
            published=published,
            retracted=retracted,
            dropped=dropped,
            held_blocks=held,
            held_all_blocks=pack(held_all),
            held_all_keys=state.device.keys_of(held_all) if command.holds_all else b"",
            taken_blocks=pack(running) + pack(new),
            num_taken_running=len(running),
            num_available=max(0, num_available(state, magazine.tenant, NOWHERE)),
            num_magazines=state.magazines.num_sharing(magazine, now),
        )
    )


def inventory(state: CacheState, command: Inventory, now: float) -> Outcome:
    """Tell what is in a magazine."""
    del now
    state.tenant_of(command.worker_id)
    magazine = state.magazines.of(command.worker_id)
    magazine.is_vouched = True
    blocks = state.magazines.blocks_of(magazine)
    keys = state.device.records.key.take(blocks, axis=0)
    keys[state.device.records.state[blocks] == _RESERVED] = 0
    return Outcome(
        reply=Inventoried(
            blocks=pack(blocks),
            keys=keys.tobytes(),
            sequence=int(state.records.magazines.sequence[magazine.place]),
        )
    )


# Refusals of a whole exchange -------------------------------------------------------------------------------------


def _check_columns(command: Exchange) -> None:
    """Refuse columns that are torn or do not fit each other."""
    num_published = len(command.publish_blocks) // _BYTES_PER_BLOCK
    for name, packed, bytes_per_item in (
        ("publish_blocks", command.publish_blocks, _BYTES_PER_BLOCK),
        ("retract_blocks", command.retract_blocks, _BYTES_PER_BLOCK),
        ("drop_blocks", command.drop_blocks, _BYTES_PER_BLOCK),
        ("hold_keys", command.hold_keys, BYTES_PER_KEY),
        ("missed_keys", command.missed_keys, BYTES_PER_KEY),
    ):
        if len(packed) % bytes_per_item:
            msg = f"{name} has {len(packed)} bytes, which is not a multiple of {bytes_per_item}"
            raise InvalidError(msg, resource=name)
    _check_as_many("publish_keys", command.publish_keys, BYTES_PER_KEY, num_published)
    if _NO_KEY in command.publish_keys and _NO_KEY in split_keys(command.publish_keys):
        msg = "publish_keys has a key of zeros, which means a private block; compute the block's own key"
        raise InvalidError(msg, resource="publish_keys")
    if command.publish_positions:
        _check_as_many(
            "publish_positions", command.publish_positions, _BYTES_PER_BLOCK, num_published
        )


def _check_as_many(name: str, packed: bytes, bytes_per_item: int, count: int) -> None:
    need = bytes_per_item * count
    if len(packed) != need:
        msg = f"{name} has {len(packed)} bytes, but {count} publish_blocks need {need}"
        raise InvalidError(msg, resource=name, need=need, available=len(packed))


def _check_sequence(state: CacheState, magazine: Magazine, sequence: int) -> None:
    last = int(state.records.magazines.sequence[magazine.place])
    if sequence == last + 1:
        return
    msg = (
        f"sequence is {sequence}, but the last exchange of the magazine had {last}; ask for the magazine's inventory, "
        "and continue from there"
    )
    raise IdReusedError(
        msg, resource="sequence", need=last + 1, available=sequence, rule="sequence"
    )


def _check_alone(state: CacheState, magazine: Magazine) -> None:
    others = [one for one in state.magazines.by_name.values() if one is not magazine]
    num_blocks = sum(one.num_blocks for one in others)
    if num_blocks:
        msg = f"other magazines have {counted(num_blocks, 'block')}, so this one cannot hold all"
        raise WrongStateError(msg, resource="magazines", need=0, available=num_blocks)


# Blocks that the magazine has -------------------------------------------------------------------------------------


def _own(state: CacheState, magazine: Magazine, packed: bytes) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the blocks that are named, and which entries name a block of the magazine for the first time.

    For an entry that names no block of the pool, block 0 stands in its place, and the entry does not count.
    """
    named = np.frombuffer(packed, np.int32).astype(np.intp)
    is_own = (named >= 0) & (named < len(state.device))
    blocks = np.where(is_own, named, 0)
    is_own &= state.magazines.holds(magazine, blocks)
    if not state.device.are_distinct(blocks):
        is_first = np.zeros(len(named), np.bool_)
        is_first[np.unique(named, return_index=True)[1]] = True
        is_own &= is_first
    return blocks, is_own


def _codes(is_own: NDArray[np.bool_], is_done: NDArray[np.bool_]) -> bytes:
    """Return a byte for each entry; `is_done` has one value for each entry that is the magazine's."""
    codes = np.full(len(is_own), _NOT_SO, np.uint8)
    codes[is_own] = np.where(is_done, _DONE, _REFUSED)
    return codes.tobytes()


def _publish(state: CacheState, magazine: Magazine, command: Exchange) -> bytes:
    """Make private blocks findable, as a commit does."""
    device, records = state.device, state.device.records
    blocks, is_own = _own(state, magazine, command.publish_blocks)
    is_own &= records.state[blocks] == _RESERVED
    keys = chosen_keys(command.publish_keys, is_own)
    is_new = device.index.find(keys) < 0
    if state.loading:
        is_new &= ~are_others(state, keys, magazine.tenant)
    if not are_distinct(keys):
        is_first = np.zeros(len(is_new), np.bool_)
        is_first[np.unique(np.frombuffer(keys, f"V{BYTES_PER_KEY}"), return_index=True)[1]] = True
        is_new &= is_first
    new, new_keys = blocks[is_own][is_new], chosen_keys(keys, is_new)
    if len(new):
        positions: NDArray[np.uint32] | int = 0
        if command.publish_positions:
            positions = np.frombuffer(command.publish_positions, np.uint32)[is_own][is_new]
        make_findable(state, new, new_keys, positions)
        state.tell("blocks_committed", num_blocks=len(new))
    state.counters["blocks_committed"] += len(new)
    state.counters["blocks_duplicate"] += len(is_new) - len(new)
    return _codes(is_own, is_new)


def _retract(state: CacheState, magazine: Magazine, packed: bytes) -> bytes:
    """Make findable blocks private if nobody else holds them."""
    device = state.device
    blocks, is_own = _own(state, magazine, packed)
    is_own &= device.records.state[blocks] == _READY
    is_alone: NDArray[np.bool_] = device.holds[blocks[is_own]] == 1
    leaving = blocks[is_own][is_alone]
    if len(leaving):
        device.retract(leaving)
        state.counters["blocks_retracted"] += len(leaving)
        state.tell("blocks_evicted", num_blocks=len(leaving))
    return _codes(is_own, is_alone)


def _drop(state: CacheState, magazine: Magazine, packed: bytes) -> bytes:
    """Let go of blocks as a release does; the entries are in token order."""
    blocks, is_own = _own(state, magazine, packed)
    leaving = blocks[is_own]
    state.magazines.remove(magazine, leaving)
    state.device.let_go(leaving)
    return _codes(is_own, np.ones(len(leaving), np.bool_))


# Blocks that are cached -------------------------------------------------------------------------------------------


def _hold(state: CacheState, magazine: Magazine, command: Exchange) -> bytes:
    """Hold the device blocks of keys, and bring blocks from below if wanted; return the answer's entry for each key."""
    device, tenant = state.device, magazine.tenant
    found = device.index.find(command.hold_keys)
    is_there = found >= 0
    if not device.is_only_of(tenant):
        is_there &= device.records.tenant[found] == tenant
    is_held = is_there
    if b"\0" not in is_there.tobytes():
        _add(state, magazine, found)
        state.counters["magazine_keys_held"] += len(found)
        return pack(found)
    if command.stops_at_miss:
        is_held = np.arange(len(found)) < is_there.argmin()
    _add(state, magazine, found[is_held])
    answer = np.where(is_held, found, _NOT_THERE)
    if is_any_below(state, EVERYWHERE):
        answer[_look_below(state, magazine, command, found) & ~is_held] = NOT_HELD
    _count_keys(state, answer)
    return pack(answer)


def _count_keys(state: CacheState, answer: Ids) -> None:
    """Count what became of keys; a key whose block is cached and not held will be asked for again."""
    num_missed, num_cached = (
        int(np.count_nonzero(answer == one)) for one in (_NOT_THERE, NOT_HELD)
    )
    state.counters["magazine_keys_held"] += len(answer) - num_missed - num_cached
    state.counters["magazine_keys_cached"] += num_cached
    state.counters["magazine_keys_missed"] += num_missed


def _add(state: CacheState, magazine: Magazine, blocks: Ids) -> None:
    """Have a magazine hold READY blocks, each block once even if it is named several times."""
    if not state.device.are_distinct(blocks):
        blocks = first_of_each(blocks)
    new = blocks[~state.magazines.holds(magazine, blocks)]
    state.device.hold(new)
    state.magazines.add(magazine, new)
    if state.dirt.counts_hits:
        state.dirt.hit(blocks)


def _look_below(
    state: CacheState, magazine: Magazine, command: Exchange, found: Ids
) -> NDArray[np.bool_]:
    """Tell for each key whether it is cached in any tier or on its way; bring blocks from below if that is wanted.

    `found` are the device's blocks. If holding stops at a miss, keys behind one that is not even cached do not count.
    """
    entries, is_missing = found.copy(), found < 0
    look_below(state, command.hold_keys, (entries, is_missing), EVERYWHERE, magazine.tenant)
    is_cached = ~is_missing
    is_cached[is_cached] = ~are_foreign(state, entries[is_cached], magazine.tenant)
    if command.stops_at_miss and not is_cached.all():
        is_cached[is_cached.argmin() :] = False
    if command.brings:
        _bring(state, magazine, ~entries[is_cached & (entries < 0)])
    return is_cached


def _bring(state: CacheState, magazine: Magazine, slots: Ids) -> None:
    """Start to bring the bytes of slots to the device, the first slots first, as far as there is room."""
    wanted = first_of_each(slots)
    count = min(len(wanted), max(0, num_available(state, magazine.tenant, NOWHERE)))
    if not count:
        return
    fresh = room(state, count, magazine.tenant, may_wait=False)
    if fresh is not None:
        prefetch(state, wanted[:count], fresh)


def _hold_all(state: CacheState, magazine: Magazine) -> Ids:
    """Hold every findable block of a magazine's tenant; return the blocks in the order of their eviction.

    Blocks that somebody held already, which would not be evicted, come last.
    """
    device, records = state.device, state.device.records
    is_own = (records.state == _READY) & (records.tenant == magazine.tenant)
    idle = device.victims(len(device.order), NOWHERE)
    is_idle = np.zeros(len(device), np.bool_)
    is_idle[idle] = True
    found = np.concatenate([idle[is_own[idle]], (is_own & ~is_idle).nonzero()[0]])
    _add(state, magazine, found)
    return found


# Blocks that are taken --------------------------------------------------------------------------------------------


def _take(state: CacheState, magazine: Magazine, command: Exchange, now: float) -> tuple[Ids, Ids]:
    """Take private blocks for running requests, then for new ones; note whether there were fewer than wanted.

    Running requests get their blocks at once, and cached blocks are dropped for them. For new requests, cached blocks
    are written back before they leave, and a later exchange gets the room.
    """
    running = new = NOWHERE
    if command.take_running:
        running = _grab(state, magazine, command, command.take_running, may_wait=False)
    if command.take_new:
        count = _fair(state, magazine, command, now)
        new = _grab(state, magazine, command, count, may_wait=True)
    _note_shortage(
        state,
        magazine,
        command,
        now,
        command.take_running + command.take_new - len(running) - len(new),
    )
    return running, new


def _note_shortage(
    state: CacheState, magazine: Magazine, command: Exchange, now: float, num_short: int
) -> None:
    """Note whether others must leave blocks to a magazine; they need not if only its tenant's limits are in the way."""
    magazine.short_since = None
    if num_short and not (
        state.is_limited and is_held_back(state, magazine.tenant, num_short, NOWHERE)
    ):
        magazine.short_since = now
        magazine.least_blocks = magazine.num_blocks + num_short if command.all_or_nothing else 0


def _fair(state: CacheState, magazine: Magazine, command: Exchange, now: float) -> int:
    """Return how many blocks new requests may get: 0 while calls wait, at most the share if others are owed some."""
    if len(state.waiting):
        return 0
    wanted, book = command.take_new, state.magazines
    share = state.shape.usable_blocks // book.num_sharing(magazine, now)
    left = max(0, share - magazine.num_blocks)
    if wanted <= left or not book.is_owed(magazine, share, now):
        return wanted
    return 0 if command.all_or_nothing else left


def _grab(
    state: CacheState, magazine: Magazine, command: Exchange, wanted: int, *, may_wait: bool
) -> Ids:
    """Take as many blocks as can be had now, up to `wanted`."""
    tenant = magazine.tenant
    count = min(wanted, max(0, num_available(state, tenant, NOWHERE)))
    if not count or (command.all_or_nothing and count < wanted):
        return NOWHERE
    fresh = room(state, count, tenant, may_wait=may_wait)
    if fresh is None and not command.all_or_nothing:
        fresh = _free_now(state, tenant, count)
    if fresh is None:
        return NOWHERE
    state.device.take(fresh, Event.GRANT, tenant)
    state.magazines.add(magazine, fresh)
    state.counters["blocks_taken"] += len(fresh)
    return fresh


def _free_now(state: CacheState, tenant: int, count: int) -> Ids | None:
    """Return up to `count` free blocks that need no scrubbing, while room is made for the others; None if none."""
    device = state.device
    num_suitable = device.num_free - len(device.unsuitable(device.num_free, tenant))
    count = min(count, num_suitable)
    if not count or (state.is_limited and not may_take_free(state, tenant, count)):
        return None
    return device.suitable(count, tenant)
