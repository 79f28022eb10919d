"""A cache keeps the options of its registration in every life; options that cannot be had are refused with advice."""

import asyncio
import errno
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvlease.disk_file import bytes_per_charged_slot, file_bytes
from kvlease.errors import InvalidError, LayoutMismatchError, NeverFitsError, PoolFullError
from kvlease.units import BYTES_PER_SECTOR
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import Settings
from kvleased.credentials import secret
from kvleased.planning.rows import PLACES_MAX
from kvleased.verbs import making
from tests.unit.service.registering import SLOT_BYTES, request_of

from .conftest import TOKENS_PER_BLOCK, Node

OPTIONS = pb.CacheOptions(
    integrity="none", write_policy="after-n-hits", write_after_hits=3, ghosts=["leaf-lru@20"]
)


def _disk_bytes(num_slots: int) -> int:
    """Return the bytes that a disk store of so many slots takes."""
    return BYTES_PER_SECTOR + num_slots * bytes_per_charged_slot(SLOT_BYTES)


async def test_options_are_told_with_nothing_left_to_a_default(node: Node) -> None:
    """A registration that names no options is told the value of each."""
    async with node.life():
        info = await node.register()

    assert info.options == pb.CacheOptions(
        integrity="xxh3", write_policy="on-evict", eviction_policy="leaf-lru"
    )
    assert [(tier.tier, tier.status, tier.num_slots) for tier in info.tiers] == [
        ("host", "ready", 8)
    ]


async def test_options_are_kept_over_restarts(node: Node) -> None:
    """The next life keeps the cache's options, and takes an equal registration as equal."""
    async with node.life():
        first = (await node.ask("register_cache", request_of(OPTIONS))).info

    async with node.life() as daemon:
        entry = daemon.registry.cache("main")
        assert entry.options == first.options
        assert entry.core.shape.write_policy.value == "after-n-hits"
        assert entry.core.shape.write_after_hits == 3
        assert not (await node.ask("register_cache", request_of(OPTIONS))).created


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"integrity": "xxh3"}, r"integrity \(none, not xxh3\)", id="integrity"),
        pytest.param(
            {"write_policy": "write-through", "write_after_hits": None},
            r"write_policy \(after-n-hits, not write-through\)",
            id="policy",
        ),
        pytest.param({"write_after_hits": 4}, r"write_after_hits \(3, not 4\)", id="hits"),
        pytest.param({"ghosts": ["fifo"]}, r"ghosts \(leaf-lru@20, not fifo\)", id="ghosts"),
    ],
)
async def test_other_options_are_another_registration(
    node: Node, options: dict[str, Any], says: str
) -> None:
    """A registration with options other than the cache's is refused with those that differ."""
    settled = {name: getattr(OPTIONS, name) for name in OPTIONS.DESCRIPTOR.fields_by_name}
    other = pb.CacheOptions(**settled | options)
    async with node.life():
        await node.ask("register_cache", request_of(OPTIONS))

        with pytest.raises(LayoutMismatchError, match=says):
            await node.ask("register_cache", request_of(other))


async def test_options_that_are_left_out_are_those_of_the_cache(node: Node) -> None:
    """A worker need not know the options that an operator registered: options left out are the cache's."""
    async with node.life():
        made = await node.ask("register_cache", request_of(OPTIONS))

        found = await node.ask("register_cache", request_of(pb.CacheOptions()))

        assert not found.created
        assert found.info.options == made.info.options


@pytest.mark.parametrize(
    ("options", "changes", "resource", "says"),
    [
        pytest.param({"write_policy": "later"}, {}, "write_policy", "one of on-evict", id="policy"),
        pytest.param({"eviction_policy": "x"}, {}, "eviction_policy", "leaf-lru", id="eviction"),
        pytest.param(
            {"write_after_hits": 2},
            {},
            "write_after_hits",
            "leave write_after_hits out",
            id="hits of no policy",
        ),
        pytest.param(
            {"write_policy": "after-n-hits", "write_after_hits": 0},
            {},
            "write_after_hits",
            "from 1 to",
            id="no hits",
        ),
        pytest.param({"ghosts": ["lfu"] * 4}, {}, "ghosts", "name at most 3", id="ghosts"),
        pytest.param(
            {"write_policy": "write-through"},
            {"host_bytes": 0},
            "write_policy",
            "no lower tier",
            id="nothing below",
        ),
        pytest.param({}, {"disk_bytes": 1 << 20}, "disk_bytes", "no disk_dir", id="no disk"),
        pytest.param(
            {}, {"remote_bytes": 1 << 20}, "remote_bytes", "no remote_url", id="no remote"
        ),
    ],
)
async def test_what_leads_nowhere_is_refused(
    node: Node, options: dict[str, Any], changes: dict[str, Any], resource: str, says: str
) -> None:
    """Options that cannot work are refused with the field and what to do instead."""
    async with node.life():
        with pytest.raises(InvalidError, match=says) as refusal:
            await node.ask("register_cache", request_of(pb.CacheOptions(**options), **changes))

    assert refusal.value.resource == resource


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"device_blocks": 1 << 22}, "device_blocks"), ({"device_bytes": 1 << 31}, "device_bytes")],
    ids=["blocks", "bytes"],
)
async def test_pool_beyond_the_memory_is_refused_by_what_it_was_given_as(
    node: Node, asked: dict[str, int], told: str
) -> None:
    """The refusal says to lower the blocks or the bytes, whichever the caller gave."""
    both = {"device_blocks": 0, "device_bytes": 0}
    async with node.life():
        with pytest.raises(NeverFitsError, match=f"lower {told} or host_bytes") as refusal:
            await node.ask("register_cache", request_of(**(both | asked)))

    assert refusal.value.resource == "memory_bytes"


async def test_pool_without_a_size_is_a_quarter_of_what_the_daemon_may_use(node: Node) -> None:
    """A memory_bytes_max below the memory limit decides, so that a cache that names no size fits."""
    node.settings = node.settings.model_copy(update={"memory_bytes_max": 1 << 20})
    async with node.life():
        info = await node.register(device_blocks=0, device_bytes=0, host_bytes=0)

    assert info.plan.ranks[0].device_bytes == 1 << 18


async def test_requests_without_an_end_are_registered_with_little_memory(node: Node) -> None:
    """Windows alone bound no request, so its row of the block table ends it, and the daemon keeps little for that."""
    windows = [
        pb.LayerSpec(
            name=f"window of {tokens}",
            kind="sliding_window",
            num_kv_heads=1,
            head_size=16,
            dtype="float32",
            window_tokens=tokens,
        )
        for tokens in (40, 10)
    ]
    async with node.life():
        tracemalloc.start()
        try:
            info = await node.register(
                layers=windows,
                device_blocks=64,
                null_blocks=1,
                engine=pb.EngineInputs(tokens_per_step=8),
            )
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert sum(group.table_blocks for group in info.plan.groups) == PLACES_MAX
    assert info.plan.longest_request_tokens == PLACES_MAX // 2 * TOKENS_PER_BLOCK
    assert peak_bytes < 40 * PLACES_MAX


class TestStores:
    """Caches with a disk and a remote store."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        """Return settings of a node with both stores and room on disk for 100 slots of a block and its header."""
        (tmp_path / "disk").mkdir(mode=0o700)
        secret.ensure(tmp_path / "disk" / "secret")
        return Settings(
            runtime_dir=tmp_path,
            max_leases=8,
            memory_bytes_max=1 << 30,
            disk_dir=tmp_path / "disk",
            disk_bytes_max=file_bytes(100, SLOT_BYTES),
            remote_url="redis://host:1",
        )

    @pytest.mark.parametrize("lower", ["disk_bytes", "remote_bytes"])
    async def test_store_without_a_host_pool_is_refused(self, node: Node, lower: str) -> None:
        """Blocks reach a store through the host pool only; the refusal has the smallest host pool that works."""
        async with node.life():
            with pytest.raises(InvalidError, match=lower) as refusal:
                await node.ask("register_cache", request_of(host_bytes=0, **{lower: 1 << 20}))

        assert (refusal.value.resource, refusal.value.need) == ("host_bytes", SLOT_BYTES)

    async def test_disks_of_all_caches_have_one_limit(self, node: Node) -> None:
        """A store that does not fit beside those of other caches is refused with the bytes that are left."""
        async with node.life():
            await node.register("other", disk_bytes=_disk_bytes(60))

            with pytest.raises(NeverFitsError) as refusal:
                await node.ask("register_cache", request_of(disk_bytes=_disk_bytes(50)))

            assert refusal.value.resource == "disk_bytes"
            sizes = {count: file_bytes(count, SLOT_BYTES) for count in (50, 60, 100)}
            assert refusal.value.need == sizes[50]
            assert refusal.value.available == sizes[100] - sizes[60]
            assert refusal.value.limit == sizes[100]

    @pytest.mark.parametrize("breaks", ["hangs", "fails"])
    async def test_file_system_that_does_not_answer_holds_up_nobody(
        self, node: Node, monkeypatch: pytest.MonkeyPatch, breaks: str
    ) -> None:
        """If the file system hangs, a registration with a disk store is refused in time; other calls are answered."""
        node.settings = node.settings.model_copy(update={"disk_bytes_max": 0})
        has_hung, goes_on = threading.Event(), threading.Event()

        def statvfs(_: Path) -> os.statvfs_result:
            has_hung.set()
            if breaks == "hangs":
                goes_on.wait()
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(making, "DISK_SECONDS_MAX", 0.5 if breaks == "hangs" else 60.0)
        async with node.life():
            monkeypatch.setattr(os, "statvfs", statvfs)
            asked = asyncio.ensure_future(
                node.ask("register_cache", request_of(disk_bytes=_disk_bytes(10)))
            )
            await asyncio.to_thread(has_hung.wait)
            assert not (await node.ask("list_caches", pb.ListCachesRequest())).caches

            with pytest.raises(PoolFullError, match="disk_bytes_max") as refusal:
                await asked

            assert refusal.value.resource == "disk_dir"
            assert ("not answered" if breaks == "hangs" else "Input/output") in str(refusal.value)
            assert (await node.register()).status
        goes_on.set()

    async def test_stores_are_told_with_why_they_are_off(self, node: Node) -> None:
        """A store whose mover has not come is listed with why it is off."""
        async with node.life() as daemon:
            info = await node.register(disk_bytes=_disk_bytes(10), remote_bytes=10 * 512)
            shape = daemon.registry.cache("main").core.shape

        shown = {tier.tier: (tier.status, tier.reason, tier.num_slots) for tier in info.tiers}
        away = "its mover is being started"
        assert shown == {
            "host": ("ready", "", 8),
            "disk": ("off", away, 10),
            "remote": ("off", away, 0),
        }
        assert (shape.num_disk_slots, shape.uses_remote) == (10, True)

    async def test_store_that_is_known_is_not_looked_through_again(self, node: Node) -> None:
        """A restarted control process remembers that a store was looked through to its end."""
        async with node.life() as daemon:
            await node.register(disk_bytes=_disk_bytes(10))
            entry = daemon.registry.cache("main")
            entry.is_scanned, entry.disk_file_id = True, "ab"
            daemon._caches.note_store(entry)

        async with node.life() as daemon:
            entry = daemon.registry.cache("main")
            assert (entry.is_scanned, entry.disk_file_id) == (True, "ab")
            assert not (
                await node.ask("register_cache", request_of(disk_bytes=_disk_bytes(10)))
            ).created
