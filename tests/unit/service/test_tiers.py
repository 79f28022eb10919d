"""What movers say reaches the cores of the caches that it concerns, and nobody waits for a mover that is away."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvlease.ids import CopyId
from kvlease.plan import PlanInputs
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.core import commands as c
from kvleased.core.effects import (
    MOVER_OF,
    Adopted,
    Copy,
    Direction,
    Done,
    Mover,
    Probe,
    Tier,
)
from kvleased.core.labels import BYTES_PER_LABEL
from kvleased.movers import protocol
from kvleased.movers.plans import pool_map
from kvleased.movers.protocol import Ask, Batch, Completion, Found, Purge, Purged, Status, Told
from kvleased.planning import plan
from kvleased.registry import READY, CacheEntry, Registry
from kvleased.settings import Settings
from kvleased.tier_infos import is_up, restrictions
from kvleased.tiers import REMOTE_SECONDS_MIN, Tiers
from tests.unit.service.planning.specs import full

LABELS_MAX = protocol.LABELS_A_PACKET_MAX


@dataclass
class Node:
    """Two caches, the first of which has all tiers, and what their cores were told."""

    registry: Registry
    tiers: Tiers
    told: list[tuple[str, c.Command]] = field(default_factory=list)
    recycled: list[tuple[str, int]] = field(default_factory=list)
    scanned: list[str] = field(default_factory=list)

    def take(self) -> list[tuple[str, c.Command]]:
        """Return what the cores were told since the last time."""
        told, self.told[:] = list(self.told), []
        return told

    async def until(self, count: int = 1) -> list[tuple[str, c.Command]]:
        """Wait until the cores were told so much, and return it."""
        async with asyncio.timeout(5):
            while len(self.told) < count:  # noqa: ASYNC110 - it comes by callbacks of the loop
                await asyncio.sleep(0)
        return self.take()


def _entry(registry: Registry, name: str, **tiers: int) -> CacheEntry:
    planned = plan(
        PlanInputs(
            layers=(full(),), tokens_per_block=16, device_blocks=8, host_bytes=1 << 20, **tiers
        )
    )
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
    """A node with all three movers, none of which is there yet."""
    settings = Settings(disk_dir=tmp_path, remote_url="redis://host:1", remote_ms_max=50)
    registry = Registry(epoch=1, max_caches=4, max_workers=4)
    told: list[tuple[str, c.Command]] = []
    recycled: list[tuple[str, int]] = []
    scanned: list[str] = []
    keeper = SimpleNamespace(recycle_mover=lambda *what: recycled.append(what))

    def apply(entry: CacheEntry, command: c.Command) -> object:
        told.append((entry.name, command))
        # As if all but one of the slots were another block's by now.
        is_adopt = isinstance(command, c.Adopt)
        return Adopted(num_adopted=len(command.slot_ids) // 4 - 1) if is_adopt else Done()

    tiers = Tiers(
        registry,
        apply,
        keeper,
        settings,
        note_store=lambda entry: scanned.append(entry.name),
    )
    _entry(registry, "deep", disk_bytes=1 << 20, remote_bytes=1 << 20)
    _entry(registry, "shallow")
    yield Node(registry, tiers, told, recycled, scanned)
    tiers.close()


@pytest.fixture
async def ends(node: Node) -> AsyncIterator[dict[str, socket.socket]]:
    """All three movers, attached: the tests' ends of their sockets, by role."""
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


def _packets(end: socket.socket) -> list[bytes]:
    found = []
    try:
        while packet := end.recv(protocol.PACKET_BYTES_MAX):
            found.append(packet)
    except BlockingIOError:
        pass
    return found


def _labels(count: int) -> bytes:
    return b"".join(number.to_bytes(BYTES_PER_LABEL, "little") for number in range(count))


@pytest.mark.parametrize("direction", list(Direction))
async def test_copy_goes_to_the_mover_of_its_direction(
    node: Node, ends: dict[str, socket.socket], direction: Direction
) -> None:
    """Each direction has one mover, and its answer comes to the core that asked."""
    ids = np.arange(2, dtype=np.int32).tobytes()
    copy = Copy(
        copy_id=CopyId(5),
        direction=direction,
        source_ids=ids,
        target_ids=ids,
        checksums=b"",
        labels=b"",
    )
    roles = {Mover.MEMORY: "mover", Mover.DISK: "disk-mover", Mover.REMOTE: "remote-mover"}

    node.tiers.send(node.registry.cache("deep"), copy)

    received = {role: _packets(end) for role, end in ends.items()}
    ((role, (packet,)),) = [(role, found) for role, found in received.items() if found]
    assert role == roles[MOVER_OF[direction]]
    done = Completion(number=Batch.decode(packet).number, is_done=True)
    ends[role].send(done.encode())
    assert await node.until() == [("deep", c.CopyDone(copy_id=CopyId(5)))]


async def test_pools_are_mapped_where_they_are_needed(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A store's mover learns of the caches that use it, under a name that no caller chose."""
    fd = os.memfd_create("test")
    for entry in node.registry:
        message = pool_map(entry.pool, entry.plan, store_id="ab")
        node.tiers.map(entry, message, [fd])

    maps = {
        role: [packet for packet in _packets(end) if packet[:1] == protocol.MAP]
        for role, end in ends.items()
    }

    assert {role: len(found) for role, found in maps.items()} == {
        "mover": 2,
        "disk-mover": 1,
        "remote-mover": 1,
    }
    deep = node.registry.cache("deep").plan
    mapped = protocol.PoolMap.decode(maps["disk-mover"][0])
    assert (mapped.layout_fingerprint, mapped.store_id) == (deep.layout_fingerprint, "ab")
    assert mapped.num_disk_slots == deep.num_disk_slots > 0
    node.tiers.unmap(node.registry.cache("deep"))
    assert [len(_packets(end)) for end in ends.values()] == [1, 1, 1]
    os.close(fd)


async def test_store_is_off_until_its_mover_says_otherwise(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A new cache learns that its stores are off; each word of a mover reaches the caches that use its store, once."""
    deep, shallow = node.registry.cache("deep"), node.registry.cache("shallow")
    for entry in (deep, shallow):
        node.tiers.introduce(entry)
    off = [
        c.TierChanged(tier=tier, is_on=False, is_mover_away=True)
        for tier in (Tier.DISK, Tier.REMOTE)
    ]
    assert node.take() == [("deep", command) for command in off]

    for _ in range(2):
        ends["disk-mover"].send(Status(is_on=True).encode())
    assert await node.until() == [("deep", c.TierChanged(tier=Tier.DISK, is_on=True))]
    reason = "redis://:pw@host is full"
    ends["disk-mover"].send(Status(is_on=False, reason=reason, pool=deep.pool).encode())
    assert await node.until() == [("deep", c.TierChanged(tier=Tier.DISK, is_on=False))]

    shown = {tier.tier: (tier.status, tier.reason) for tier in deep.tiers()}
    assert shown == {
        "host": ("ready", ""),
        "disk": ("off", "redis://***@host is full"),
        "remote": ("off", "its mover is being started"),
    }
    assert [tier.tier for tier in shallow.tiers()] == ["host"]


async def test_latest_word_counts_for_a_cache_that_comes_later(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """What was said of all caches holds for those that nothing else was said of."""
    node.tiers.introduce(node.registry.cache("deep"))
    node.take()
    ends["remote-mover"].send(Status(is_on=True).encode())
    await node.until()

    late = _entry(node.registry, "late", disk_bytes=1 << 20, remote_bytes=1 << 20)
    node.tiers.introduce(late)

    assert node.take() == [
        ("late", c.TierChanged(tier=Tier.DISK, is_on=False, is_mover_away=True)),
        ("late", c.TierChanged(tier=Tier.REMOTE, is_on=True)),
    ]


async def test_store_is_off_while_its_mover_is_replaced(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """When a mover goes, its tier is off until the next one speaks, and its copies have failed when it is dead."""
    node.tiers.introduce(node.registry.cache("deep"))
    ends["disk-mover"].send(Status(is_on=True).encode())
    await node.until(3)

    ends["disk-mover"].close()

    away = c.TierChanged(tier=Tier.DISK, is_on=False, is_mover_away=True)
    assert await node.until() == [("deep", away)]
    assert node.tiers.away == "disk-mover"
    node.tiers.mover_died("disk-mover", 1)
    assert node.tiers.mover_ends["disk"] == 1
    died = c.MoverDied(mover=Mover.DISK)
    assert node.take() == [("deep", died), ("shallow", died)]


async def test_silent_store_is_replaced_and_nothing_else(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """Each mover has its own deadline; the remote one's is a few times what a call may take."""
    ids = np.arange(2, dtype=np.int32).tobytes()
    for direction in (Direction.OFFLOAD, Direction.SHARE):
        copy = Copy(
            copy_id=CopyId(1),
            direction=direction,
            source_ids=ids,
            target_ids=ids,
            checksums=b"",
        )
        node.tiers.send(node.registry.cache("deep"), copy)
    now = asyncio.get_running_loop().time()

    assert node.tiers.figures(now)["remote"].num_sent == 1
    node.tiers.tick(now + REMOTE_SECONDS_MIN + 1)

    assert node.recycled == [("remote-mover", 1)]
    assert ("deep", c.CopyLost(copy_id=CopyId(1))) in node.take()
    assert node.tiers.away == "remote-mover"
    assert len(ends) == 3


async def test_probe_is_answered_in_order_however_it_was_split(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """More labels than a packet takes are asked for in several, and told of as one."""
    deep = node.registry.cache("deep")
    node.tiers.probe(deep, Probe(probe_id=9, labels=_labels(LABELS_MAX + 1)))
    first, second = map(Ask.decode, _packets(ends["remote-mover"]))
    assert first.labels + second.labels == _labels(LABELS_MAX + 1)

    ends["remote-mover"].send(Told(number=second.number, is_present=b"\1").encode())
    ends["remote-mover"].send(Told(number=first.number, is_present=bytes(LABELS_MAX)).encode())

    expected = c.Probed(probe_id=9, is_present=bytes(LABELS_MAX) + b"\1")
    assert await node.until() == [("deep", expected)]


async def test_probe_ends_when_its_time_is_up(node: Node, ends: dict[str, socket.socket]) -> None:
    """A store that does not answer in time has nothing; what it says later is not heard."""
    node.tiers.probe(node.registry.cache("deep"), Probe(probe_id=9, labels=_labels(1)))
    (question,) = map(Ask.decode, _packets(ends["remote-mover"]))

    assert await node.until() == [("deep", c.Probed(probe_id=9))]
    ends["remote-mover"].send(Told(number=question.number, is_present=b"\1").encode())
    ends["remote-mover"].send(Status(is_on=True).encode())
    node.tiers.introduce(node.registry.cache("deep"))

    told = [type(command) for _, command in await node.until(3)]
    assert told == [c.TierChanged] * 3


async def test_probe_without_a_mover_ends_at_once(node: Node) -> None:
    """Nobody waits for a mover that is not there."""
    node.tiers.probe(node.registry.cache("deep"), Probe(probe_id=9, labels=_labels(1)))

    assert node.take() == [("deep", c.Probed(probe_id=9))]


async def test_probe_ends_with_its_mover(node: Node, ends: dict[str, socket.socket]) -> None:
    """A mover that goes while it is asked answers nothing any more, nor does one that knows nothing."""
    deep = node.registry.cache("deep")
    for probe_id in (1, 2):
        node.tiers.probe(deep, Probe(probe_id=probe_id, labels=_labels(1)))
    question, _ = map(Ask.decode, _packets(ends["remote-mover"]))
    ends["remote-mover"].send(Told(number=question.number).encode())
    ends["remote-mover"].close()

    told = [command for _, command in await node.until(2)]
    assert told[:2] == [c.Probed(probe_id=1), c.Probed(probe_id=2)]


async def test_found_slots_are_adopted_until_the_last(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """What an earlier life left is handed to the core as it is found, and counts as far as that takes it over."""
    deep = node.registry.cache("deep")
    node.tiers.introduce(deep)
    ends["disk-mover"].send(Status(is_on=True).encode())
    await node.until(3)
    ids = np.arange(3, dtype=np.int32).tobytes()
    found = Found(
        pool=deep.pool, slot_ids=ids, labels=_labels(3), checksums=bytes(24), is_last=False
    )

    ends["disk-mover"].send(found.encode())

    adopt = c.Adopt(slot_ids=ids, labels=_labels(3), checksums=bytes(24))
    assert await node.until() == [("deep", adopt)]
    assert [(one.status, one.num_found) for one in deep.tiers()] == [
        ("ready", 0),
        ("scanning", 2),
        ("off", 0),
    ]
    last = Found(pool=deep.pool, slot_ids=b"", labels=b"", checksums=b"", is_last=True)
    ends["disk-mover"].send(last.encode())
    async with asyncio.timeout(5):
        while not node.scanned:  # noqa: ASYNC110 - it comes by a callback of the loop
            await asyncio.sleep(0)
    assert (node.scanned, deep.is_scanned, deep.tiers()[1].status) == (["deep"], True, "ready")


async def test_core_forgets_a_disk_store_that_is_another_one(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A core learns once that the file is new, before what is in it; the same file again is no news, in any life."""
    deep = node.registry.cache("deep")
    deep.disk_file_id, deep.is_scanned, deep.num_found[Tier.DISK] = "old", True, 5
    fd = os.memfd_create("test")
    node.tiers.map(deep, pool_map(deep.pool, deep.plan, file_id="old"), [fd])
    node.tiers.introduce(deep)
    node.take()

    def say(*, is_on: bool, file_id: str = "") -> None:
        ends["disk-mover"].send(Status(is_on=is_on, pool=deep.pool, file_id=file_id).encode())

    on, off = (c.TierChanged(tier=Tier.DISK, is_on=is_on) for is_on in (True, False))
    say(is_on=True, file_id="old")
    assert await node.until() == [("deep", on)]
    say(is_on=False)
    say(is_on=True, file_id="new")
    replaced = c.TierChanged(tier=Tier.DISK, is_on=True, is_empty=True)
    assert await node.until(2) == [("deep", off), ("deep", replaced)]
    assert (deep.disk_file_id, deep.is_scanned, deep.num_found[Tier.DISK]) == ("new", False, 0)
    assert node.scanned == ["deep"]
    _packets(ends["disk-mover"])

    ends["disk-mover"].close()
    await node.until()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ends["disk-mover"] = ours
    node.tiers.mover_came("disk-mover", theirs, 2)
    assert protocol.PoolMap.decode(_packets(ours)[0]).file_id == ""
    say(is_on=True, file_id="new")
    assert await node.until() == [("deep", on)]
    os.close(fd)


async def test_answers_for_deleted_caches_are_dropped(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A cache that is deleted while a mover works for it needs no answer."""
    deep = node.registry.cache("deep")
    node.tiers.probe(deep, Probe(probe_id=1, labels=_labels(1)))
    node.registry.drop_cache(deep)
    (question,) = map(Ask.decode, _packets(ends["remote-mover"]))
    found = Found(pool=deep.pool, slot_ids=b"", labels=b"", checksums=b"", is_last=True)

    ends["remote-mover"].send(Told(number=question.number, is_present=b"\1").encode())
    ends["disk-mover"].send(found.encode())
    ends["disk-mover"].send(Status(is_on=True, pool=deep.pool).encode())
    node.tiers.answer_copy(deep.pool, c.CopyFailed(copy_id=CopyId(1)))
    for role in ("disk-mover", "remote-mover"):
        ends[role].send(Status(is_on=True).encode())
    async with asyncio.timeout(5):
        while not all(status.is_on for status in node.tiers._global.values()):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)

    assert not node.take()
    assert not node.scanned
    assert repr(node.tiers).startswith("<Tiers <MoverLink mover 1")


async def _on(node: Node, end: socket.socket) -> CacheEntry:
    """Have the disk store of the deep cache on; returns the cache."""
    entry = node.registry.cache("deep")
    end.send(Status(is_on=True, pool=entry.pool, file_id="01").encode())
    await node.until()
    _packets(end)
    return entry


@pytest.mark.parametrize("reason", ["", "it is on fire"])
async def test_purge_is_answered_by_its_mover(
    node: Node, ends: dict[str, socket.socket], reason: str
) -> None:
    """Whoever waits for a purge hears what the mover says of it, once for all who wait."""
    entry = await _on(node, ends["disk-mover"])
    asked = [asyncio.ensure_future(node.tiers.purge(entry)) for _ in range(2)]
    await asyncio.sleep(0)

    (packet, _) = _packets(ends["disk-mover"])
    ends["disk-mover"].send(Purged(pool=entry.pool, reason=reason).encode())

    assert Purge.decode(packet) == Purge(pool=entry.pool)
    assert await asyncio.wait_for(asyncio.gather(*asked), 5) == [reason] * 2


async def test_purge_of_a_mover_that_ends_is_not_certain(
    node: Node, ends: dict[str, socket.socket]
) -> None:
    """A mover that went before it answered may have left the file; the next purge is refused while none is there."""
    entry = await _on(node, ends["disk-mover"])
    asked = asyncio.ensure_future(node.tiers.purge(entry))
    await asyncio.sleep(0)

    ends["disk-mover"].close()

    assert await asyncio.wait_for(asked, 5) == "its mover has ended"
    assert await node.tiers.purge(entry) == "its mover is being started"


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_tier_all_of_whose_slots_are_retired_is_degraded(node: Node, tier: Tier) -> None:
    """It answers, but keeps nothing: its status, its metric and what readiness says tell so, and why."""
    deep = node.registry.cache("deep")
    deep.stores[Tier.DISK] = Status(is_on=True)
    deep.is_scanned = True
    assert restrictions(node.registry) == {"drained": "", "all slots retired": ""}

    deep.core = SimpleNamespace(num_retired=lambda one: 64 if one is tier else 0)  # type: ignore[assignment]

    (found,) = [one for one in deep.tiers() if one.status == "degraded"]
    assert found.tier == tier.value
    assert found.reason.startswith("64 slots are retired")
    assert not is_up(found)
    assert restrictions(node.registry)["all slots retired"] == f"{tier.value} of deep"
