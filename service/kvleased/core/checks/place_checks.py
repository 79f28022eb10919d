"""Own the invariants of places: what each group of a lease has, and what kernels read of it."""

from typing import Final

import numpy as np

from kvlease.groups import Keeps
from kvleased.core.blocks.records import NULL
from kvleased.core.checks.sound import Sound
from kvleased.core.state import CacheState

_MOVE_ON: Final = (Keeps.WINDOW, Keeps.CHUNK)
"""Groups whose places move on as tokens are computed, but only when the lease is extended."""


def place_violations(state: CacheState, sound: Sound) -> list[str]:
    """Return what does not hold for the places of leases and the rows that kernels read."""
    return sound.unless_known(
        "places", _looked_at(state), lambda: [*_places(state), *_kernels(state)]
    )


def _looked_at(state: CacheState) -> tuple[object, ...]:
    """Return all that these laws look at; the groups never change."""
    rows, kernel = state.records.rows, state.kernel.rows
    return (
        [
            (one.lease_id, one.row, one.members and one.members.furthest(0))
            for one in state.leases.by_id.values()
        ],
        rows.num_computed.tobytes(),
        rows.num_tokens.tobytes(),
        rows.num_blocks.tobytes(),
        rows.block_ids.tobytes(),
        kernel.sequence.tobytes(),
        kernel.num_published.tobytes(),
        kernel.kernel_ids.tobytes(),
    )


def _places(state: CacheState) -> list[str]:
    """Each group of a lease has just the places that its counts of tokens need, and a block at each of them."""
    found = []
    covering, rows = state.covering, state.records.rows
    for lease in state.leases.by_id.values():
        computed, tokens = int(rows.num_computed[lease.row]), int(rows.num_tokens[lease.row])
        parts = [part.tolist() for part in state.leases.parts_of(lease.row)]
        if computed > covering.room_tokens([len(part) for part in parts]):
            found.append(f"lease {lease.lease_id} has computed more tokens than it has room for")
        for group, part in enumerate(parts):
            keeps = covering.groups[group].keeps
            least = most = covering.last_covered(group, computed, tokens)
            if lease.members is not None:
                # A rank that has left may have been further than those that are present.
                furthest = max(tokens, lease.members.furthest(computed))
                most = covering.last_covered(group, furthest, furthest)
            if keeps in _MOVE_ON:
                least = 0
            if not least <= len(part) <= most:
                found.append(f"lease {lease.lease_id} has {len(part)} places in group {group}")
            if NULL in part[covering.first_held(group, computed, len(part)) :]:
                found.append(f"lease {lease.lease_id} lacks a block in group {group}")
            gone = part[: covering.first_needed(group, computed)]
            if gone.count(NULL) != len(gone):
                found.append(f"lease {lease.lease_id} has not given back in group {group}")
    return found


def _kernels(state: CacheState) -> list[str]:
    """What kernels read of mapped leases is what the leases have, and no row is being written."""
    found = []
    kernel = state.kernel.rows
    if (kernel.sequence % 2).any():
        found.append("a kernel row is being written")
    for lease in state.leases.by_id.values():
        if not state.kernel.is_published(lease.row):
            continue
        start = 0
        for at, part in enumerate(state.leases.parts_of(lease.row)):
            group, num_read = state.covering.groups[at], int(kernel.num_published[lease.row, at])
            firsts = np.maximum(part, 0)[:, None] * group.kernel_block_stride
            expected = (firsts + np.arange(group.kernel_blocks_per_block)).ravel()
            read = kernel.kernel_ids[lease.row, start : start + num_read]
            if read.tolist() != expected.tolist():
                found.append(f"kernels read other blocks than lease {lease.lease_id} has")
            start += group.table_blocks * group.kernel_blocks_per_block
    return found
