"""Own what workers say about their blocks and ask about cached ones: commit, map, lookup, pin and unpin."""

from typing import Final

import numpy as np

from kvlease.errors import InvalidError, PoolFullError, WrongStateError
from kvlease.ids import BYTES_PER_KEY, PinId
from kvleased.core.commands import Commit, Lookup, Map, Pin, Unpin
from kvleased.core.effects import Committed, Found, Mapped, Outcome, Pinned, Released
from kvleased.core.ending import renew
from kvleased.core.leases import Lease, Phase
from kvleased.core.pool import Ids
from kvleased.core.room import match
from kvleased.core.state import CacheState, as_ids, split_keys
from kvleased.core.states import Event, State

_NO_PIN: Final = PinId(0)
"""What a caller gets who pins nothing: unpinning it is an answered no-op."""


def commit(state: CacheState, command: Commit, now: float) -> Outcome:
    """Make full blocks findable; the late word of a quarantined lease's owner counts, for nobody else wrote there."""
    del now
    lease = state.lease_of(command)
    if lease.phase not in (Phase.ACTIVE, Phase.QUARANTINED):
        msg = f"the lease is {lease.phase.name.lower()}, only one on the device can be committed"
        raise WrongStateError(msg)
    keys = split_keys(command.keys)
    blocks = _blocks_to_commit(state, lease, command, keys)
    states = state.device.records.state[blocks]
    is_ready = states == State.READY
    _check_same_keys(
        state, blocks[is_ready], [key for key, done in zip(keys, is_ready, strict=True) if done]
    )
    is_new = [
        not done and key not in state.device.index and key not in state.loading
        for key, done in zip(keys, is_ready.tolist(), strict=True)
    ]
    new = blocks[is_new]
    if len(new):
        positions = np.arange(command.first_block, command.first_block + len(keys), dtype=np.uint32)
        state.device.records.position[new] = positions[is_new]
        state.device.records.checksum[new] = 0
        state.device.publish(
            new, [key for key, wanted in zip(keys, is_new, strict=True) if wanted], Event.COMMIT
        )
        state.tell("blocks_committed", lease, num_blocks=len(new))
    num_duplicates = len(blocks) - len(new) - int(is_ready.sum())
    state.counters["blocks_committed"] += len(new)
    state.counters["blocks_duplicate"] += num_duplicates
    return Outcome(reply=Committed(num_committed=len(new), num_duplicates=num_duplicates))


def _blocks_to_commit(state: CacheState, lease: Lease, command: Commit, keys: list[bytes]) -> Ids:
    if len(command.keys) % BYTES_PER_KEY:
        msg = f"keys has {len(command.keys)} bytes, which is no multiple of {BYTES_PER_KEY}"
        raise InvalidError(msg)
    if len(set(keys)) != len(keys):
        msg = "keys names a block twice; the keys of a chain differ"
        raise InvalidError(msg)
    blocks = state.leases.blocks_of(lease)
    num_full = command.num_tokens // state.shape.tokens_per_block
    covered = len(blocks) * state.shape.tokens_per_block
    if not 0 <= command.num_tokens <= covered:
        msg = f"num_tokens is {command.num_tokens}, but the lease covers {covered}"
        raise InvalidError(msg, resource="num_tokens", need=command.num_tokens, limit=covered)
    last = command.first_block + len(keys)
    if command.first_block < 0 or not 0 <= last <= num_full:
        msg = (
            f"keys names blocks {command.first_block} to {last - 1}, but num_tokens "
            f"{command.num_tokens} fills {num_full} blocks"
        )
        raise InvalidError(msg, resource="blocks", need=last, limit=num_full)
    return blocks[command.first_block : last]


def _check_same_keys(state: CacheState, ready: Ids, keys: list[bytes]) -> None:
    if len(ready) and state.device.records.key[ready].tobytes() != b"".join(keys):
        msg = "a block is committed already, under another key; a committed block is never written again"
        raise InvalidError(msg)


def map_lease(state: CacheState, command: Map, now: float) -> Outcome:
    """Let readers of the block table see a lease's row."""
    lease = state.lease_of(command)
    renew(state, lease, now)
    if lease.phase is not Phase.ACTIVE:
        msg = f"the lease is {lease.phase.name.lower()}, only an active one can be mapped"
        raise WrongStateError(msg)
    rows = state.leases.rows
    rows.num_published[lease.row] = rows.num_blocks[lease.row]
    return Outcome(
        reply=Mapped(row=lease.row, num_kernel_blocks=int(rows.num_published[lease.row]))
    )


def lookup(state: CacheState, command: Lookup, now: float) -> Outcome:
    """Tell how much of a prefix a tenant could reuse now; holds and changes nothing."""
    del now
    prefix = match(state, command.keys, command.tenant_digest, use_host=True)
    num_host = len(prefix.slots)
    num_device = len(prefix.entries) - num_host
    return Outcome(reply=Found(num_device_blocks=num_device, num_host_blocks=num_host))


def pin(state: CacheState, command: Pin, now: float) -> Outcome:
    """Hold the cached blocks among the keys until they are unpinned."""
    del now
    if len(state.pins) >= state.shape.max_pins:
        msg = f"there are {len(state.pins)} pins, which is the limit; unpin one first"
        raise PoolFullError(
            msg, resource="pins", need=1, available=0, limit=state.shape.max_pins,
            retry_after_ms=state.shape.retry_after_ms,
        )  # fmt: skip
    found = (state.device.index.get(key) for key in dict.fromkeys(split_keys(command.keys)))
    blocks = as_ids([block for block in found if block is not None])
    if not len(blocks):
        return Outcome(reply=Pinned(pin_id=_NO_PIN, num_blocks=0))
    pin_id = PinId(state.next_id())
    state.device.hold(blocks)
    state.pins[pin_id] = blocks
    return Outcome(reply=Pinned(pin_id=pin_id, num_blocks=len(blocks)))


def unpin(state: CacheState, command: Unpin, now: float) -> Outcome:
    """End a pin; one that has ended already is an answered no-op."""
    del now
    blocks = state.pins.pop(command.pin_id, None)
    if blocks is None:
        return Outcome(reply=Released(released=False))
    state.device.let_go(blocks)
    return Outcome(reply=Released(released=True))
