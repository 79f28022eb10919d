"""Whole pages under blocks that are out of use are given back and brought back; no other byte changes."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvleased.memory import cpu, holes

PAGE = mmap.PAGESIZE
NUM_PAGES = 16


@pytest.fixture
def fd() -> Iterator[int]:
    """A region in which each byte tells its page."""
    fd = os.memfd_create("region", os.MFD_CLOEXEC)
    os.ftruncate(fd, NUM_PAGES * PAGE)
    for page in range(NUM_PAGES):
        os.pwrite(fd, bytes([page + 1]) * PAGE, page * PAGE)
    yield fd
    os.close(fd)


def first_bytes(fd: int, num_pages: int = NUM_PAGES) -> list[int]:
    """Return the first byte of each page."""
    return [os.pread(fd, 1, page * PAGE)[0] for page in range(num_pages)]


@pytest.mark.parametrize(
    ("blocks", "pieces", "found"),
    [
        pytest.param([2, 3], ((0, PAGE, PAGE),), [(2, 4)], id="neighbours are one range"),
        pytest.param([1, 5], ((0, PAGE, PAGE),), [(1, 2), (5, 6)], id="others are not"),
        pytest.param([3], ((0, PAGE // 2, PAGE // 2),), [], id="half a page is none"),
        pytest.param([2, 3], ((0, PAGE // 2, PAGE // 2),), [(1, 2)], id="two halves are one"),
        pytest.param([1], ((0, PAGE, PAGE - 64),), [(1, 2)], id="padding is the block's own"),
        pytest.param(
            [1], ((0, PAGE, PAGE), (8 * PAGE, PAGE, PAGE)), [(1, 2), (9, 10)], id="two pieces"
        ),
        pytest.param([0], ((10, 2 * PAGE, 2 * PAGE),), [(1, 2)], id="pages that begin before stay"),
        pytest.param([], ((0, PAGE, PAGE),), [], id="no blocks"),
    ],
)
def test_pages_lie_under_the_blocks_alone(
    blocks: list[int], pieces: holes.Pieces, found: list[tuple[int, int]]
) -> None:
    """A page counts only if all of it lies under blocks that are out of use."""
    ranges = holes.pages_of(np.array(blocks, np.intp), pieces, PAGE)

    assert ranges == [(start * PAGE, end * PAGE) for start, end in found]


def test_given_back_pages_read_as_zeros_and_all_others_as_before(fd: int) -> None:
    """The system has exactly those pages back; mappings stay usable, and the pages can be brought back."""
    region = cpu.map_region(fd, NUM_PAGES * PAGE)

    holes.give_back(fd, [(2 * PAGE, 4 * PAGE)], NUM_PAGES * PAGE)

    assert holes.missing_bytes(fd, NUM_PAGES * PAGE) == 2 * PAGE
    expected = [0 if page in (2, 3) else page + 1 for page in range(NUM_PAGES)]
    assert region[::PAGE].tolist() == first_bytes(fd) == expected
    holes.bring_back(fd, [(2 * PAGE, 4 * PAGE)], NUM_PAGES * PAGE)
    assert holes.missing_bytes(fd, NUM_PAGES * PAGE) == 0


def test_range_behind_the_region_is_cut_off(fd: int) -> None:
    """A range may reach beyond the region's end, as the last block's padding does, and is cut there."""
    num_bytes = NUM_PAGES * PAGE

    holes.give_back(fd, [((NUM_PAGES - 1) * PAGE, (NUM_PAGES + 2) * PAGE)], num_bytes)
    assert holes.missing_bytes(fd, num_bytes) == PAGE
    holes.bring_back(fd, [((NUM_PAGES - 1) * PAGE, (NUM_PAGES + 2) * PAGE)], num_bytes)

    assert os.fstat(fd).st_size == num_bytes
    assert holes.missing_bytes(fd, num_bytes) == 0


def test_region_may_end_amid_a_page(fd: int) -> None:
    """If a file ends within a page, it is mapped up to its end, and its last page counts as a whole one."""
    num_bytes = 2 * PAGE + 904
    os.ftruncate(fd, num_bytes)

    holes.give_back(fd, [(PAGE, 3 * PAGE)], num_bytes)

    assert holes.missing_bytes(fd, num_bytes) == 2 * PAGE
    assert first_bytes(fd, 3) == [1, 0, 0]
    holes.bring_back(fd, [(PAGE, 3 * PAGE)], num_bytes)
    assert holes.missing_bytes(fd, num_bytes) == 0
    assert os.fstat(fd).st_size == num_bytes


def test_nothing_to_give_back_touches_nothing(fd: int) -> None:
    """Without a range nothing is mapped."""
    holes.give_back(fd, [], NUM_PAGES * PAGE)

    assert holes.missing_bytes(fd, NUM_PAGES * PAGE) == 0


def test_what_a_mover_brings_back_meanwhile_is_given_back_again(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a mover brings pages back while they are given back, they are given back again until it stops."""
    chunks = [4 * PAGE]
    missing_bytes = holes.missing_bytes

    def missing_after_a_chunk(fd: int, region_bytes: int) -> int:
        while chunks:
            cpu.allocate(fd, chunks.pop(), PAGE)
        return missing_bytes(fd, region_bytes)

    monkeypatch.setattr(holes, "missing_bytes", missing_after_a_chunk)

    holes.give_back(fd, [(2 * PAGE, 6 * PAGE)], NUM_PAGES * PAGE)

    assert missing_bytes(fd, NUM_PAGES * PAGE) == 4 * PAGE
