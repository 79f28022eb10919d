"""Laws of key counts: for which tenants and workers they are kept, and in how much memory."""

import mmap
import os

import pytest

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.memory.key_counts import CountsRegion
from tests.unit.service.conftest import Node


async def attach(
    node: Node, tenant: str = "", *, wants: bool = True, token: str = ""
) -> pb.AttachResponse:
    """Attach over the local socket."""
    request = pb.AttachRequest(
        cache="main", tenant=tenant, wants_key_counts=wants, resume_token=token
    )
    answer = await node.ask("attach", request, Caller(transport="local"))
    assert isinstance(answer, pb.AttachResponse)
    return answer


def kinds(answer: pb.AttachResponse) -> list[str]:
    """Return the kinds of the regions that an attach returned."""
    return [region.kind for region in answer.regions]


async def test_counts_come_where_they_are_wanted(node: Node) -> None:
    """A worker that does not want counts gets neither region nor descriptor; workers of a tenant share one region."""
    async with node.life() as daemon:
        await node.register()
        one, other = await attach(node, "a"), await attach(node, "a")
        third, without = await attach(node, "b"), await attach(node, "a", wants=False)

        inodes = [os.fstat(daemon.fds(a.worker_id)[2]).st_ino for a in (one, other, third)]
        assert kinds(one) == kinds(third) == ["device", "tables", "key_counts"]
        assert kinds(without) == ["device", "tables"]
        assert len(daemon.fds(without.worker_id)) == 2
        assert inodes[0] == inodes[1] != inodes[2]
        assert repr(daemon.counting) == "<KeyCounting 2 regions, 3 readers>"


async def test_worker_that_resumes_reads_on(node: Node) -> None:
    """A worker that resumes stays one reader, or none if it no longer wants the counts."""
    async with node.life() as daemon:
        await node.register()
        first = await attach(node)
        again = await attach(node, token=first.token)
        assert kinds(again) == kinds(first)
        assert repr(daemon.counting) == "<KeyCounting 1 regions, 1 readers>"

        await attach(node, token=first.token, wants=False)

        assert daemon.counting.num_bytes == 0


async def test_last_reader_ends_the_counts(node: Node) -> None:
    """When the last reader leaves, the region tells whoever still maps it to trust nothing in it."""
    async with node.life() as daemon:
        await node.register()
        one, other = await attach(node), await attach(node)
        with mmap.mmap(daemon.fds(one.worker_id)[2], 0, prot=mmap.PROT_READ) as region:
            for worker in (one, other):
                assert region[12] == 0
                caller = Caller(transport="local", token=worker.token)
                await node.ask("detach", pb.DetachRequest(), caller)

            assert region[12] == 1
        assert daemon.counting.num_bytes == 0


async def test_daemon_that_stops_takes_leave(node: Node) -> None:
    """When the daemon stops, the region says so, and readers ask the daemon from then on."""
    async with node.life() as daemon:
        await node.register()
        fd = os.dup(daemon.fds((await attach(node)).worker_id)[2])

    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as region:
        assert region[12] == 1
    os.close(fd)


async def test_no_counts_beyond_their_bytes(node: Node) -> None:
    """A tenant for whose counts there are no bytes gets none; once another tenant leaves, there is room."""
    async with node.life() as daemon:
        await node.register()
        one = await attach(node, "a")
        daemon.counting._bytes_max = daemon.counting.num_bytes
        assert kinds(await attach(node, "b")) == ["device", "tables"]

        caller = Caller(transport="local", token=one.token)
        await node.ask("detach", pb.DetachRequest(), caller)

        assert kinds(await attach(node, "b")) == ["device", "tables", "key_counts"]


async def test_no_counts_where_the_kernel_has_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel cannot make such a region, workers get no counts and ask the daemon."""

    def refuse(*_: int) -> CountsRegion:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(CountsRegion, "made", refuse)
    async with node.life():
        await node.register()

        assert kinds(await attach(node)) == ["device", "tables"]


def test_only_the_maker_writes_a_region() -> None:
    """Nobody but its maker can write or resize the region, through any descriptor that is opened of it."""
    region = CountsRegion.made(4, 9)
    region.counts[:] = 5
    fd = os.open(f"/proc/self/fd/{region.read_only_fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0, mmap.MAP_SHARED)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"\1", 100)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert os.pread(fd, 4, 64) == b"\5\0\0\0"
    finally:
        os.close(fd)
        region.close()
    assert repr(region) == "<CountsRegion 4 buckets>"
