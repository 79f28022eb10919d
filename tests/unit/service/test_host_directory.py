"""Laws of host pools in files of a directory."""

import asyncio
import errno
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlease.errors import NeverFitsError, PoolFullError, WrongStateError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import Settings
from kvleased.credentials import secret
from kvleased.memory import cpu, holes
from kvleased.memory.cpu import map_region
from kvleased.memory.host_files import HEAD_BYTES
from kvleased.supervision.keeper import Store
from kvleased.supervision.keeper_link import KeeperLink
from tests.unit.service.registering import SLOT_BYTES, request_of

from .conftest import Node, keys


class TestHostDirectory:
    """Host pools in a directory, which outlive the supervisor and all that it keeps."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        """Settings of a node whose host pools are files."""
        (tmp_path / "host").mkdir(mode=0o700)
        secret.ensure(tmp_path / "host" / "secret")
        return Settings(
            runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 20, host_dir=tmp_path / "host"
        )

    async def _evict_two(self, node: Node) -> None:
        """Commit two blocks, one full of 1 and one full of 2, and have them move from the device to the host pool."""
        worker = await node.attach()
        fd = node.daemon.registry.cache("main").fds["device.0"]
        device = map_region(fd, 16 * SLOT_BYTES).reshape(16, SLOT_BYTES)
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)
        for place, block in enumerate(np.frombuffer(lease.block_ids, np.int32)):
            device[block] = place + 1
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)
        await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), worker)
        await node.ask("evict", pb.EvictRequest(keys=keys(1, 2)), worker)

    async def _leave_two(self, node: Node) -> None:
        """Let a life end with two evicted blocks in its host pool, and its supervisor with it."""
        async with node.life():
            await node.register()
            await self._evict_two(node)
        node.store.close()
        node.store = Store()

    async def test_blocks_outlive_the_supervisor(self, node: Node) -> None:
        """After all processes have gone, an equal registration finds the evicted blocks, byte for byte."""
        await self._leave_two(node)

        async with node.life():
            info = await node.register()
            worker = await node.attach()
            fd = node.daemon.registry.cache("main").fds["device.0"]
            device = map_region(fd, 16 * SLOT_BYTES).reshape(16, SLOT_BYTES)
            request = pb.ReserveRequest(
                request_id="r", num_tokens=12, keys=keys(1, 3), wait_ms=5000
            )
            lease = await node.ask("reserve", request, worker)

            assert [(tier.status, tier.num_found) for tier in info.tiers] == [("ready", 2)]
            assert lease.host_hit_tokens == 8
            blocks = struct.unpack("<3i", lease.block_ids)
            assert [set(device[block].tolist()) for block in blocks[:2]] == [{1}, {2}]
            assert not node.daemon.registry.cache("main").core.check()

    async def test_pool_that_cannot_be_had_leaves_no_files(
        self, node: Node, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If a pool's memory cannot be had, its new files are deleted with the cache and keep no memory."""
        populate = cpu.populate_chunks

        def fail(fd: int, region_bytes: int, chunk_bytes: int) -> Iterator[int]:
            if chunk_bytes == settings.populate_chunk_bytes:
                raise OSError(errno.ENOSPC, "no more pages")
            return populate(fd, region_bytes, chunk_bytes)

        monkeypatch.setattr(cpu, "populate_chunks", fail)
        assert settings.host_dir is not None

        async with node.life() as daemon:
            await node.ask("register_cache", request_of())
            while "main" in daemon.registry.caches:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)

            assert [path.name for path in settings.host_dir.iterdir()] == ["secret"]

    async def test_cache_that_cannot_have_its_other_regions_leaves_no_files(
        self, node: Node, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If memory beside the host pool cannot be had, the pool's new files go; those of an earlier life stay."""
        assert settings.host_dir is not None
        directory = settings.host_dir

        async def refuse(*_: object) -> int:
            raise PoolFullError("no memory", resource="memory_bytes")

        async def refused() -> set[str]:
            with monkeypatch.context() as patch:
                patch.setattr(KeeperLink, "create", refuse)
                with pytest.raises(PoolFullError, match="no memory"):
                    await node.ask("register_cache", request_of())
            return {path.name for path in directory.iterdir()}

        async with node.life():
            assert await refused() == {"secret"}
            await node.register()
            await self._evict_two(node)
        node.store.close()
        node.store = Store()

        async with node.life():
            assert len(await refused()) == 3
            assert [tier.num_found for tier in (await node.register()).tiers] == [2]

    async def test_files_that_cannot_be_kept_lose_no_blocks(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the supervisor cannot be given the files of an earlier life, they stay, and the next try finds them."""

        def fail(*_: object) -> None:
            raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

        await self._leave_two(node)

        async with node.life():
            with monkeypatch.context() as patch:
                patch.setattr(KeeperLink, "keep", fail)
                with pytest.raises(OSError, match="Broken pipe"):
                    await node.ask("register_cache", request_of())
            assert [tier.num_found for tier in (await node.register()).tiers] == [2]

    async def test_directory_without_room_is_told_of_with_both_numbers(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the directory has too little room, the refusal has the bytes needed and the bytes available."""
        full = os.statvfs_result((4096, 4096, 10, 1, 1, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "fstatvfs", lambda _: full)

        async with node.life():
            with pytest.raises(PoolFullError, match="host_bytes smaller") as caught:
                await node.ask("register_cache", request_of())

        assert (caught.value.resource, caught.value.available) == ("host_dir", 4096)
        assert (caught.value.need or 0) > 4096

    @pytest.mark.parametrize(
        ("tier", "told"),
        [
            pytest.param("host", "/host has no room for 1 more slot: No space", id="host"),
            pytest.param("device", "system has no memory for 1 more block: No space", id="device"),
        ],
    )
    async def test_resize_without_room_names_the_place(
        self, node: Node, monkeypatch: pytest.MonkeyPatch, tier: str, told: str
    ) -> None:
        """If a pool cannot have its memory back, the refusal names the directory that a host pool lies in."""

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        async with node.life() as daemon:
            await node.register()
            plan = daemon.registry.cache("main").plan
            most = plan.num_slots if tier == "host" else plan.usable_blocks
            await node.ask("resize", pb.ResizeRequest(cache="main", tier=tier, num_blocks=most - 1))
            monkeypatch.setattr(holes, "bring_back", fail)

            with pytest.raises(PoolFullError, match=told):
                await node.ask("resize", pb.ResizeRequest(cache="main", tier=tier, num_blocks=most))

    async def test_control_process_goes_on_over_the_files(self, node: Node) -> None:
        """After a restart of the control process alone, the files come from what the supervisor keeps."""
        async with node.life():
            await node.register()
            await self._evict_two(node)

        async with node.life() as daemon:
            worker = await node.attach()
            found = await node.ask("lookup", pb.LookupRequest(keys=keys(1, 2)), worker)

            assert found.num_host_blocks == 2
            assert not daemon.registry.cache("main").core.check()

    async def test_other_secret_finds_nothing(self, node: Node, tmp_path: Path) -> None:
        """With another secret all keys differ, so files of the old secret are of no use and count as taken."""
        await self._leave_two(node)
        (tmp_path / "host" / "secret").write_bytes(bytes(range(32)))

        async with node.life():
            info = await node.register()

        assert [tier.num_found for tier in info.tiers] == [0]
        assert len(list((tmp_path / "host").glob("*.slots"))) == 2

    async def test_what_a_cache_left_is_not_counted_twice(self, node: Node, tmp_path: Path) -> None:
        """A pool of more than half the limit is registered again after a restart, also if its files are unfinished."""
        request = request_of(host_bytes=600 << 10)
        for life in range(3):
            async with node.life() as daemon:
                info = (await node.ask("register_cache", request)).info
                await asyncio.gather(*daemon._caches._maker._populator.tasks.values())
                assert info.tiers[0].num_found == 0
            node.store.close()
            node.store = Store()
            if life == 1:
                (slots,) = (tmp_path / "host").glob("*.slots")
                os.truncate(slots, 300 << 10)
                os.truncate(slots, 600 << 10)

    async def test_files_left_behind_take_memory(self, node: Node, tmp_path: Path) -> None:
        """Bytes in files of unregistered caches are not granted again; the refusal says where the files are."""
        fd = os.open(tmp_path / "host" / "old.slots", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 1 << 20)
        os.close(fd)

        async with node.life():
            with pytest.raises(
                NeverFitsError, match=r"files in .*host .* use 1048576 more"
            ) as refusal:
                await node.ask("register_cache", request_of())

        assert refusal.value.available == 0

    async def test_files_moved_aside_are_named_where_the_limit_is_reached(
        self, node: Node, tmp_path: Path
    ) -> None:
        """No registration uses files that were moved aside, so the refusal names them with their bytes."""
        fd = os.open(tmp_path / "host" / "old.slots.aside-1", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 1 << 20)
        os.close(fd)

        async with node.life():
            with pytest.raises(
                NeverFitsError, match=r"delete .*old\.slots\.aside-1 \(1048576 bytes"
            ):
                await node.ask("register_cache", request_of())

    async def test_file_that_cannot_be_read_once_loses_no_block(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A passing fault refuses one registration, with the file and the reason; the next one finds all blocks."""
        await self._leave_two(node)
        read, faults = os.pread, [OSError(errno.EIO, "Input/output error")]

        def fail_once(fd: int, num_bytes: int, offset: int) -> bytes:
            if num_bytes == HEAD_BYTES and faults:
                raise faults.pop()
            return read(fd, num_bytes, offset)

        async with node.life():
            monkeypatch.setattr(os, "pread", fail_once)
            with pytest.raises(
                PoolFullError, match=r"\.records cannot be .*Input/output"
            ) as refusal:
                await node.ask("register_cache", request_of())
            info = await node.register()

        assert refusal.value.retry_after_ms
        assert [(tier.status, tier.num_found) for tier in info.tiers] == [("ready", 2)]

    async def test_file_that_others_may_use_is_told_as_the_state_it_is_in(
        self, node: Node, tmp_path: Path
    ) -> None:
        """A file that others may use is no lack of memory, and no wait mends it; once it is private, it is used."""
        await self._leave_two(node)
        (slots,) = (tmp_path / "host").glob("*.slots")
        slots.chmod(0o644)

        async with node.life():
            with pytest.raises(WrongStateError, match=r"\.slots is 0644.* chmod 0600") as refusal:
                await node.ask("register_cache", request_of())
            slots.chmod(0o600)
            info = await node.register()

        assert (refusal.value.resource, refusal.value.retry_after_ms) == ("host_dir", None)
        assert [(tier.status, tier.num_found) for tier in info.tiers] == [("ready", 2)]

    async def test_files_left_behind_are_named_at_the_start_and_beside_new_ones(
        self, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Files whose cache is no longer registered, or is registered in another size, are logged with their bytes."""
        async with node.life():
            await node.register()
        assert "host_files_unclaimed" not in capsys.readouterr().err
        node.store.close()
        node.store = Store()
        left = {path.name for path in (tmp_path / "host").iterdir()} - {"secret"}

        async with node.life():
            first = _told_of_files(capsys.readouterr().err)
            await node.register(host_bytes=4 * SLOT_BYTES)
            at_registration = _told_of_files(capsys.readouterr().err)
        async with node.life():
            pass
        second = _told_of_files(capsys.readouterr().err)

        told = (*first, *at_registration, *second)
        assert [set(line["files"]) for line in told] == [left, left, left]
        assert [line["num_files"] for line in first] == [2]
        assert [line["bytes"] for line in first] == [sum(first[0]["files"].values())]
        assert {path.name for path in (tmp_path / "host").iterdir()} > left

    async def test_registration_that_finds_its_files_tells_of_no_others(
        self, node: Node, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A registration that finds its files logs no others: only a new pool can leave files of another size."""
        async with node.life():
            await node.register()
            await node.register("other")
        node.store.close()
        node.store = Store()

        async with node.life():
            capsys.readouterr()
            await node.register()
            assert "host_files_unclaimed" not in capsys.readouterr().err

    async def test_deleted_cache_leaves_no_file(self, node: Node, tmp_path: Path) -> None:
        """Deleting a cache deletes its files, and nothing else."""
        async with node.life():
            await node.register()
            assert len(list((tmp_path / "host").iterdir())) == 3

            await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))

            assert [entry.name for entry in (tmp_path / "host").iterdir()] == ["secret"]

    async def test_directory_that_is_gone_is_a_refusal(self, node: Node, tmp_path: Path) -> None:
        """If the directory vanished after the start, the registration is refused and leaves nothing half-made."""
        async with node.life():
            (tmp_path / "host").rename(tmp_path / "gone")

            with pytest.raises(PoolFullError, match="No such file"):
                await node.ask("register_cache", request_of())
            assert not node.daemon.registry.caches
        assert len(node.store) == 1

    async def test_file_that_was_cut_off_loses_the_cache_and_no_more(
        self, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file that was cut off is logged and not read: reading behind its end would end the process."""
        async with node.life():
            await node.register()
        (slots,) = (tmp_path / "host").glob("*.slots")
        os.truncate(slots, 0)

        async with node.life() as daemon:
            assert not daemon.registry.caches
            info = await node.register()

        assert [tier.num_found for tier in info.tiers] == [0]
        assert json.loads(json.dumps(info.status)) == "ready"
        assert len(list((tmp_path / "host").glob("*.slots*"))) == 2
        assert "host_file_moved_aside" in capsys.readouterr().err

    @pytest.mark.parametrize("kind", ["slots", "records"])
    async def test_deleted_file_is_told_once_and_its_pool_used_on(
        self, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
    ) -> None:
        """A pool whose file was deleted serves on; one line and the tier's reason say that it outlives nothing now."""
        async with node.life() as daemon:
            await node.register()
            (file,) = (tmp_path / "host").glob(f"*.{kind}")
            file.unlink()

            for _ in range(2):
                daemon.tiers.tick(asyncio.get_running_loop().time())
            (tier,) = daemon.registry.cache("main").tiers()

            assert (tier.status, "was deleted" in tier.reason) == ("ready", True)
            assert "".join(capsys.readouterr()).count("host_file_deleted") == 1

    async def test_pool_in_its_files_gives_no_reason(
        self, node: Node, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Files that are where they were made are nothing to tell of."""
        async with node.life() as daemon:
            await node.register()
            daemon.tiers.tick(asyncio.get_running_loop().time())

            assert not daemon.registry.cache("main").tiers()[0].reason
            assert "host_file_deleted" not in "".join(capsys.readouterr())


def _told_of_files(log: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines() if "host_files_unclaimed" in line]
    return [line for line in lines if line["event"] == "host_files_unclaimed"]
