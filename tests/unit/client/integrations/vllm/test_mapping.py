"""Own the laws of mapping ahead: no page faults when it is touched, and no byte changes."""

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
    """Memory that somebody else has made; nobody has written to it yet, as in a new pool."""
    descriptor = os.memfd_create("region")
    os.posix_fallocate(descriptor, 0, NUM_PAGES * mmap.PAGESIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def mapped(descriptor: int) -> mmap.mmap:
    """The memory as an engine has mapped it."""
    return mmap.mmap(descriptor, NUM_PAGES * mmap.PAGESIZE)


@pytest.fixture
def region(mapped: mmap.mmap) -> NDArray[np.uint8]:
    """The same as an array."""
    return np.frombuffer(mapped, np.uint8)


def place_of(descriptor: int) -> tuple[int, int]:
    """Return which memory it is."""
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


def num_faults() -> int:
    """Return the faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_mapped_pages_do_not_fault(
    region: NDArray[np.uint8], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slice after slice is mapped, the last one shorter; then all is there to be touched, and nothing was written."""
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
    """A pool that was made smaller is not made larger again by an engine that maps it."""
    mapped.madvise(mmap.MADV_REMOVE, 3 << 20, mmap.PAGESIZE)
    before = os.fstat(descriptor).st_blocks

    assert list(mapping.mapped_ahead(region, place_of(descriptor))) == []
    assert os.fstat(descriptor).st_blocks == before


def test_what_cannot_be_mapped_ahead_is_left_to_whoever_touches_it(
    region: NDArray[np.uint8], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not know how, or the memory is not open any more, it ends, and nothing is raised."""
    assert list(mapping.mapped_ahead(region, (0, 0))) == []
    monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 1023)
    assert list(mapping.mapped_ahead(region, place_of(descriptor))) == []
