"""Bugs of magazines to switch on: what engines hold by block id, and who else may have it."""

import numpy as np
import pytest

from kvlease.ids import WorkerId
from kvleased.core import recovery
from kvleased.core.blocks.index import KeyIndex
from kvleased.core.blocks.states import State
from kvleased.core.commands import Exchange
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import NOWHERE
from kvleased.core.magazines import Magazine, MagazineBook
from kvleased.core.state import CacheState
from kvleased.core.verbs import exchanging
from tests.laws.mended import Mutation


def drop_frees_what_another_holds(patch: pytest.MonkeyPatch) -> None:
    """A block that leaves one magazine can be evicted, even if others still hold it."""
    drop = exchanging._drop

    def careless(state: CacheState, magazine: Magazine, packed: bytes) -> bytes:
        codes = drop(state, magazine, packed)
        done = np.frombuffer(packed, np.int32)[np.frombuffer(codes, np.uint8) == 1].astype(np.intp)
        shared = done[
            (state.device.records.state[done] == State.READY) & (state.device.holds[done] > 0)
        ]
        state.device.holds[shared] = 0
        state.device.order.add(shared)
        return codes

    patch.setattr(exchanging, "_drop", careless)


def retract_heeds_no_other_holder(patch: pytest.MonkeyPatch) -> None:
    """A block that others read becomes private to an engine that will write it."""

    def careless(state: CacheState, magazine: Magazine, packed: bytes) -> bytes:
        blocks, is_own = exchanging._own(state, magazine, packed)
        is_own &= state.device.records.state[blocks] == State.READY
        state.device.retract(blocks[is_own])
        return exchanging._codes(is_own, np.ones(int(is_own.sum()), np.bool_))

    patch.setattr(exchanging, "_retract", careless)


def death_forgets_a_block(patch: pytest.MonkeyPatch) -> None:
    """All that the last process of an engine leaves behind is let go of, except one block."""
    close = MagazineBook.close
    patch.setattr(MagazineBook, "close", lambda *arguments: close(*arguments)[:-1])


def published_key_is_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """A block is published under a key that another block already has, so that both are findable."""
    publish = exchanging._publish

    def careless(state: CacheState, magazine: Magazine, command: Exchange) -> bytes:
        with pytest.MonkeyPatch.context() as blindly:
            blindly.setattr(KeyIndex, "find", lambda _, keys: np.full(len(keys) // 32, -1, np.intp))
            return publish(state, magazine, command)

    patch.setattr(exchanging, "_publish", careless)


def exchange_is_carried_out_twice(patch: pytest.MonkeyPatch) -> None:
    """An exchange that comes again, because its answer was lost, is carried out again."""
    patch.setattr(exchanging, "_check_sequence", lambda *_: None)


def first_death_ends_the_magazine(patch: pytest.MonkeyPatch) -> None:
    """An engine loses its blocks when the first of its processes ends."""
    part = MagazineBook.part

    def hasty(self: MagazineBook, worker_id: WorkerId) -> Magazine | None:
        magazine = self.by_worker.get(worker_id)
        part(self, worker_id)
        return magazine

    patch.setattr(MagazineBook, "part", hasty)


def restart_forgets_magazines(patch: pytest.MonkeyPatch) -> None:
    """A restart of the control process takes blocks that engines hold for free ones."""

    def forgetful(state: CacheState, magazines: object) -> Ids:
        del magazines
        state.records.magazines.name[:] = 0
        state.records.magazines.held_by[:] = 0
        return NOWHERE

    patch.setattr(recovery, "_recover_magazines", forgetful)


OF_MAGAZINES: tuple[tuple[Mutation, str], ...] = tuple(
    (one, "magazines")
    for one in (
        drop_frees_what_another_holds,
        retract_heeds_no_other_holder,
        death_forgets_a_block,
        published_key_is_not_looked_for,
        exchange_is_carried_out_twice,
        first_death_ends_the_magazine,
        restart_forgets_magazines,
    )
)
"""Every bug of magazines, and the cache in which it shows."""
