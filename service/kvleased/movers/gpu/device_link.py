"""Own the daemon's end of a GPU's mover: what `link` does, and requests for memory; other modules keep the memory.

A mover that ends before it has answered has kept nothing, so the next one is asked for the same.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvlease.errors import PoolFullError
from kvleased.core.effects import Mover
from kvleased.movers import protocol
from kvleased.movers.batches import LinkLimits, ObserveCopies
from kvleased.movers.gpu.allotting import ALLOCATED, Allocate, Allocated
from kvleased.movers.link import MoverLink, Owner
from kvleased.system.descriptors import ADVICE, DescriptorsLostError, receive_packet

ALLOCATE_SECONDS_MAX: Final = 90.0
"""Seconds that a registration waits for memory of a GPU: a mover that is replaced meanwhile must first start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRegion:
    """What a process must know, beside the descriptor, to map a region on a GPU."""

    device_uuid: str
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class Allotment:
    """Memory that was made on a GPU."""

    fd: int
    region: GpuRegion


class DeviceLink(MoverLink):
    """Carry copies to the mover of a GPU, and the memory that it makes back to the daemon."""

    def __init__(
        self,
        owner: Owner,
        limits: LinkLimits,
        mover: Mover = Mover.MEMORY,
        observe: ObserveCopies = lambda *_: None,
    ) -> None:
        """Assign; `attach` brings the first mover."""
        super().__init__(owner, limits, mover, observe)
        self._num_asked = 0
        self._asked: dict[int, tuple[Allocate, asyncio.Future[Allotment]]] = {}
        self._fds: list[int] = []
        self._was_here = asyncio.Event()

    async def started(self) -> None:
        """Wait for the first word of the first mover; it takes seconds to wake a GPU."""
        await self._was_here.wait()

    def attach(self, sock: socket.socket, generation: int) -> None:
        """Take the socket of a new mover, and ask it for the memory that the previous one did not make."""
        super().attach(sock, generation)
        self._ask([asked for asked, _ in self._asked.values()])

    async def allocate(self, num_bytes: int) -> Allotment:
        """Return new memory of the GPU, whose descriptor is then the caller's.

        Raises:
            PoolFullError: the GPU has too little, or its mover does not make it in time.
        """
        self._num_asked += 1
        asked = Allocate(number=self._num_asked, num_bytes=num_bytes)
        future: asyncio.Future[Allotment] = asyncio.get_running_loop().create_future()
        self._asked[asked.number] = asked, future
        if self.is_attached:
            self._ask([asked])
        made: Allotment | None = None
        try:
            async with asyncio.timeout(ALLOCATE_SECONDS_MAX):
                made = await future
        except TimeoutError:
            message = (
                f"the mover did not allocate {num_bytes} bytes of device memory within {ALLOCATE_SECONDS_MAX:.0f} s; "
                "see the daemon's log for why the mover does not start or answer"
            )
            raise PoolFullError(message, resource="device_memory_bytes", need=num_bytes) from None
        finally:
            del self._asked[asked.number]
            if made is None:
                _let_go(future)
        return made

    def _ask(self, questions: Sequence[Allocate]) -> None:
        self._packets.extend((asked.encode(), ()) for asked in questions)
        self._flush()

    def _receive(self, sock: socket.socket) -> bytes:
        try:
            packet, self._fds = receive_packet(sock, protocol.PACKET_BYTES_MAX, 1)
        except DescriptorsLostError as lost:
            packet, self._fds = lost.packet, []
        return packet

    def _take(self, packet: bytes) -> None:
        if packet[:1] == ALLOCATED:
            self._made(Allocated.decode(packet), self._fds)
        else:
            super()._take(packet)
            self._was_here.set()

    def _made(self, made: Allocated, fds: list[int]) -> None:
        _, future = self._asked.get(made.number, (None, None))
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        elif made.reason:
            future.set_exception(PoolFullError(made.reason, resource="device_memory_bytes"))
        elif not fds:
            message = f"the control process has as many descriptors as it is allowed; {ADVICE}"
            future.set_exception(PoolFullError(message, resource="descriptors"))
        else:
            region = GpuRegion(device_uuid=made.device_uuid, mapped_bytes=made.mapped_bytes)
            future.set_result(Allotment(fds[0], region))


def _let_go(future: asyncio.Future[Allotment]) -> None:
    """Close the descriptor of memory that came just as its caller gave up: nobody else would close it."""
    if future.done() and not future.cancelled() and future.exception() is None:
        os.close(future.result().fd)
