"""Laws of a host pool whose file was cut off under the daemon: it is off for good, and other pools go on."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from kvleased.caches import host_watch
from kvleased.caches.entries import CacheEntry
from kvleased.core import commands as c
from kvleased.core.effects import Mover, Tier
from kvleased.memory.regions import HOST

from .conftest import Node


@pytest.fixture
def entry(node: Node) -> Iterator[CacheEntry]:
    """A cache with a file as its host pool."""
    found = node.registry.cache("shallow")
    fd = os.memfd_create("host", os.MFD_CLOEXEC)
    os.ftruncate(fd, found.plan.host_bytes)
    found.fds[HOST] = fd
    yield found
    os.close(fd)


async def test_host_pool_is_off_once_its_file_was_cut_off(
    node: Node, entry: CacheEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    """The core is told once and the tier says why; making the file longer again brings nothing back."""
    now = asyncio.get_running_loop().time()
    node.tiers.tick(now)
    assert node.take() == []

    os.ftruncate(entry.fds[HOST], 4096)
    node.tiers.tick(now)
    told = node.take()
    os.ftruncate(entry.fds[HOST], entry.plan.host_bytes)
    node.tiers.tick(now)

    assert (told, node.take()) == (
        [("shallow", c.TierChanged(tier=Tier.HOST, is_on=False))],
        [],
    )
    (host,) = entry.tiers()
    assert (host.status, "was truncated" in host.reason) == ("off", True)
    assert "".join(capsys.readouterr()).count("host_file_cut_off") == 1


async def test_pool_without_files_never_counts_as_deleted(
    node: Node, entry: CacheEntry, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that no directory holds has no name, and nobody has deleted it."""
    node.tiers.tick(asyncio.get_running_loop().time())

    assert not entry.tiers()[0].reason
    assert "host_file_deleted" not in "".join(capsys.readouterr())


async def test_file_that_cannot_be_asked_counts_as_whole(node: Node, entry: CacheEntry) -> None:
    """If a file's size cannot be asked for, the file counts as whole, and the tick goes on."""
    fd, entry.fds[HOST] = entry.fds[HOST], -1
    node.tiers.tick(asyncio.get_running_loop().time())
    entry.fds[HOST] = fd

    assert node.take() == []


async def test_mover_that_answers_does_not_bring_it_back(
    node: Node, entry: CacheEntry, ends: dict[str, socket.socket]
) -> None:
    """A mover that hung and works again does not turn on a pool whose bytes are gone."""
    now = asyncio.get_running_loop().time()
    os.ftruncate(entry.fds[HOST], 4096)
    node.tiers.tick(now)
    node.take()

    link = node.tiers.links[Mover.MEMORY]
    link.attach(ends["mover"].dup(), 2)
    node.tiers.tick(now + 20)
    hangs = node.take()
    link.close()
    node.tiers.tick(now + 21)
    answers = node.take()
    node.tiers.introduce(entry)

    is_off, is_on = (c.TierChanged(tier=Tier.HOST, is_on=is_on) for is_on in (False, True))
    assert (hangs, answers, node.take()) == ([("deep", is_off)], [("deep", is_on)], [])
    assert host_watch.is_cut_off(entry)
