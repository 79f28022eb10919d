"""A node with all tiers; the test has the movers' ends of the sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlease.plan import PlanInputs
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.caches.entries import READY, CacheEntry
from kvleased.caches.registry import Registry
from kvleased.caches.tiers import Tiers
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core.effects import (
    Adopted,
    Done,
)
from kvleased.core.tier.labels import BYTES_PER_LABEL
from kvleased.movers import protocol
from kvleased.movers.protocol import Status
from kvleased.planning import plan
from tests.unit.service.planning.specs import full


@dataclass
class Node:
    """Hold two caches, the first with all tiers, and the commands that their cores got."""

    registry: Registry
    tiers: Tiers
    told: list[tuple[str, c.Command]] = field(default_factory=list)
    recycled: list[tuple[str, int]] = field(default_factory=list)
    scanned: list[str] = field(default_factory=list)

    def take(self) -> list[tuple[str, c.Command]]:
        """Return the commands that the cores got since the last call."""
        told, self.told[:] = list(self.told), []
        return told

    async def until(self, count: int = 1) -> list[tuple[str, c.Command]]:
        """Wait until the cores have got so many commands, and return them."""
        async with asyncio.timeout(5):
            while len(self.told) < count:  # noqa: ASYNC110 - it comes by callbacks of the loop
                await asyncio.sleep(0)
        return self.take()


def cache_of(registry: Registry, name: str, **tiers: int) -> CacheEntry:
    """Add a cache with a host pool, unless that has 0 bytes, and with stores of so many bytes below it."""
    tiers.setdefault("host_bytes", 1 << 20)
    planned = plan(PlanInputs(layers=(full(),), tokens_per_block=16, device_blocks=8, **tiers))
    entry = CacheEntry(
        name=name,
        pool=registry.take_pool_number(),
        plan=planned,
        options=pb.CacheOptions(integrity="xxh3"),
        core=SimpleNamespace(num_retired=lambda _: 0),  # type: ignore[arg-type]  # nobody asks it anything else
        fds={},
        tables_read_only_fd=-1,
        status=READY,
    )
    registry.add_cache(entry)
    return entry


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with all three movers, none of which has come yet."""
    settings = Settings(disk_dir=tmp_path, remote_url="redis://host:1", remote_ms_max=50)
    registry = Registry(epoch=1, max_caches=4, max_workers=4)
    told: list[tuple[str, c.Command]] = []
    recycled: list[tuple[str, int]] = []
    scanned: list[str] = []
    keeper = SimpleNamespace(recycle_mover=lambda *what: recycled.append(what))

    def apply(entry: CacheEntry, command: c.Command) -> object:
        told.append((entry.name, command))
        # As if all but one of the slots held another block by now.
        is_adopt = isinstance(command, c.Adopt)
        return Adopted(num_adopted=len(command.slot_ids) // 4 - 1) if is_adopt else Done()

    tiers = Tiers(
        registry,
        apply,
        keeper,
        settings,
        note_store=lambda entry: scanned.append(entry.name),
    )
    cache_of(registry, "deep", disk_bytes=1 << 20, remote_bytes=1 << 20)
    cache_of(registry, "shallow")
    yield Node(registry, tiers, told, recycled, scanned)
    tiers.close()


@pytest.fixture
async def ends(node: Node) -> AsyncIterator[dict[str, socket.socket]]:
    """The test's ends of the sockets of all three movers, by role."""
    found: dict[str, socket.socket] = {}
    for role in ("mover", "disk-mover", "remote-mover"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        node.tiers.mover_came(role, theirs, 1)
        ours.send(protocol.HERE)
        found[role] = ours
    async with asyncio.timeout(5):
        while not all(link.is_answering for link in node.tiers.links.values()):  # noqa: ASYNC110 - by packets
            await asyncio.sleep(0)
    yield found
    for end in found.values():
        end.close()


def packets(end: socket.socket) -> list[bytes]:
    """Return the packets that a mover was sent."""
    found = []
    try:
        while packet := end.recv(protocol.PACKET_BYTES_MAX):
            found.append(packet)
    except BlockingIOError:
        pass
    return found


def labels(count: int) -> bytes:
    """Return so many labels of blocks."""
    return b"".join(number.to_bytes(BYTES_PER_LABEL, "little") for number in range(count))


async def switched_on(node: Node, end: socket.socket) -> CacheEntry:
    """Turn the disk store of the deep cache on; return the cache."""
    entry = node.registry.cache("deep")
    end.send(Status(is_on=True, pool=entry.pool, file_id="01").encode())
    await node.until()
    packets(end)
    return entry
