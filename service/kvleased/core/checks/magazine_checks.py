"""Own the invariants of magazines: bits, counts, names and processes agree, and private blocks are in one place."""

import numpy as np

from kvleased.core.blocks.states import State
from kvleased.core.ids import Ids
from kvleased.core.state import CacheState


def magazine_violations(state: CacheState, listed: Ids) -> list[str]:
    """Return what does not hold for blocks in magazines; `listed` are the device blocks of all leases."""
    book = state.magazines
    held_by = book.records.held_by
    if not len(book) and not held_by.any():
        return []
    states, found = state.device.records.state, []
    is_held = held_by != 0
    if (is_held & (states != State.READY) & (states != State.RESERVED)).any():
        found.append("a magazine holds a block that is neither private nor findable")
    is_private = is_held & (states == State.RESERVED)
    is_private_once = np.bitwise_count(held_by) == 1
    is_private_once[listed] = False
    found += [
        f"private block {block} is in a magazine and somewhere else"
        for block in (is_private & ~is_private_once).nonzero()[0].tolist()
    ]
    believed = sum(1 << one.place for one in book.by_name.values())
    if (held_by & ~np.uint32(believed)).any():
        found.append("a block is held by a magazine that does not exist")
    for magazine in book.by_name.values():
        blocks = book.blocks_of(magazine)
        if len(blocks) != magazine.num_blocks:
            found.append(
                f"magazine {magazine.place} has {len(blocks)} blocks, but {magazine.num_blocks} are counted"
            )
        if (state.device.records.tenant[blocks] != magazine.tenant).any():
            found.append(f"magazine {magazine.place} has a block of another tenant")
    return found


def member_violations(state: CacheState) -> list[str]:
    """Compare the names in the records, and the processes, with the magazines."""
    found, book = [], state.magazines
    named = {place: name for place, name in enumerate(book.records.name.tolist()) if name}
    if named != {one.place: name for name, one in book.by_name.items()}:
        found.append("the names in the records are not those of the magazines")
    members = {worker: one for one in book.by_name.values() for worker in one.workers}
    if members != book.by_worker or not members.keys() <= state.workers.keys():
        found.append("the recorded processes of the magazines are not those that exist")
    if any(not one.workers for one in book.by_name.values()):
        found.append("a magazine has no process")
    return found
