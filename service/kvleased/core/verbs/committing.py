"""Own the verbs by which workers publish blocks and use cached ones: commit, map, lookup, pin and unpin."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError, WrongStateError
from kvlease.groups import Keeps
from kvlease.ids import BYTES_PER_KEY, PinId
from kvleased.core.admission.granting import pack_counts
from kvleased.core.admission.retention import keep_class
from kvleased.core.blocks.marks import Words, key_words
from kvleased.core.blocks.records import NULL
from kvleased.core.blocks.states import Event, State
from kvleased.core.commands import Commit, Lookup, Map, Pin, Unpin
from kvleased.core.effects import Committed, Found, Mapped, Outcome, Pinned, Released
from kvleased.core.ids import ZERO, Ids
from kvleased.core.lease.leases import NOWHERE, Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.prefix.chains import check_distinct, check_keys
from kvleased.core.prefix.looking import EVERYWHERE, parted
from kvleased.core.prefix.overtaking import are_others, overtake
from kvleased.core.prefix.search import match
from kvleased.core.state import CacheState, chosen_keys
from kvleased.core.tenancy.keeping import check_pins
from kvleased.core.tenancy.tenants import blocks_to_pin, is_foreign
from kvleased.core.verbs.ending import renew
from kvleased.core.verbs.joining import agreed_commit
from kvleased.counted import counted

# Reading an enumeration member costs as much as a small array operation; comparing an array with one, ten times that.
_READY: Final = int(State.READY)
_COMMIT: Final = Event.COMMIT
_NO_CHECKSUM: Final = np.array(0, np.uint64)
"""0 as an array: setting a column to it takes half the time that a plain number takes."""
_ON_DEVICE: Final = (Phase.ACTIVE, Phase.QUARANTINED)
_POSITION: Final = np.dtype(np.uint32)
"""The records' own type: a column is set to an array of it in a sixth of the time that another type takes."""
_NO_PIN: Final = PinId(0)
"""The pin that a caller gets if no block was pinned; unpinning it is an answered no-op."""

Positions = NDArray[np.uint32]


def commit(state: CacheState, command: Commit, now: float) -> Outcome:
    """Make full blocks findable, and give back blocks that no later token needs.

    A late commit to a quarantined lease counts, because nobody else has written to its blocks.
    """
    del now
    lease = state.lease_of(command)
    if lease.phase not in _ON_DEVICE:
        msg = (
            f"the lease is {lease.phase.name.lower()}; only a lease on the device can be committed"
        )
        raise WrongStateError(msg, resource="lease")
    _check_keys(state, lease, command)
    said = command
    if lease.members is not None:
        command = agreed_commit(state, lease.members, said)
    named = _named(state, lease, command)
    states, counters = state.device.records.state[named.blocks], state.counters
    num_ready = states.tobytes().count(_READY)
    if num_ready:
        is_ready = states == _READY
        _check_same_keys(state, named.blocks[is_ready], chosen_keys(named.keys, is_ready))
    new, keys, positions = _new(state, named, states if num_ready else None, lease.tenant)
    if len(new):
        make_findable(state, new, keys, positions)
        state.tell("blocks_committed", lease, num_blocks=len(new))
    num_duplicates = len(named.blocks) - len(new) - num_ready
    counters["blocks_committed"] += len(new)
    counters["blocks_duplicate"] += num_duplicates
    num_given_back = _move_on(state, lease, command.num_tokens)
    if lease.members is not None:
        lease.members.note(said.worker_id, said.num_tokens)
    return Outcome(
        reply=Committed(
            num_committed=len(new), num_duplicates=num_duplicates, num_given_back=num_given_back
        )
    )


def make_findable(state: CacheState, blocks: Ids, keys: bytes, positions: Positions | int) -> None:
    """Publish private blocks under keys that have been computed, also to those who wait for copies of these keys."""
    records = state.device.records
    records.position[blocks] = positions
    records.checksum[blocks] = _NO_CHECKSUM
    if state.dirt.shares:
        # Cleared before publishing, so that a crash in between cannot leave the mark of the earlier bytes.
        records.is_remote[blocks] = False
    state.device.publish(blocks, keys, _COMMIT)
    if state.loading:
        overtake(state, keys, blocks)
    if state.dirt.is_any:
        state.dirt.committed(blocks)


class _Named(NamedTuple):
    """The blocks that the keys of a commit name."""

    blocks: Ids
    keys: bytes
    """The keys under which the blocks are kept."""
    positions: Positions
    """The indices of these keys in the request's chain."""


_NONE_NAMED: Final = _Named(NOWHERE, b"", np.empty(0, _POSITION))


def _new(state: CacheState, named: _Named, states: NDArray[np.uint8] | None, tenant: int) -> _Named:
    """Return those of the named blocks that become findable; `states` is None if none of them is READY yet."""
    is_new = state.device.index.find(named.keys) < ZERO
    if states is not None:
        is_new &= states != _READY
    if state.loading:
        is_new &= ~are_others(state, named.keys, tenant)
    # Nearly always all of them are new; bytes are searched faster than an array.
    if b"\0" not in is_new.tobytes():
        return named
    keys = chosen_keys(named.keys, is_new)
    return _Named(named.blocks[is_new], keys, named.positions[is_new])


def _check_keys(state: CacheState, lease: Lease, command: Commit) -> None:
    """Refuse keys that are malformed, or that name blocks which the lease cannot have filled."""
    check_keys(command.keys)
    check_distinct(command.keys)
    num_keys = len(command.keys) // BYTES_PER_KEY
    covered = _covered_tokens(state, lease)
    num_full = command.num_tokens // state.shape.hash_tokens
    if not 0 <= command.num_tokens <= covered:
        msg = f"num_tokens is {command.num_tokens}, but the lease covers {covered} tokens"
        raise InvalidError(msg, resource="num_tokens", need=command.num_tokens, limit=covered)
    last = command.first_block + num_keys
    if command.first_block < 0 or not 0 <= last <= num_full:
        first = command.first_block
        named = f"block {first}" if num_keys == 1 else f"blocks {first} to {last - 1}"
        msg = f"keys names {named}, but num_tokens {command.num_tokens} fills {counted(num_full, 'block')}"
        raise InvalidError(msg, resource="blocks", need=last, limit=num_full)


def _covered_tokens(state: CacheState, lease: Lease) -> int:
    if state.is_simple:
        return state.leases.num_blocks.item(lease.row) * state.covering.tokens_per_block
    return state.covering.room_tokens(state.leases.rows.num_blocks[lease.row].tolist())


def _named(state: CacheState, lease: Lease, command: Commit) -> _Named:
    """Return the blocks of a lease that end where one of the keys does, in all groups whose blocks are found by key."""
    if not state.covering.shared or not command.keys:
        return _NONE_NAMED
    if not state.is_simple:
        return _named_in_groups(state, lease, command)
    first = command.first_block
    last = first + len(command.keys) // BYTES_PER_KEY
    blocks = state.leases.rows.block_ids[lease.row, first:last].astype(np.intp)
    return _Named(blocks, command.keys, np.arange(first, last, dtype=_POSITION))


def _named_in_groups(state: CacheState, lease: Lease, command: Commit) -> _Named:
    covering, words = state.covering, key_words(command.keys)
    blocks: list[Ids] = []
    keys: list[Words] = []
    positions: list[Positions] = []
    for at in covering.shared:
        group = covering.groups[at]
        first, marked = covering.block_keys(at, words, command.first_block)
        part = state.leases.part(lease.row, at)[first : first + len(marked)].astype(np.intp)
        places = np.arange(first, first + len(marked), dtype=_POSITION)
        is_named = part != NULL
        # Nearly always all places have a block, except those of states; searching bytes is faster than choosing.
        if group.keeps is not Keeps.STATE and b"\0" not in is_named.tobytes():
            blocks.append(part)
            keys.append(marked)
            positions.append((places + 1) * group.keys_per_block - 1)
            continue
        if group.keeps is Keeps.STATE:
            # A state belongs to exactly the token at which it was written.
            is_named &= (places + 1) * group.tokens_per_block == command.num_tokens
        blocks.append(part[is_named])
        keys.append(marked[is_named])
        positions.append((places[is_named] + 1) * group.keys_per_block - 1)
    return _Named(np.concatenate(blocks), np.concatenate(keys).tobytes(), np.concatenate(positions))


def _move_on(state: CacheState, lease: Lease, num_tokens: int) -> int:
    """Note how many tokens of a lease are computed; return how many blocks it gave back, unneeded by later tokens."""
    leases = state.leases
    if num_tokens <= leases.rows.num_computed.item(lease.row):
        return 0
    if not state.covering.giving_back:
        leases.rows.num_computed[lease.row] = num_tokens
        return 0
    left = leases.give_back(lease, num_tokens)
    if state.device.has_classes:
        keep_class(state, lease, left)
    state.device.let_go(left)
    state.counters["blocks_given_back"] += len(left)
    return len(left)


def _check_same_keys(state: CacheState, ready: Ids, keys: bytes) -> None:
    if state.device.keys_of(ready) != keys:
        msg = "a block is already committed under another key; a committed block must not be written again"
        raise InvalidError(msg, resource="keys")


def map_lease(state: CacheState, command: Map, now: float) -> Outcome:
    """Publish a lease's row to the readers of the block table."""
    lease = state.lease_of(command)
    renew(state, lease, now)
    if lease.phase is not Phase.ACTIVE:
        msg = f"the lease is {lease.phase.name.lower()}; only an active lease can be mapped"
        raise WrongStateError(msg, resource="lease")
    state.kernel.publish(lease.row, state.leases.parts_of(lease.row))
    published = state.kernel.rows.num_published[lease.row]
    return Outcome(
        reply=Mapped(
            row=lease.row,
            num_kernel_blocks=int(published.sum()),
            kernel_blocks=pack_counts(state, published),
        )
    )


def lookup(state: CacheState, command: Lookup, now: float) -> Outcome:
    """Tell how much of a prefix a tenant could reuse now; ask no store, hold nothing and change nothing."""
    del now
    prefix = match(state, command.keys, command.tenant_digest, EVERYWHERE)
    is_in = parted(state, prefix.below)
    return Outcome(
        reply=Found(
            num_device_blocks=len(prefix.blocks),
            num_host_blocks=int(np.count_nonzero(is_in.host)),
            hit_tokens=prefix.hit_tokens,
            num_disk_blocks=int(np.count_nonzero(is_in.disk)),
        )
    )


def pin(state: CacheState, command: Pin, now: float) -> Outcome:
    """Hold the cached blocks among the keys until they are unpinned."""
    check_pins(state, command.tenant_digest)
    blocks = blocks_to_pin(state, command)
    if not len(blocks):
        return Outcome(reply=Pinned(pin_id=_NO_PIN, num_blocks=0))
    pin_id = PinId(state.next_id())
    state.device.hold(blocks)
    state.pins[pin_id], state.pins.made_at[pin_id] = blocks, now
    return Outcome(reply=Pinned(pin_id=pin_id, num_blocks=len(blocks)))


def unpin(state: CacheState, command: Unpin, now: float) -> Outcome:
    """End a pin; if it has ended already or holds another tenant's blocks, do nothing and say so."""
    del now
    blocks = state.pins.get(command.pin_id)
    if blocks is None or is_foreign(state, blocks, command.tenant_digest):
        return Outcome(reply=Released(released=False))
    del state.pins[command.pin_id], state.pins.made_at[command.pin_id]
    state.device.let_go(blocks)
    return Outcome(reply=Released(released=True))
