"""A node as a remote mover sees it: pools in memory, and the daemon's end of the link."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.core.tier.labels import LABEL
from kvleased.memory.cpu import map_region
from kvleased.movers import protocol
from kvleased.movers.cpu import checksum
from kvleased.movers.protocol import Ask, Batch, Completion, Piece, PoolMap, Status, Told
from kvleased.movers.remote.bounded import Bounded
from kvleased.movers.remote.breaker import Breaker
from kvleased.movers.remote.engine import RemoteEngine, store_opener

NUM_BLOCKS = 24
NUM_SLOTS = 12
PAGE_BYTES = 1 << 12
NUM_LAYERS = 4
SLOT_BYTES = NUM_LAYERS * PAGE_BYTES
FINGERPRINT = blake3(b"a layout").hexdigest()
PLENTY_SECONDS = 30.0
"""A budget that is never used up in a test."""
POOL = 7


def labels(names: list[int], *, tenant: int = 5) -> bytes:
    """Return labels of blocks that tests name by numbers."""
    packed = np.zeros(len(names), LABEL)
    for position, name in enumerate(names):
        packed[position]["key"] = blake3(str(name).encode()).digest()
        packed[position]["position"] = name
    packed["tenant"] = tenant
    return packed.tobytes()


class Node:
    """Hold one node's pools, host slots of random bytes, and its remote mover's messages."""

    def __init__(
        self,
        link: socket.socket,
        *,
        fingerprint: str = FINGERPRINT,
        page_bytes: int = PAGE_BYTES,
        num_slots: int = NUM_SLOTS,
        num_blocks: int = NUM_BLOCKS,
        seed: int = 1,
    ) -> None:
        link.settimeout(60)
        self.link = link
        self.slot_bytes = NUM_LAYERS * page_bytes
        self.statuses: deque[Status] = deque()
        self._answers: dict[int, Completion | Told] = {}
        self._number = 0
        pieces = [
            Piece(
                rank=0,
                offset_bytes=layer * num_blocks * page_bytes,
                block_stride_bytes=page_bytes,
                num_bytes=page_bytes,
                slot_offset_bytes=layer * page_bytes,
            )
            for layer in range(NUM_LAYERS)
        ]
        pool = PoolMap(
            pool=POOL,
            num_blocks=num_blocks,
            num_slots=num_slots,
            bytes_per_slot=self.slot_bytes,
            device_bytes=(num_blocks * self.slot_bytes,),
            layout_fingerprint=fingerprint,
            pieces=tuple(pieces),
        )
        fds = [_memory(num_blocks * self.slot_bytes), _memory(num_slots * self.slot_bytes)]
        device = map_region(fds[0], num_blocks * self.slot_bytes)
        self.device = device.reshape(NUM_LAYERS, num_blocks, page_bytes)
        self.slots = map_region(fds[1], num_slots * self.slot_bytes).reshape(num_slots, -1)
        self.slots[:] = np.random.default_rng(seed).integers(0, 256, self.slots.shape, np.uint8)
        first, *rest = pool.packets()
        socket.send_fds(link, [first], fds)
        for packet in rest:
            link.send(packet)
        for fd in fds:
            os.close(fd)

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """Return the bytes of a device block in the order of a slot."""
        return self.device[:, block_id].reshape(-1)

    def sums(self, slot_ids: list[int]) -> bytes:
        """Return the checksums of slots."""
        return np.array([checksum(self.slots[one].data) for one in slot_ids], np.uint64).tobytes()

    def share(self, slot_ids: list[int], names: list[int], *, sums: bytes = b"") -> Completion:
        """Store slots under the names of blocks, and wait for the end."""
        return self.completion(self.send_share(slot_ids, names, sums=sums))

    def send_share(self, slot_ids: list[int], names: list[int], *, sums: bytes = b"") -> int:
        """Send a batch that stores slots, without waiting."""
        ids = np.array(slot_ids, np.int32).tobytes()
        return self.send(Direction.SHARE, labels(names), source_ids=ids, sums=sums)

    def fetch(self, block_ids: list[int], names: list[int], *, tenant: int = 5) -> Completion:
        """Fetch blocks from the store, and wait for the end."""
        ids = np.array(block_ids, np.int32).tobytes()
        return self.completion(
            self.send(Direction.FETCH, labels(names, tenant=tenant), target_ids=ids)
        )

    def send(
        self,
        direction: Direction,
        packed: bytes,
        *,
        source_ids: bytes = b"",
        target_ids: bytes = b"",
        sums: bytes = b"",
        pool: int = POOL,
    ) -> int:
        """Send a batch and return its number."""
        self._number += 1
        batch = Batch(
            number=self._number,
            pool=pool,
            direction=direction,
            with_checksums=True,
            source_ids=source_ids,
            target_ids=target_ids,
            checksums=sums,
            labels=packed,
        )
        self.link.send(batch.encode())
        return self._number

    def ask(self, names: list[int]) -> bytes:
        """Ask which blocks the store has."""
        answer = self.answer(self.send_ask(names))
        assert isinstance(answer, Told)
        return answer.is_present

    def send_ask(self, names: list[int]) -> int:
        """Ask which blocks the store has, without waiting."""
        self._number += 1
        self.link.send(Ask(number=self._number, pool=POOL, labels=labels(names)).encode())
        return self._number

    def unmap(self) -> None:
        """Unmap the pools."""
        self.link.send(protocol.encode_unmap(POOL))

    def completion(self, number: int) -> Completion:
        """Wait for the end of a batch."""
        answer = self.answer(number)
        assert isinstance(answer, Completion)
        return answer

    def answer(self, number: int) -> Completion | Told:
        """Wait for the answer to a packet."""
        while number not in self._answers:
            self.hear()
        return self._answers.pop(number)

    @property
    def order_heard(self) -> list[int]:
        """Return the numbers of the answers not yet asked for, in the order in which they came."""
        return list(self._answers)

    def hear(self) -> None:
        """Receive one packet."""
        packet = self.link.recv(protocol.PACKET_BYTES_MAX)
        assert packet, "the mover has ended"
        if packet == protocol.HERE:
            return
        if packet[:1] == protocol.STATUS:
            self.statuses.append(Status.decode(packet))
            return
        said = Told if packet[:1] == protocol.TOLD else Completion
        answer = said.decode(packet)
        self._answers[answer.number] = answer

    def status(self) -> Status:
        """Wait for the store's next status."""
        while not self.statuses:
            self.hear()
        return self.statuses.popleft()

    def until_on(self) -> None:
        """Wait until a status says that the store is on."""
        while not self.status().is_on:
            pass


@contextmanager
def served(
    url: str,
    *,
    seconds_max: float = PLENTY_SECONDS,
    ttl_seconds: int = 0,
    breaker: Breaker | None = None,
    idle_seconds: float = 0.1,
    **shape: object,
) -> Iterator[Node]:
    """Run a remote mover in a thread, with the node as its daemon."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store = Bounded(store_opener(url, ttl_seconds=ttl_seconds, seconds_max=seconds_max))
    breaker = breaker or Breaker(open_seconds_first=0.05, open_seconds_max=0.2)
    engine = RemoteEngine(
        theirs, store, seconds_max=seconds_max, breaker=breaker, idle_seconds=idle_seconds
    )
    thread = threading.Thread(target=engine.run)
    thread.start()
    with ours, theirs:
        try:
            yield Node(ours, **shape)  # type: ignore[arg-type]
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()
            store.close()


@contextmanager
def served_by_process(
    url: str,
    *,
    ms_max: int = 30_000,
    environment: Mapping[str, str] | None = None,
    **shape: object,
) -> Iterator[tuple[Node, subprocess.Popen[bytes]]]:
    """Run a remote mover as the supervisor does, with the node as its daemon."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = {
        "remote_url": url,
        "remote_ttl_seconds": 0,
        "remote_ms_max": ms_max,
        "log_level": "info",
    }
    settings_fd = os.memfd_create("settings")
    os.write(settings_fd, json.dumps(settings).encode())
    command = [sys.executable, "-P", "-m", "kvleased", "remote-mover", "--parent", str(os.getpid())]
    command += ["--link-fd", str(theirs.fileno()), "--settings-fd", str(settings_fd)]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs.fileno(), settings_fd),
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    theirs.close()
    os.close(settings_fd)
    with ours, process:
        try:
            yield Node(ours, **shape), process  # type: ignore[arg-type]
        finally:
            ours.close()
            process.kill()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "what is waited for does not come"
        time.sleep(0.01)


def _memory(num_bytes: int) -> int:
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd
