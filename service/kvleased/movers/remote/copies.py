"""Own copies from host slots to a remote store and from there to device blocks, one call of the store at a time.

If a copy was not made, its position has failed, even if the only reason is that the time budget is spent.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from kvleased.core.effects import Direction
from kvleased.movers.pools import OutOfBoundsError, Pools, check_bounds
from kvleased.movers.protocol import Batch, Completion
from kvleased.movers.remote.caller import RemoteCaller
from kvleased.movers.remote.pacing import Pace
from kvleased.movers.remote.store import IS_THERE, RemoteError, RemoteStore
from kvleased.movers.remote.value import BlockName, Value, ValueForm, blocks_of
from kvleased.movers.rows import checksum
from kvleased.telemetry import logs

Result = TypeVar("Result")

_SPOILED_MAX: Final = 1024
"""Spoiled values that are remembered to be dropped; any others will be found again."""


@dataclass(slots=True, kw_only=True)
class RemoteBatch:
    """A batch on its way, and how far it has come."""

    batch: Batch
    pools: Pools
    form: ValueForm | None
    blocks: Sequence[BlockName]
    ids: list[int]
    """Host slots of a share, or device blocks of a fetch."""
    wanted_sums: list[int]
    """The checksums that the sources must have, 0 if unknown."""
    seconds_left: float
    sums: list[int] = field(default_factory=list)
    """Checksums of the positions dealt with so far: 0 if a value is not where it should be now."""
    is_below: bytes | None = None
    """Of a share: which values the store had before, as `exists` tells it; None until that was asked."""
    num_moved: int = 0
    nanoseconds: int = 0

    @classmethod
    def of(
        cls, batch: Batch, pools: Pools, form: ValueForm | None, seconds: float
    ) -> "RemoteBatch":
        """Return a batch with everything that is needed to carry it out.

        Raises:
            OutOfBoundsError: an id lies outside its pool, the arrays do not match in length, or the batch is not for a
                remote store.
        """
        is_share = batch.direction is Direction.SHARE
        if not is_share and batch.direction is not Direction.FETCH:
            raise OutOfBoundsError
        ids = np.frombuffer(batch.source_ids if is_share else batch.target_ids, np.int32)
        blocks = blocks_of(batch.labels)
        wanted = np.frombuffer(batch.checksums, np.uint64).tolist() or [0] * len(ids)
        num_rows = len(pools.slots) if is_share else pools.num_blocks
        if not len(ids) == len(blocks) == len(wanted):
            raise OutOfBoundsError
        check_bounds(ids, num_rows, "host" if is_share else "device")
        return cls(
            batch=batch,
            pools=pools,
            form=form,
            blocks=blocks,
            ids=ids.tolist(),
            wanted_sums=wanted,
            seconds_left=seconds,
        )

    def slot(self, position: int) -> memoryview:
        """Return the bytes of a host slot that its blocks take; a block's checksum is taken over these."""
        return self.pools.slots[self.ids[position], : self.pools.image_bytes].data

    @property
    def completion(self) -> Completion:
        """The result, once nothing more is done."""
        sums = np.zeros(len(self.ids), np.uint64)
        sums[: len(self.sums)] = self.sums
        is_fetch = self.batch.direction is Direction.FETCH
        return Completion(
            number=self.batch.number,
            is_done=True,
            checksums=sums.tobytes() if is_fetch else b"",
            failed=tuple(np.flatnonzero(sums == 0).tolist()),
            num_bytes=self.num_moved * (self.form.slot_bytes if self.form else 0),
            nanoseconds=self.nanoseconds,
        )


class RemoteCopies:
    """Carry out batches step by step; a step is one call of the store, or two."""

    def __init__(self, caller: RemoteCaller, *, seconds_max: float) -> None:
        """Assign; `seconds_max` is the time budget of a batch."""
        self._caller = caller
        self._get_pace = Pace(seconds_max)
        self._put_pace = Pace(seconds_max)
        self._seconds_max = seconds_max
        self._spoiled: list[str] = []

    @property
    def has_spoiled(self) -> bool:
        """Whether there are spoiled values to drop."""
        return bool(self._spoiled)

    def step(self, work: RemoteBatch) -> bool:
        """Do the next part of a batch, and return whether there is more to do."""
        if work.form is None:
            return False
        started = time.monotonic()
        act = self._share if work.batch.direction is Direction.SHARE else self._fetch
        try:
            return act(work, work.form)
        except RemoteError:
            return False
        finally:
            seconds = time.monotonic() - started
            work.seconds_left -= seconds
            work.nanoseconds += int(seconds * 1e9)

    def drop_spoiled(self) -> None:
        """Have the store drop values that were not what they should be, so that good ones can take their names."""
        names, self._spoiled = self._spoiled, []
        try:
            self._caller.call(lambda store: store.drop(names), self._seconds_max)
        except RemoteError:
            # The next fetch that meets them tries again.
            return

    def _fetch(self, work: RemoteBatch, form: ValueForm) -> bool:
        blocks = self._next(work, self._get_pace, form.value_bytes)
        if not blocks:
            return False
        names = [form.name(block) for block in blocks]
        started = time.monotonic()
        values = self._call(work, lambda store: store.get(names, form.value_bytes))
        seconds = time.monotonic() - started
        self._get_pace.travelled(sum(len(value) for value in values if value is not None), seconds)
        spoiled = []
        for name, value in zip(names, values, strict=True):
            slot_sum = 0 if value is None else _land(work, form, value)
            if value is not None and not slot_sum:
                spoiled.append(name)
            work.num_moved += bool(slot_sum)
            work.sums.append(slot_sum)
        if spoiled:
            logs.line("warning", "remote_values_refused", num_values=len(spoiled))
            self._spoiled = (self._spoiled + spoiled)[:_SPOILED_MAX]
        return len(work.sums) < len(work.ids)

    def _share(self, work: RemoteBatch, form: ValueForm) -> bool:
        if work.is_below is None:
            names = [form.name(block) for block in work.blocks]
            work.is_below = self._call(work, lambda store: store.exists(names, form.value_bytes))
            return bool(names)
        start = len(work.sums)
        blocks = self._next(work, self._put_pace, form.value_bytes)
        if not blocks:
            return False
        names, values, positions = [], [], []
        sums = [1] * len(blocks)
        for position, block in enumerate(blocks):
            if work.is_below[start + position] == IS_THERE:
                continue
            slot = work.slot(start + position)
            sums[position] = checksum(slot)
            if work.wanted_sums[start + position] not in {0, sums[position]}:
                sums[position] = 0
                continue
            names.append(form.name(block))
            values.append(form.encode(block, slot, sums[position]))
            positions.append(position)
        if names:
            started = time.monotonic()
            stored = self._call(work, lambda store: store.put(names, values))
            num_bytes = len(values) * form.value_bytes
            self._put_pace.travelled(num_bytes, time.monotonic() - started)
            for position, is_stored in zip(positions, stored, strict=True):
                sums[position] *= is_stored
            work.num_moved += sum(stored)
        work.sums += sums
        return len(work.sums) < len(work.ids)

    @staticmethod
    def _next(work: RemoteBatch, pace: Pace, value_bytes: int) -> Sequence[BlockName]:
        start = len(work.sums)
        count = pace.count(value_bytes, work.seconds_left, is_first=not start)
        return work.blocks[start : start + count]

    def _call(self, work: RemoteBatch, act: Callable[[RemoteStore], Result]) -> Result:
        is_first = not work.sums and work.is_below is None
        return self._caller.call(act, work.seconds_left, is_whole_budget=is_first)


def _land(work: RemoteBatch, form: ValueForm, value: Value) -> int:
    """Write a value to its block and return its checksum; if it is not what was asked for, only return 0."""
    position = len(work.sums)
    decoded = form.decode(work.blocks[position], value)
    if decoded is None:
        return 0
    slot, slot_sum = decoded
    if work.wanted_sums[position] not in {0, slot_sum}:
        return 0
    work.pools.scatter_slot(work.ids[position], np.frombuffer(slot, np.uint8))
    return slot_sum
