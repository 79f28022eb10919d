"""Own how what an earlier life left in the disk store is taken over: slots that are free here become READY again."""

from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.core.blocks.states import Event, State
from kvleased.core.commands import Adopt
from kvleased.core.effects import Adopted, Outcome
from kvleased.core.ids import Ids
from kvleased.core.state import CacheState, split_keys
from kvleased.core.tier.labels import LABEL

_GENERATIONS_END: Final = np.uint64(2**62)
"""No slot ever reaches this generation, so a label that names it or a later one was not written here."""


def adopt(state: CacheState, command: Adopt, now: float) -> Outcome:
    """Publish free disk slots under their labels, unless a label cannot be trusted or its key is known already."""
    del now
    slots: Ids = np.frombuffer(command.slot_ids, np.int32).astype(np.intp)
    labels = np.frombuffer(command.labels, LABEL)
    checksums = np.frombuffer(command.checksums, np.uint64)
    assert len(slots) == len(labels) == len(checksums), "a slot has a label and a checksum"
    chosen = _chosen(state, slots, labels)
    state.counters["slots_adopted"] += len(chosen)
    state.counters["slots_not_adopted"] += len(slots) - len(chosen)
    if not len(chosen):
        return Outcome(reply=Adopted(num_adopted=0))
    slots, labels = slots[chosen], labels[chosen]
    disk, columns = state.disk, state.disk.records
    columns.generation[slots] = labels["generation"]
    disk.take(slots, Event.FILL, labels["tenant"])
    columns.position[slots] = labels["position"]
    columns.checksum[slots] = checksums[chosen]
    columns.is_remote[slots] = False
    disk.publish(slots, labels["key"].tobytes(), Event.FILLED)
    disk.let_go(slots)
    return Outcome(reply=Adopted(num_adopted=len(slots)))


def _chosen(state: CacheState, slots: Ids, labels: NDArray[np.void]) -> Ids:
    """Return the indices of the slots to take over, in the order of their blocks in their chains."""
    disk = state.disk
    is_good = (slots >= 0) & (slots < len(disk))
    is_good[is_good] = disk.records.state[slots[is_good]] == State.FREE
    # A search that begins anew also reports earlier uses of a slot in this life; a load would expect another label.
    is_good[is_good] &= labels["generation"][is_good] >= disk.records.generation[slots[is_good]]
    is_good &= labels["tenant"] != 0
    is_good &= labels["generation"] < _GENERATIONS_END
    keys = labels["key"].tobytes()
    is_good &= disk.index.find(keys) < 0
    is_good &= _is_first(split_keys(keys), is_good)
    is_good &= _is_first(slots.tolist(), is_good)
    (chosen,) = is_good.nonzero()
    # In this order, no block will be evicted before those that continue it.
    in_order: Ids = chosen[labels["position"][chosen].argsort(kind="stable")]
    return in_order


def _is_first(names: Sequence[Hashable], is_good: NDArray[np.bool_]) -> list[bool]:
    """Tell for each name whether it is good and differs from all good ones before it."""
    seen: set[Hashable] = set()
    found = []
    for name, good in zip(names, is_good.tolist(), strict=True):
        found.append(good and name not in seen)
        if good:
            seen.add(name)
    return found
