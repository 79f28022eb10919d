"""Bugs in what is believed to be on disk, from an earlier life or after a restart, to switch on; see `mutations`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from kvleased.core import cache, commands, recovery
from kvleased.core.blocks.pool import Pool
from kvleased.core.blocks.states import State
from kvleased.core.copies import adopting, turning
from kvleased.core.effects import Outcome
from kvleased.core.ids import Ids
from kvleased.core.state import CacheState
from kvleased.core.tier.labels import LABEL
from tests.laws.mended import Mutation

_DISK: Final = 2
"""The number of the disk among the pools."""


class _Disk:
    """A disk pool that gives other answers to some questions of `adopting._chosen`."""

    def __init__(self, disk: Pool, *, knows_keys: bool) -> None:
        self.records, self._disk, self._knows_keys = disk.records, disk, knows_keys
        self.index = self

    def __len__(self) -> int:
        return len(self._disk)

    def find(self, keys: bytes) -> Ids:
        found = self._disk.index.find(keys)
        return found if self._knows_keys else np.full_like(found, -1)


class _State:
    """A cache's state with such a disk pool."""

    def __init__(self, disk: _Disk) -> None:
        self.disk = disk


def _choose(
    patch: pytest.MonkeyPatch, choose: Callable[[Callable[..., Ids], CacheState, Ids, Any], Ids]
) -> None:
    chosen = adopting._chosen

    patch.setattr(adopting, "_chosen", partial(choose, chosen))


def adopted_slot_may_be_in_use(patch: pytest.MonkeyPatch) -> None:
    """What the store found is believed even if the slot has been used since."""

    def choose(chosen: Callable[..., Ids], state: CacheState, slots: Ids, labels: Any) -> Ids:
        states = state.disk.records.state
        before = states.copy()
        states[:] = State.FREE
        found = chosen(state, slots, labels)
        states[:] = before
        return found

    _choose(patch, choose)


def key_is_adopted_twice(patch: pytest.MonkeyPatch) -> None:
    """What the store found is believed even if its key is already on disk."""

    def choose(chosen: Callable[..., Ids], state: CacheState, slots: Ids, labels: Any) -> Ids:
        return chosen(_State(_Disk(state.disk, knows_keys=False)), slots, labels)

    _choose(patch, choose)


def _relabel(patch: pytest.MonkeyPatch, change: Callable[[CacheState, Ids, Any], None]) -> None:
    """Have other labels adopted than those that the store tells."""

    def adopt(state: CacheState, command: commands.Adopt, now: float) -> Outcome:
        slots = np.frombuffer(command.slot_ids, np.int32).astype(np.intp)
        labels = np.frombuffer(command.labels, LABEL).copy()
        is_slot = (slots >= 0) & (slots < len(state.disk))
        changed = labels[is_slot]
        change(state, slots[is_slot], changed)
        labels[is_slot] = changed
        return adopting.adopt(state, replace(command, labels=labels.tobytes()), now)

    patch.setitem(cache._VERBS, commands.Adopt, adopt)


def adopted_slot_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """A slot is taken over under a generation of this life, so that its label never matches."""

    def change(state: CacheState, slots: Ids, labels: Any) -> None:
        labels["generation"] = state.disk.records.generation[slots]

    _relabel(patch, change)


def label_of_an_earlier_use_is_adopted(patch: pytest.MonkeyPatch) -> None:
    """A slot that has been freed since is taken over under its next generation, which its label does not have."""

    def change(state: CacheState, slots: Ids, labels: Any) -> None:
        generations = state.disk.records.generation[slots]
        labels["generation"] = np.maximum(labels["generation"], generations)

    _relabel(patch, change)


def filling_disk_slot_outlives_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A restart takes a disk slot that a mover was still writing for a written one."""
    distrust = recovery._distrust

    def trusting(pool: Pool) -> None:
        states = pool.records.state
        filling = states == State.FILLING
        distrust(pool)
        if pool.tier_number == _DISK:
            states[filling] = State.READY

    patch.setattr(recovery, "_distrust", trusting)


def disk_is_stored_to_before_it_was_read(patch: pytest.MonkeyPatch) -> None:
    """Slots whose blocks have not been reported yet are taken for free ones, and written."""

    def credulous(state: CacheState, command: commands.TierChanged, now: float) -> Outcome:
        return turning.tier_changed(state, replace(command, is_read=True), now)

    patch.setitem(cache._VERBS, commands.TierChanged, credulous)


OF_ADOPTING: Final[tuple[tuple[Mutation, str], ...]] = (
    (adopted_slot_may_be_in_use, "disk"),
    (key_is_adopted_twice, "evict"),
    (adopted_slot_begins_anew, "evict"),
    (label_of_an_earlier_use_is_adopted, "hits"),
    (filling_disk_slot_outlives_a_restart, "through"),
    (disk_is_stored_to_before_it_was_read, "through"),
)
"""Every bug of this kind that the simulation can find, and the stores with which it finds it."""
