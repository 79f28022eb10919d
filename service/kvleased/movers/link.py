"""Own the daemon's end of a mover: batches out, completions in, and a deadline; what a lost batch means is the core's.

The link survives its movers: pools are mapped again in each new one. A batch that was handed to a mover and is not
answered in time is lost (its targets may still be written) until that mover is proven dead; a batch that no mover ever
got has simply failed.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from kvleased import logs
from kvleased.core.commands import CopyDone, CopyFailed, CopyLost, MoverDied
from kvleased.core.effects import Copy
from kvleased.movers import protocol
from kvleased.movers.protocol import Batch, Completion, PoolMap

_BYTES_PER_ID = 4
_BYTES_PER_CHECKSUM = 8


class Owner(Protocol):
    """What the link needs of the daemon."""

    def answer_copy(self, pool: int, command: CopyDone | CopyFailed | CopyLost) -> None:
        """Tell the core of a cache what became of its copy."""

    def answer_mover_death(self, command: MoverDied) -> None:
        """Tell every core that no copy is being written any more."""

    def recycle_mover(self, generation: int) -> None:
        """Have a mover replaced."""


ObserveCopies = Callable[[str, int, float, bool], None]
"""Count one batch that has ended: direction, bytes, seconds, and whether all of it was done."""


@dataclass(slots=True, kw_only=True)
class _Flight:
    """One Copy effect on its way, in one or more batches."""

    pool: int
    copy: Copy
    num_parts: int
    is_sent: bool = False
    parts: dict[int, Completion] = field(default_factory=dict)


_Packet = tuple[bytes, tuple[int, ...], _Flight | None]
"""A packet, the descriptors beside it, and what it is a part of."""


class MoverLink:
    """Carry the copies of all caches to the mover that lives now, and its answers back."""

    def __init__(
        self,
        owner: Owner,
        *,
        seconds_max: float,
        copies_a_batch_max: int,
        observe: ObserveCopies = lambda *_: None,
    ) -> None:
        """Assign; `attach` brings the first mover."""
        self._observe = observe
        self._owner = owner
        self._seconds_max = seconds_max
        self._copies_a_batch_max = min(copies_a_batch_max, protocol.COPIES_A_BATCH_MAX)
        self._sock: socket.socket | None = None
        self._generation = 0
        self._pools: dict[int, tuple[PoolMap, tuple[int, ...]]] = {}
        self._outbox: deque[_Packet] = deque()
        self._parts: dict[int, tuple[_Flight, int]] = {}
        self._number = 0
        self._is_blocked = False
        self._progress_at = 0.0

    def __repr__(self) -> str:
        """Show life: which mover, and how much is on its way."""
        state = f"mover {self._generation}" if self.is_attached else "no mover"
        return f"<MoverLink {state}, {len(self._parts)} batches in flight>"

    @property
    def is_attached(self) -> bool:
        """Whether there is a mover that answers."""
        return self._sock is not None

    @property
    def batches_in_flight(self) -> int:
        """Batches that were not answered yet."""
        return len(self._parts)

    def attach(self, sock: socket.socket, generation: int) -> None:
        """Take the socket of a new mover; pools are mapped in it before anything that waits is sent."""
        self._detach()
        sock.setblocking(False)
        self._sock, self._generation = sock, generation
        self._progress_at = monotonic()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)
        maps = [packet for pool, fds in self._pools.values() for packet in _packets(pool, fds)]
        self._outbox.extendleft(reversed(maps))
        self._flush()

    def died(self, generation: int) -> None:
        """Take note that a mover is proven dead: nothing of what was on its way is written any more."""
        if generation == self._generation:
            self._detach()
        self._outbox.clear()
        self._parts.clear()
        self._owner.answer_mover_death(MoverDied())

    def close(self) -> None:
        """Let go of the mover."""
        self._detach()

    def map(self, pool: PoolMap, fds: Sequence[int]) -> None:
        """Have this mover, and each one after it, map a cache's pools; the descriptors stay the caller's."""
        self._pools[pool.pool] = (pool, tuple(fds))
        if self.is_attached:
            self._outbox.extend(_packets(pool, tuple(fds)))
            self._flush()

    def unmap(self, pool: int) -> None:
        """Have the pools of a cache forgotten, after the copies that were sent before."""
        if self._pools.pop(pool, None) is not None and self.is_attached:
            self._outbox.append((protocol.encode_unmap(pool), (), None))
            self._flush()

    def send(self, pool: int, copy: Copy, *, with_checksums: bool) -> None:
        """Have a mover carry out a copy, in as many batches as it takes; the owner gets the answer later."""
        num_copies = len(copy.target_ids) // _BYTES_PER_ID
        starts = range(0, max(num_copies, 1), self._copies_a_batch_max)
        flight = _Flight(pool=pool, copy=copy, num_parts=len(starts))
        if not self._parts:
            self._progress_at = monotonic()
        for index, start in enumerate(starts):
            self._number += 1
            end = start + self._copies_a_batch_max
            batch = Batch(
                number=self._number,
                pool=pool,
                direction=copy.direction,
                with_checksums=with_checksums,
                source_ids=copy.source_ids[start * _BYTES_PER_ID : end * _BYTES_PER_ID],
                target_ids=copy.target_ids[start * _BYTES_PER_ID : end * _BYTES_PER_ID],
                checksums=(
                    copy.checksums[start * _BYTES_PER_CHECKSUM : end * _BYTES_PER_CHECKSUM]
                    if with_checksums
                    else b""
                ),
            )
            self._parts[self._number] = (flight, index)
            self._outbox.append((batch.encode(), (), flight))
        self._flush()

    def tick(self, now: float) -> None:
        """Give up what is overdue: the mover answers batches in order, so its silence counts from its last answer."""
        if not self._parts or now - self._progress_at <= self._seconds_max:
            return
        flights = {id(flight): flight for flight, _ in self._parts.values()}
        self._parts.clear()
        self._outbox.clear()
        was_attached, generation = self.is_attached, self._generation
        self._detach()
        logs.line(
            "error",
            "mover_overdue",
            copies=len(flights),
            generation=generation,
            attached=was_attached,
        )
        for flight in flights.values():
            answer = CopyLost if flight.is_sent else CopyFailed
            self._owner.answer_copy(flight.pool, answer(copy_id=flight.copy.copy_id))
        if was_attached:
            self._owner.recycle_mover(generation)

    def _read(self) -> None:
        while self._sock is not None:
            try:
                packet = self._sock.recv(protocol.PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Said once when the mover went with batches unread; its last answers follow.
                continue
            if not packet:
                # It has ended, but only the supervisor can prove that it writes no more.
                self._detach()
                return
            self._complete(Completion.decode(packet))

    def _complete(self, completion: Completion) -> None:
        flight, index = self._parts.pop(completion.number)
        self._progress_at = monotonic()
        self._observe(
            flight.copy.direction.value,
            completion.num_bytes,
            completion.nanoseconds / 1e9,
            completion.is_done and not completion.failed,
        )
        flight.parts[index] = completion
        if len(flight.parts) < flight.num_parts:
            return
        parts = [flight.parts[number] for number in range(flight.num_parts)]
        copy_id = flight.copy.copy_id
        if not all(part.is_done for part in parts):
            self._owner.answer_copy(flight.pool, CopyFailed(copy_id=copy_id))
            return
        failed = tuple(
            number * self._copies_a_batch_max + position
            for number, part in enumerate(parts)
            for position in part.failed
        )
        checksums = b"".join(part.checksums for part in parts)
        self._owner.answer_copy(
            flight.pool, CopyDone(copy_id=copy_id, checksums=checksums, failed=failed)
        )

    def _flush(self) -> None:
        if self._sock is None:
            return
        try:
            while self._outbox:
                packet, fds, flight = self._outbox[0]
                if flight is not None:
                    flight.is_sent = True
                if fds:
                    socket.send_fds(self._sock, [packet], fds)
                else:
                    self._sock.send(packet)
                self._outbox.popleft()
            if self._is_blocked:
                self._is_blocked = False
                asyncio.get_running_loop().remove_writer(self._sock.fileno())
        except BlockingIOError:
            self._is_blocked = True
            asyncio.get_running_loop().add_writer(self._sock.fileno(), self._flush)
        except OSError as error:
            logs.line("warning", "mover_link_broke", error=os.strerror(error.errno or 0))
            self._detach()

    def _detach(self) -> None:
        if self._sock is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock.fileno())
        loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self._is_blocked = False


def _packets(pool: PoolMap, fds: tuple[int, ...]) -> list[_Packet]:
    first, *rest = pool.packets()
    return [(first, fds, None), *((packet, (), None) for packet in rest)]
