"""Own the laws of mapping ahead: memory does not fault when it is touched later, and no byte changes."""

import mmap
import os
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.integrations.vllm import mapping

NUM_PAGES = 2048


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Memory that another process has made and nobody has written to, as in a new pool."""
    descriptor = os.memfd_create("region")
    os.posix_fallocate(descriptor, 0, NUM_PAGES * mmap.PAGESIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def mapped(descriptor: int) -> mmap.mmap:
    """The memory as an engine maps it."""
    return mmap.mmap(descriptor, NUM_PAGES * mmap.PAGESIZE)


@pytest.fixture
def region(mapped: mmap.mmap) -> NDArray[np.uint8]:
    """The mapped memory as an array."""
    return np.frombuffer(mapped, np.uint8)


def place_of(descriptor: int) -> tuple[int, int]:
    """Return the device and the inode of the memory."""
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


def num_faults() -> int:
    """Return the number of page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_mapped_pages_do_not_fault(
    region: NDArray[np.uint8], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is mapped in slices, the last one shorter; then touching it does not fault, and no byte is written."""
    monkeypatch.setattr(mapping, "SLICE_BYTES", 3 << 20)

    told = list(mapping.mapped_ahead(region, place_of(descriptor)))
    before = num_faults()
    assert not region.any()
    region[:: mmap.PAGESIZE] = 7

    assert told == [3 << 20, 6 << 20, 8 << 20]
    assert num_faults() - before < NUM_PAGES // 8


def test_pages_that_were_given_back_stay_away(
    mapped: mmap.mmap, region: NDArray[np.uint8], descriptor: int
) -> None:
    """An engine that maps a pool does not bring back the memory that was given back when it was made smaller."""
    mapped.madvise(mmap.MADV_REMOVE, 3 << 20, mmap.PAGESIZE)
    before = os.fstat(descriptor).st_blocks

    assert list(mapping.mapped_ahead(region, place_of(descriptor))) == []
    assert os.fstat(descriptor).st_blocks == before


def test_what_cannot_be_mapped_ahead_is_left_to_whoever_touches_it(
    region: NDArray[np.uint8], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel cannot map ahead, or the memory is closed already, mapping ends without an error."""
    assert list(mapping.mapped_ahead(region, (0, 0))) == []
    monkeypatch.setattr(mapping, "enter_pages", lambda _: False)
    assert list(mapping.mapped_ahead(region, place_of(descriptor))) == []
