"""Own the process that moves blocks between the host pools and the disk stores; `store_file` owns what is in a store.

No failure of a disk ends it: a store that does not work is off until it works again, and its blocks are misses.
"""

import json
import os
import select
import signal
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvleased.core.effects import Direction
from kvleased.core.tier.labels import BYTES_PER_LABEL, LABEL
from kvleased.movers import protocol
from kvleased.movers.disk.cells import BYTES_PER_LAYOUT, StoreShape
from kvleased.movers.disk.errors import StoreError
from kvleased.movers.disk.store_file import StoreFile, Transfer
from kvleased.movers.disk.store_place import StorePlace
from kvleased.movers.engine import Engine, Lay, lay_for_store, lay_in_memory
from kvleased.movers.pools import Copied, OutOfBoundsError, Pools, check_bounds
from kvleased.movers.protocol import (
    Batch,
    Completion,
    Found,
    PoolMap,
    Purge,
    Purged,
    Status,
)
from kvleased.system.descriptors import receive_packet
from kvleased.telemetry import logs

_SECONDS_BETWEEN_TRIES: Final = 2.0
_SECONDS_BETWEEN_LOOKS: Final = 2.0
"""Seconds between two checks that an open store is still where it belongs."""
_PURGED: Final = "it was purged"
"""Why a store is off that an operator had removed."""
_WAITING_MAX: Final = 256
"""Packets that are taken from the link before they are acted on."""


@dataclass(slots=True, kw_only=True)
class _Tier:
    """The store of one cache."""

    pool: int
    shape: StoreShape | None
    """None if the packet described no possible shape."""
    store: StoreFile | None = None
    """None while the store is off."""
    reason: str = ""
    file_id: str
    """The file whose slots the daemon has been told of, or is being told of."""
    next_try: float = 0.0
    """When to try or check again: to open the store if it is off, else to see that it is still where it belongs."""
    unseen_slot: int
    """The first slot whose cell is still to be looked at; the number of slots if all have been."""
    written: set[int] = field(default_factory=set)
    """Slots that were written before they were looked at; the daemon need not be told of them."""


class DiskEngine(Engine):
    """Serve one link: store and load blocks, and report what stores hold and whether they work."""

    def __init__(
        self,
        link: socket.socket,
        place: StorePlace | None,
        seconds_between_tries: float = _SECONDS_BETWEEN_TRIES,
        seconds_between_looks: float = _SECONDS_BETWEEN_LOOKS,
        lay: Lay = lay_in_memory,
    ) -> None:
        """Take the link; without a place, every store is off."""
        super().__init__(link, lay)
        self._place = place
        self._seconds_between_tries = seconds_between_tries
        self._seconds_between_looks = seconds_between_looks
        self._tiers: dict[int, _Tier] = {}
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._is_over = False

    def _serve(self) -> None:
        while True:
            if not self._waiting:
                self._spend_idle_time()
            self._take_in()
            if self._is_over:
                return
            self._look_around()
            # A request waits for a load, but nobody waits for a store.
            load = self._next_load()
            packet, fds = load or self._waiting.popleft()
            self._act(packet, fds)
            if load is None:
                self._look_on_a_little()

    def _take_in(self) -> None:
        """Take all packets that have arrived."""
        while len(self._waiting) < _WAITING_MAX and not self._is_over:
            try:
                packet, fds = receive_packet(
                    self._link,
                    protocol.PACKET_BYTES_MAX,
                    protocol.FDS_A_PACKET,
                    socket.MSG_DONTWAIT,
                )
            except BlockingIOError:
                return
            self._waiting.append((packet, fds))
            self._is_over = not packet

    def _next_load(self) -> tuple[bytes, list[int]] | None:
        """Take the first waiting load, if only batches wait before it."""
        for index, (packet, _) in enumerate(self._waiting):
            if packet[:1] != protocol.BATCH:
                return None
            if protocol.direction_of(packet) is Direction.LOAD:
                found = self._waiting[index]
                del self._waiting[index]
                return found
        return None

    def _let_loads_pass(self) -> None:
        """In the middle of a store, carry out the loads that have arrived meanwhile."""
        self._take_in()
        while not self._is_over and (waiting := self._next_load()):
            self._act(*waiting)

    def _spend_idle_time(self) -> None:
        """Until a packet comes, look through stores, try those that are off, and ready memory."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while not poll.poll(0):
            tier = next((tier for tier in self._tiers.values() if _is_unseen(tier)), None)
            if tier is not None:
                self._look_on(tier)
                continue
            self._touch_while_idle()
            tries = [tier.next_try for tier in self._tiers.values() if self._is_watched(tier)]
            if not tries:
                poll.poll()
                return
            poll.poll(max(0.0, min(tries) - time.monotonic()) * 1e3)
            self._look_around()

    def _look_around(self) -> None:
        """Try to open the stores that are off and check those that are on, each when it is due."""
        now = time.monotonic()
        for tier in self._tiers.values():
            if not self._is_watched(tier) or tier.next_try > now:
                continue
            if tier.store is None:
                self._open(tier)
            else:
                self._check(tier, tier.store)

    def _check(self, tier: _Tier, store: StoreFile) -> None:
        """Turn a store off if its path no longer leads to it; if it does, see that the limit is kept."""
        assert self._place is not None, "a store without a place"
        tier.next_try = time.monotonic() + self._seconds_between_looks
        try:
            self._place.check(store)
        except StoreError as error:
            self._turn_off(tier, str(error))
        else:
            self._place.keep_below_limit()

    def _look_on_a_little(self) -> None:
        """Look through a store a little further, so that a steady stream of blocks never keeps it from ending."""
        unseen = next((tier for tier in self._tiers.values() if _is_unseen(tier)), None)
        if unseen is not None:
            self._look_on(unseen)

    def _act(self, packet: bytes, fds: list[int]) -> None:
        super()._act(packet, fds)
        kind = packet[:1]
        if kind == protocol.MAP:
            pool = PoolMap.decode(packet)
            self._forget(pool.pool)
            if pool.num_disk_slots:
                self._tiers[pool.pool] = tier = _tier_of(pool)
                self._open(tier)
        elif kind == protocol.UNMAP:
            self._forget(protocol.decode_unmap(packet))
        elif kind == protocol.PURGE:
            self._purge(Purge.decode(packet).pool)

    def _forget(self, pool: int) -> None:
        tier = self._tiers.pop(pool, None)
        if tier is None or tier.shape is None or self._place is None:
            return
        if tier.store is not None:
            self._place.close(tier.store)
        self._place.disclaim(tier.shape)

    def _purge(self, pool: int) -> None:
        """Remove a store's file and say so, or say why that failed; if its cache stays, the file is made anew."""
        tier = self._tiers.get(pool)
        if tier is None or tier.store is None or self._place is None:
            reason = "the cache has no store" if tier is None else tier.reason
        else:
            try:
                self._place.purge(tier.store)
                tier.store, reason = None, ""
            except StoreError as error:
                reason = str(error)
            self._turn_off(tier, reason or _PURGED)
        self._link.sendall(Purged(pool=pool, reason=reason).encode())

    def _is_watched(self, tier: _Tier) -> bool:
        """Tell whether a store works, or is off but may come to work by itself."""
        return tier.shape is not None and self._place is not None

    def _open(self, tier: _Tier) -> None:
        """Turn the store on if it can be opened; report it if that changes anything."""
        tier.next_try = time.monotonic() + self._seconds_between_tries
        try:
            tier.store = self._store_of(tier)
        except StoreError as error:
            self._say_off(tier, str(error))
            return
        tier.reason = ""
        tier.next_try = time.monotonic() + self._seconds_between_looks
        if tier.file_id != tier.store.file_id:
            tier.file_id, tier.unseen_slot = tier.store.file_id, 0
            tier.written.clear()
        logs.line("info", "disk_store_on", pool=tier.pool, file_id=tier.file_id)
        status = Status(is_on=True, pool=tier.pool, file_id=tier.file_id)
        self._link.sendall(status.encode())

    def _store_of(self, tier: _Tier) -> StoreFile:
        if self._place is None:
            raise StoreError("no disk_dir is set")
        if tier.shape is None:
            raise StoreError("the cache has no layout fingerprint")
        return self._place.open(tier.shape)

    def _turn_off(self, tier: _Tier, reason: str) -> None:
        if tier.store is not None and self._place is not None:
            # Once it is closed, only its head shows that it is ours; here that is written anew if it was lost.
            with suppress(StoreError):
                self._place.check(tier.store)
            self._place.close(tier.store)
            tier.store = None
        tier.next_try = time.monotonic() + self._seconds_between_tries
        self._say_off(tier, reason)

    def _say_off(self, tier: _Tier, reason: str) -> None:
        if tier.reason == reason:
            return
        tier.reason = reason
        level = "info" if reason == _PURGED else "warning"
        logs.line(level, "disk_store_off", pool=tier.pool, reason=reason)
        self._link.sendall(Status(is_on=False, reason=reason, pool=tier.pool).encode())

    def _look_on(self, tier: _Tier) -> None:
        """Report what the next slots hold."""
        assert tier.store is not None, "a store that is off is looked through"
        first = tier.unseen_slot
        try:
            slots, cells = tier.store.found(first, protocol.LABELS_A_PACKET_MAX)
        except StoreError as error:
            self._turn_off(tier, str(error))
            return
        are_news = np.array([slot not in tier.written for slot in slots.tolist()], bool)
        slots, cells = slots[are_news], cells[are_news]
        num_slots = tier.store.shape.num_slots
        tier.unseen_slot = min(first + protocol.LABELS_A_PACKET_MAX, num_slots)
        is_last = tier.unseen_slot == num_slots
        if is_last:
            tier.written.clear()
        if len(slots) or is_last:
            found = Found(
                pool=tier.pool,
                slot_ids=slots.tobytes(),
                labels=np.ascontiguousarray(cells["label"]).tobytes(),
                checksums=np.ascontiguousarray(cells["checksum"]).tobytes(),
                is_last=is_last,
            )
            self._link.sendall(found.encode())

    def _complete(self, batch: Batch) -> Completion:
        try:
            return super()._complete(batch)
        except StoreError as error:
            self._turn_off(self._tiers[batch.pool], str(error))
            return Completion(number=batch.number, is_done=False)

    def _carry_out(self, pools: Pools, batch: Batch) -> Copied:
        tier = self._tiers.get(batch.pool)
        if tier is None or batch.direction not in {Direction.STORE, Direction.LOAD}:
            raise OutOfBoundsError
        if tier.store is None:
            raise StoreError(tier.reason)
        if batch.direction is Direction.LOAD:
            order, transfer = _transfer(
                batch.source_ids, batch.target_ids, batch, (tier.store, pools.num_blocks)
            )
            lost = tier.store.read(transfer, pools)
            return Copied(failed=np.sort(order[lost]).tolist())
        order, transfer = _transfer(
            batch.target_ids, batch.source_ids, batch, (tier.store, len(pools.slots))
        )
        if _is_unseen(tier):
            tier.written.update(transfer.slots.tolist())
        found, are_wrong = tier.store.write(
            transfer, pools.slots, pools.image_bytes, self._let_loads_pass
        )
        sums = np.zeros(len(order), np.uint64)
        sums[order] = found
        return Copied(
            checksums=sums.tobytes() if batch.with_checksums else b"",
            failed=np.sort(order[are_wrong]).tolist(),
        )


def main(link_fd: int, settings_fd: int, directory_fd: int = -1) -> None:
    """Run a mover of disk stores over inherited descriptors; the last is the directory that `serve` entered, if any."""
    # A terminal sends its signals to all processes, but only the supervisor may end a mover.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    directory = settings.get("disk_dir")
    bytes_max = settings.get("disk_bytes_max", 0)
    place = StorePlace(Path(directory), bytes_max, directory_fd) if directory else None
    with socket.socket(fileno=link_fd) as link:
        link.setblocking(True)
        DiskEngine(link, place, lay=lay_for_store(settings_fd)).run()


def _tier_of(pool: PoolMap) -> _Tier:
    shape = None
    layout = bytes.fromhex(pool.layout_fingerprint)
    if len(layout) == BYTES_PER_LAYOUT:
        shape = StoreShape(
            layout=layout,
            bytes_per_slot=pool.bytes_per_slot,
            num_slots=pool.num_disk_slots,
            store_id=pool.store_id,
        )
    # If the daemon does not know the file, it is looked through as soon as it is open.
    return _Tier(pool=pool.pool, shape=shape, file_id=pool.file_id, unseen_slot=pool.num_disk_slots)


def _is_unseen(tier: _Tier) -> bool:
    return tier.store is not None and tier.unseen_slot < tier.store.shape.num_slots


def _transfer(
    slot_ids: bytes, other_ids: bytes, batch: Batch, ends: tuple[StoreFile, int]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], Transfer]:
    """Return the order of a batch's positions by their slots, and the batch in that order.

    Raises:
        OutOfBoundsError: an id lies outside its pool, a slot is named twice, or the arrays do not match in length.
    """
    slots, others = np.frombuffer(slot_ids, np.int32), np.frombuffer(other_ids, np.int32)
    store, num_others = ends
    num_labels = len(batch.labels) // BYTES_PER_LABEL
    sums = np.frombuffer(batch.checksums or bytes(8 * len(slots)), np.uint64)
    if not len(slots) == len(others) == num_labels == len(sums):
        raise OutOfBoundsError
    check_bounds(slots, store.shape.num_slots, "disk")
    check_bounds(others, num_others, "host" if batch.direction is Direction.STORE else "device")
    order = np.argsort(slots, kind="stable")
    if not np.diff(slots[order]).all():
        raise OutOfBoundsError
    transfer = Transfer(
        slots=slots[order],
        others=others[order],
        labels=np.frombuffer(batch.labels, LABEL)[order],
        checksums=sums[order],
    )
    return order, transfer
