"""Bytes that all ranks keep alike lie once in each lower tier, and come back to every rank."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.plan import ParallelInputs, PlanInputs
from kvleased.core.effects import Direction
from kvleased.memory.cpu import map_region
from kvleased.movers import protocol
from kvleased.movers.disk.engine import DiskEngine
from kvleased.movers.disk.store_place import StorePlace
from kvleased.movers.engine import Engine
from kvleased.movers.plans import pool_map
from kvleased.movers.protocol import Batch, Completion
from kvleased.movers.remote.bounded import Bounded
from kvleased.movers.remote.engine import RemoteEngine, store_opener
from kvleased.movers.remote.value import HEADER_BYTES
from kvleased.planning import plan
from tests.laws.disks import labels_of
from tests.servers.redis import RedisServer
from tests.unit.service.planning.specs import latent

RANKS: Final = 4
PLAN: Final = plan(
    PlanInputs(
        layers=(latent("0"), latent("1")),
        tokens_per_block=16,
        device_blocks=8,
        host_bytes=1 << 16,
        disk_bytes=1 << 17,
        remote_bytes=1 << 17,
        parallel=ParallelInputs(tensor_ranks=RANKS),
    )
)
SOURCES: Final = [5, 2]
SLOTS: Final = [3, 1]
TARGETS: Final = [0, 7]


@dataclass
class Ranks:
    """The daemon's end of any mover, with the memory of all ranks."""

    link: socket.socket
    devices: list[NDArray[np.uint8]]
    host: NDArray[np.uint8]
    fds: list[int]
    number: int = 0

    def map(self) -> None:
        """Map the pools."""
        first, *rest = pool_map(1, PLAN).packets()
        socket.send_fds(self.link, [first], self.fds)
        for packet in rest:
            self.link.send(packet)

    def ask(
        self, direction: Direction, sources: list[int], targets: list[int], *, labelled: bool = True
    ) -> Completion:
        """Send a batch and wait for its end."""
        self.number += 1
        batch = Batch(
            number=self.number,
            pool=1,
            direction=direction,
            with_checksums=True,
            source_ids=np.array(sources, np.int32).tobytes(),
            target_ids=np.array(targets, np.int32).tobytes(),
            labels=labels_of([1, 2]).tobytes() if labelled else b"",
        )
        self.link.send(batch.encode())
        while (packet := self.link.recv(protocol.PACKET_BYTES_MAX))[:1] != protocol.DONE:
            assert packet, "the mover has ended"
        return Completion.decode(packet)

    def block(self, rank: int, block: int) -> bytes:
        """Return a rank's part of a block."""
        return b"".join(
            self.devices[rank][extent.offset_bytes + block * extent.block_stride_bytes :][
                : extent.num_bytes
            ].tobytes()
            for extent in PLAN.ranks[rank].extents
        )


@contextmanager
def _served(make: Callable[[socket.socket], Engine], ranks: Ranks | None = None) -> Iterator[Ranks]:
    """Run a mover in a thread, over another node's memory or over new memory."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    if ranks is None:
        sizes = [rank.device_bytes for rank in PLAN.ranks] + [PLAN.host_bytes]
        fds = [os.memfd_create("pool", os.MFD_CLOEXEC) for _ in sizes]
        for fd, num_bytes in zip(fds, sizes, strict=True):
            os.ftruncate(fd, num_bytes)
        *devices, host = (map_region(fd, size) for fd, size in zip(fds, sizes, strict=True))
        ranks = Ranks(ours, devices, host, fds)
        content = np.random.default_rng(1).integers(0, 256, len(devices[0]), np.uint8)
        for device in devices:
            device[:] = content
    else:
        ranks.link = ours
    thread = threading.Thread(target=make(theirs).run)
    thread.start()
    with ours, theirs:
        ranks.map()
        try:
            yield ranks
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def offloaded() -> Iterator[Ranks]:
    """Two blocks in the host pool, after which the devices got other bytes."""
    with _served(Engine) as ranks:
        done = ranks.ask(Direction.OFFLOAD, SOURCES, SLOTS, labelled=False)
        assert done.is_done
        assert done.num_bytes == 2 * PLAN.bytes_per_slot
    yield ranks
    for fd in ranks.fds:
        os.close(fd)


def _wipe(ranks: Ranks) -> list[list[bytes]]:
    """Overwrite all bytes on the devices; return what was in the blocks, by rank."""
    kept = [[ranks.block(rank, block) for block in SOURCES] for rank in range(RANKS)]
    for device in ranks.devices:
        device[:] = 0
    return kept


def _restored(ranks: Ranks) -> list[list[bytes]]:
    return [[ranks.block(rank, block) for block in TARGETS] for rank in range(RANKS)]


def test_slot_has_the_bytes_of_one_rank() -> None:
    """A plan counts bytes that ranks keep alike once."""
    assert len(PLAN.ranks) == RANKS
    assert PLAN.bytes_per_slot == PLAN.ranks[0].bytes_per_block
    assert {rank.slot_cell_offset_bytes for rank in PLAN.ranks} == {0}


def test_disk_store_has_them_once(tmp_path: Path, offloaded: Ranks) -> None:
    """A slot of the store is as large as a host slot, and a load fills the blocks of all ranks."""
    place = StorePlace(tmp_path / "disk", 0)
    with _served(lambda link: DiskEngine(link, place), offloaded) as ranks:
        stored = ranks.ask(Direction.STORE, SLOTS, [9, 4])
        kept = _wipe(ranks)
        loaded = ranks.ask(Direction.LOAD, [9, 4], TARGETS)

        assert (stored.is_done, stored.failed) == (loaded.is_done, loaded.failed) == (True, ())
        assert stored.num_bytes == 2 * PLAN.bytes_per_slot
        assert _restored(ranks) == kept
    place.leave()
    (path,) = (tmp_path / "disk").glob("*.store")
    assert path.stat().st_size <= PLAN.num_disk_slots * (PLAN.bytes_per_slot + 2 * 4096)
    for slot in SLOTS:
        start = slot * PLAN.bytes_per_slot
        one = offloaded.host[start : start + PLAN.bytes_per_slot].tobytes()
        assert path.read_bytes().count(one) == 1


def test_remote_store_has_them_once(redis: RedisServer, offloaded: Ranks) -> None:
    """A value is as long as a slot and its header, and a fetch fills the blocks of all ranks."""
    store = Bounded(store_opener(redis.url, ttl_seconds=0, seconds_max=30.0))
    with _served(lambda link: RemoteEngine(link, store, seconds_max=30.0), offloaded) as ranks:
        shared = ranks.ask(Direction.SHARE, SLOTS, [])
        kept = _wipe(ranks)
        fetched = ranks.ask(Direction.FETCH, [], TARGETS)

        assert (shared.is_done, shared.failed) == (fetched.is_done, fetched.failed) == (True, ())
        assert _restored(ranks) == kept
    store.close()
    with redis.client() as client:
        names = client.keys()
        lengths = [client.strlen(name) for name in names]
    assert lengths == [HEADER_BYTES + PLAN.bytes_per_slot] * 2
