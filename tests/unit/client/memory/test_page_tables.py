"""Pages of mapped memory are entered without a change of any, and made where they are lacking."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvlease.memory.page_tables import enter_pages

NUM_BYTES = 64 * mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    """A file in memory without any page."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, NUM_BYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("protection", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_entered_pages_are_as_they_were(fd: int, protection: int) -> None:
    """What was written stays, and nothing else gets a byte, whether this process may write the memory or not."""
    os.pwrite(fd, b"kept", 5000)
    mapping = mmap.mmap(fd, NUM_BYTES, mmap.MAP_SHARED, protection)

    assert enter_pages(np.frombuffer(mapping, np.uint8))

    assert mapping[:] == b"\0" * 5000 + b"kept" + b"\0" * (NUM_BYTES - 5004)


def test_lacking_pages_are_made(fd: int) -> None:
    """Pages of a part are made, and only those."""
    region = np.frombuffer(mmap.mmap(fd, NUM_BYTES), np.uint8)

    assert enter_pages(region[16 * mmap.PAGESIZE : 24 * mmap.PAGESIZE])

    assert os.fstat(fd).st_blocks * 512 == 8 * mmap.PAGESIZE


def test_pages_behind_the_files_end_cannot_be_entered(fd: int) -> None:
    """A file that was cut off is told by the answer; nothing dies of it."""
    region = np.frombuffer(mmap.mmap(fd, NUM_BYTES), np.uint8)
    os.ftruncate(fd, NUM_BYTES // 2)

    assert not enter_pages(region)
