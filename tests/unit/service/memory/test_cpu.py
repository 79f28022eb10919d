"""Regions are populated in chunks, and left out of core dumps."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvleased.memory import cpu

REGION_BYTES = 10 * 4096


@pytest.fixture
def region() -> Iterator[int]:
    """A region of ten pages of which none exists yet."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, REGION_BYTES)
    yield fd
    os.close(fd)


def test_populating_reports_each_chunk(region: int) -> None:
    """The chunks add up to the region, and afterwards every page exists."""
    assert not cpu.is_populated(region, REGION_BYTES)

    chunks = list(cpu.populate_chunks(region, REGION_BYTES, 4 * 4096))

    assert chunks == [4 * 4096, 4 * 4096, 2 * 4096]
    assert cpu.is_populated(region, REGION_BYTES)


def test_populating_keeps_what_is_written(region: int) -> None:
    """Populating a region a second time changes no byte."""
    os.pwrite(region, b"kept", 4096)

    list(cpu.populate_chunks(region, REGION_BYTES, 4096))

    assert os.pread(region, 4, 4096) == b"kept"


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_populating_that_is_given_up_keeps_nothing_open(region: int, num_chunks: int) -> None:
    """A cache that is deleted before or while it is populated leaves no descriptor of its memory open."""
    before = _num_open("memfd:test")

    chunks = cpu.populate_chunks(region, REGION_BYTES, 4096)
    done = [next(chunks) for _ in range(num_chunks)]
    del chunks

    assert done == [4096] * num_chunks
    assert _num_open("memfd:test") == before


def test_mapping_is_shared_and_left_out_of_core_dumps(region: int) -> None:
    """What is written through one mapping is read through another; the kernel dumps neither."""
    writer, reader = (
        cpu.map_region(region, REGION_BYTES),
        cpu.map_region(region, REGION_BYTES, writable=False),
    )

    writer[5000] = 7

    assert reader[5000] == 7
    flags = [line for line in _own_mappings("memfd:test") if line.startswith("VmFlags")]
    assert flags
    assert all(" dd" in line for line in flags)


def test_read_only_descriptor_cannot_be_written(region: int) -> None:
    """The block table's descriptor for workers cannot be mapped for writing."""
    fd = cpu.reopen_read_only(region)

    with pytest.raises(PermissionError):
        cpu.map_region(fd, REGION_BYTES)

    assert cpu.map_region(fd, REGION_BYTES, writable=False)[0] == 0
    os.close(fd)


def test_empty_pool_needs_no_memory() -> None:
    """A cache without a host tier maps nothing."""
    assert cpu.map_region(-1, 0).shape == (0,)


def _own_mappings(name: str) -> Iterator[str]:
    is_named = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_named = name in line
        elif is_named:
            yield line


def _num_open(name: str) -> int:
    """Count this process's descriptors of memory."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum(name in str(link.readlink()) for link in links if link.is_symlink())
