"""Own the daemon's end of a mover: batches out, completions in, a deadline; the core decides what a lost batch means.

The link survives its movers: each new mover maps the pools again. A batch that was handed to a mover and not answered
in time is lost: its targets may still be written until that mover is proven dead. A batch that no mover ever got has
simply failed. Few batches are in the socket at once, so that a batch that a request waits for can overtake the others.
No batch is sent before the mover has said that it is there: how long a process takes to start tells nothing about its
copies.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final, Protocol

from kvleased.core.commands import CopyDone, CopyFailed, CopyLost, MoverDied
from kvleased.core.effects import Copy, Direction, Mover
from kvleased.movers import protocol
from kvleased.movers.batches import (
    Flight,
    LinkFigures,
    LinkLimits,
    Moved,
    ObserveCopies,
    Part,
    Queue,
    copies_a_batch,
)
from kvleased.movers.mapped import Mapped, Packet
from kvleased.movers.protocol import (
    Ask,
    Completion,
    Found,
    PoolMap,
    Purge,
    Purged,
    Status,
    Told,
)
from kvleased.system.next_turn import in_next_turn
from kvleased.telemetry import logs

START_SECONDS_MAX: Final = 60.0
"""Seconds until a mover's first word: longer than imports take on a machine that has no processor to spare."""


class Owner(Protocol):
    """What the link needs of the daemon."""

    def answer_copy(self, pool: int, command: CopyDone | CopyFailed | CopyLost) -> None:
        """Tell the core of a cache what became of its copy."""

    def answer_mover_death(self, command: MoverDied) -> None:
        """Tell every core that this mover no longer writes any copy."""

    def recycle_mover(self, mover: Mover, generation: int) -> None:
        """Have a mover replaced."""

    def hear(self, mover: Mover, said: Told | Found | Purged | Status) -> None:
        """Take what a store's mover reports or answers."""

    def mover_went(self, mover: Mover) -> None:
        """Note that nobody answers until the next mover is attached."""


class MoverLink:
    """Carry the copies of all caches to the current mover, and its answers back."""

    def __init__(
        self,
        owner: Owner,
        limits: LinkLimits,
        mover: Mover = Mover.MEMORY,
        observe: ObserveCopies = lambda *_: None,
    ) -> None:
        """Assign; `attach` brings the first mover."""
        self.mover = mover
        self._observe = observe
        self._owner = owner
        self._limits = limits
        self._copies_a_batch_max = min(limits.copies_a_batch_max, protocol.COPIES_A_BATCH_MAX)
        self._sock: socket.socket | None = None
        self._generation = 0
        self._attached_at = 0.0
        self._is_here = False
        self._pools: dict[int, Mapped] = {}
        self._packets: deque[Packet] = deque()
        self._queue = Queue()
        self._sent: dict[int, Part] = {}
        self._number = 0
        self._is_blocked = self._is_flush_due = False
        self._progress_at = 0.0
        self._num_asks = 0

    def __repr__(self) -> str:
        """Show which mover there is, and how many batches are on their way."""
        state = f"mover {self._generation}" if self.is_attached else "no mover"
        return f"<MoverLink {state}, {self.batches_in_flight} batches in flight>"

    @property
    def is_attached(self) -> bool:
        """Whether there is a mover, perhaps one that is still starting."""
        return self._sock is not None

    @property
    def is_answering(self) -> bool:
        """Whether a mover has said that it is there."""
        return self._is_here

    @property
    def batches_in_flight(self) -> int:
        """Batches without an answer, sent or not."""
        return len(self._queue) + len(self._sent)

    def figures(self, now: float) -> LinkFigures:
        """Return how much work there is."""
        sinces = [sent.since for sent in self._sent.values()]
        if self._queue.oldest_since is not None:
            sinces.append(self._queue.oldest_since)
        return LinkFigures(
            num_waiting=len(self._queue),
            num_sent=len(self._sent),
            oldest_seconds=max(0.0, now - min(sinces)) if sinces else 0.0,
        )

    def silent_seconds(self, now: float) -> float:
        """Return for how long no batch and no `Ask` has been answered; 0 if there is none without an answer."""
        return now - self._progress_at if self.batches_in_flight or self._num_asks else 0.0

    def starting_seconds(self, now: float) -> float:
        """Return how long the current mover has been starting; 0 if there is none or it has said that it is there."""
        return now - self._attached_at if self.is_attached and not self._is_here else 0.0

    # Movers

    def attach(self, sock: socket.socket, generation: int) -> None:
        """Take the socket of a new mover, and tell it of the pools; it gets batches once it says that it is there."""
        self._detach()
        sock.setblocking(False)
        self._sock, self._generation = sock, generation
        self._attached_at, self._is_here = monotonic(), False
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read)
        self._packets.clear()
        for pool in self._pools.values():
            self._packets.extend(pool.packets())
        self._flush()

    def died(self, generation: int) -> None:
        """Note that a mover is proven dead: none of the copies that were on their way is written any more."""
        if generation == self._generation:
            self._detach()
        self._queue.clear()
        self._sent.clear()
        self._owner.answer_mover_death(MoverDied(mover=self.mover))

    def close(self) -> None:
        """Let go of the mover without telling anybody."""
        self._let_go()

    # Pools

    def map(self, pool: PoolMap, fds: Sequence[int]) -> None:
        """Have this mover and each later one map a cache's pools; the descriptors stay the caller's."""
        mapped = self._pools[pool.pool] = Mapped(pool, tuple(fds), pool.bytes_per_block)
        if self.is_attached:
            self._packets.extend(mapped.packets())
            self._flush()

    def note_file(self, pool: int, file_id: str) -> None:
        """Have later movers not look through this file again; with an empty id they look through any file."""
        if pool in self._pools:
            mapped = self._pools[pool]
            self._pools[pool] = replace(mapped, message=replace(mapped.message, file_id=file_id))

    def unmap(self, pool: int) -> None:
        """Have the mover forget a cache's pools after the copies that were sent; copies that wait are dropped."""
        mapped = self._pools.pop(pool, None)
        if mapped is None:
            return
        self._queue.forget(pool)
        if self.is_attached:
            # If the mover has not heard of the pool yet, it never need: its descriptors are about to be closed.
            self._packets = deque(one for one in self._packets if one[1] is not mapped.fds)
            self._packets.append((protocol.encode_unmap(pool), ()))
            self._flush()

    # Copies and questions

    def send(self, pool: int, copy: Copy, *, with_checksums: bool) -> None:
        """Have a mover carry out a copy, in as many batches as it takes; the owner gets the answer later."""
        now, mapped = monotonic(), self._pools.get(pool)
        most = copies_a_batch(
            copy,
            self._copies_a_batch_max,
            self._limits.bytes_a_batch_max,
            0 if mapped is None else mapped.bytes_per_block,
        )
        if not (self.batches_in_flight or self._num_asks):
            self._progress_at = now
        flight = Flight(pool=pool, copy=copy, with_checksums=with_checksums, copies_a_batch=most)
        self._queue.add(flight, now)
        if flight.num_parts == 1:
            self._flush()
        else:
            self._flush_apart()

    def ask(self, question: Ask | Purge) -> bool:
        """Send a question to the mover ahead of all waiting batches; tell whether there is a mover to answer it."""
        if self._is_here:
            if isinstance(question, Ask):
                if not (self.batches_in_flight or self._num_asks):
                    self._progress_at = monotonic()
                self._num_asks += 1
            self._packets.append((question.encode(), ()))
            self._flush()
        return self._is_here

    def tick(self, now: float) -> None:
        """Give up overdue batches, and have a silent mover replaced; to start, it has more time than for a batch.

        It answers batches in order, so its silence counts from its last answer, or from its first word if there is
        none.
        """
        are_overdue = self.silent_seconds(now) > self._limits.seconds_max
        is_dead = are_overdue
        if not self._is_here:
            is_dead = self.is_attached and now - self._attached_at > START_SECONDS_MAX
        generation = self._generation
        if is_dead:
            self._detach()
        if are_overdue:
            self._give_up(generation)
        if is_dead:
            logs.line("error", "mover_silent", mover=self.mover.value, generation=generation)
            self._owner.recycle_mover(self.mover, generation)

    def fail_waiting(self, directions: Collection[Direction]) -> None:
        """Fail the copies in these directions of which no mover has got any batch."""
        for flight in self._queue.take_back(directions):
            self._owner.answer_copy(flight.pool, CopyFailed(copy_id=flight.copy.copy_id))

    def _give_up(self, generation: int) -> None:
        """Answer all copies: those that a mover has got are lost and may still be written, the others have failed."""
        flights = {id(one.flight): one.flight for one in (*self._sent.values(), *self._queue)}
        self._sent.clear()
        self._queue.clear()
        logs.line(
            "error",
            "mover_overdue",
            mover=self.mover.value,
            copies=len(flights),
            generation=generation,
        )
        for flight in flights.values():
            answer = CopyLost if flight.is_sent else CopyFailed
            self._owner.answer_copy(flight.pool, answer(copy_id=flight.copy.copy_id))

    # From the mover

    def _read(self) -> None:
        """Take one packet; the event loop comes back for the next, and serves others in between."""
        assert self._sock is not None, "nobody reads"
        try:
            packet = self._receive(self._sock)
        except (BlockingIOError, ConnectionResetError):
            # A reset is reported once if the mover ended with unread batches; its last answers follow.
            return
        if packet:
            self._take(packet)
        else:
            # The mover has ended, but only the supervisor can prove that it writes no more.
            self._detach()

    def _receive(self, sock: socket.socket) -> bytes:
        """Return the next packet; raise BlockingIOError if there is none."""
        return sock.recv(protocol.PACKET_BYTES_MAX)

    def _take(self, packet: bytes) -> None:
        kind = packet[:1]
        if kind == protocol.DONE:
            self._complete(Completion.decode(packet))
            if self._queue:
                # The mover already has another batch, so the event loop may serve others first.
                self._flush_apart()
        elif kind == protocol.HERE:
            self._is_here, self._progress_at = True, monotonic()
            self._flush()
        elif kind == protocol.TOLD:
            self._num_asks, self._progress_at = self._num_asks - 1, monotonic()
            self._owner.hear(self.mover, Told.decode(packet))
        elif kind == protocol.FOUND:
            self._owner.hear(self.mover, Found.decode(packet))
        elif kind == protocol.PURGED:
            self._owner.hear(self.mover, Purged.decode(packet))
        else:
            assert kind == protocol.STATUS, "a packet that no mover sends"
            self._owner.hear(self.mover, Status.decode(packet))

    def _complete(self, completion: Completion) -> None:
        sent = self._sent.pop(completion.number)
        flight = sent.flight
        self._progress_at = monotonic()
        self._observe(
            Moved(
                pool=flight.pool,
                copy_id=flight.copy.copy_id,
                direction=flight.copy.direction.value,
                num_bytes=completion.num_bytes,
                nanoseconds=completion.nanoseconds,
                is_done=completion.is_done and not completion.failed,
            )
        )
        flight.parts[sent.index] = completion
        if len(flight.parts) < flight.num_parts:
            return
        if flight.num_parts == 1:
            self._answer(flight)
        else:
            # With many blocks the answer takes long, so the event loop serves others first.
            in_next_turn(self._answer, flight)

    def _answer(self, flight: Flight) -> None:
        """Tell the core what became of a copy whose batches have all ended."""
        copy_id = flight.copy.copy_id
        answer: CopyDone | CopyFailed = CopyFailed(copy_id=copy_id)
        if all(part.is_done for part in flight.parts.values()):
            answer = CopyDone(copy_id=copy_id, checksums=flight.checksums, failed=flight.failed)
        self._owner.answer_copy(flight.pool, answer)

    # To the mover

    def _flush_apart(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            in_next_turn(self._flush)

    def _flush(self) -> None:
        """Send what there is to send, but only one batch in each turn of the event loop."""
        self._is_flush_due = False
        try:
            while self._sock is not None and self._has_packet() and not self._is_flush_due:
                packet, fds = self._packets[0]
                self._put(packet, fds)
                self._packets.popleft()
                if packet[:1] == protocol.BATCH and self._queue:
                    self._flush_apart()
            if self._sock is not None and self._is_blocked:
                self._is_blocked = False
                asyncio.get_running_loop().remove_writer(self._sock.fileno())
        except BlockingIOError:
            assert self._sock is not None, "nobody blocks"
            self._is_blocked = True
            asyncio.get_running_loop().add_writer(self._sock.fileno(), self._flush)
        except OSError as error:
            logs.line("warning", "mover_link_broke", error=os.strerror(error.errno or 0))
            self._detach()

    def _has_packet(self) -> bool:
        """Tell whether there is a packet to send; if it is a batch's turn, make a packet of the next batch."""
        is_turn = self._queue and self._is_here and not self._packets
        part = self._next_part() if is_turn else None
        if part is not None:
            self._number += 1
            part.flight.is_sent = True
            self._sent[self._number] = part
            self._packets.append((part.flight.batch(part.index, self._number).encode(), ()))
        return bool(self._packets)

    def _next_part(self) -> Part | None:
        num_urgent = sum(part.flight.is_urgent for part in self._sent.values())
        most = self._limits.batches_sent_max
        return self._queue.take(
            may_be_urgent=num_urgent < most, may_be_other=len(self._sent) - num_urgent < most
        )

    def _put(self, packet: bytes, fds: tuple[int, ...]) -> None:
        assert self._sock is not None, "no mover"
        if fds:
            socket.send_fds(self._sock, [packet], fds)
        else:
            self._sock.send(packet)

    def _detach(self) -> None:
        if self._sock is not None:
            self._let_go()
            self._owner.mover_went(self.mover)

    def _let_go(self) -> None:
        if self._sock is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock.fileno())
        loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._sock, self._num_asks = None, 0
        self._is_blocked = self._is_here = False
