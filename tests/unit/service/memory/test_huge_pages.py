"""Memory has huge pages where the kernel is set to give them, and is populated alike where it is not."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvleased.memory import cpu, huge_pages

HUGE_BYTES = 2 << 20
REGION_BYTES = 3 * HUGE_BYTES + 5000


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for the kernel's settings, which other processes' memory follows, too."""
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    return tmp_path


@pytest.fixture
def fd() -> Iterator[int]:
    """Memory without any page, whose last page is not whole."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, REGION_BYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("overall", "by_size", "are_allowed"),
    [
        ("always within_size [advise] never deny force", [], True),
        ("[always] within_size advise never deny force", [], True),
        ("always within_size advise [never] deny force", [], False),
        ("always within_size advise [never] deny force", ["always [inherit] advise never"], False),
        ("always within_size advise [never] deny force", ["always inherit [advise] never"], True),
        ("always within_size [advise] never deny force", ["always inherit advise [never]"], False),
        ("always within_size [advise] never deny force", ["always [inherit] advise never"], True),
        ("always within_size advise never [deny] force", ["[always] inherit advise never"], False),
        ("", [], False),
    ],
)
def test_kernels_settings_tell_whether_memory_may_have_huge_pages(
    settings: Path, fd: int, overall: str, by_size: list[str], *, are_allowed: bool
) -> None:
    """The setting of a size counts, or the one for all sizes where it says so."""
    if overall:
        (settings / "shmem_enabled").write_text(overall)
    for number, text in enumerate(by_size):
        (settings / f"hugepages-{64 << number}kB").mkdir()
        (settings / f"hugepages-{64 << number}kB" / "shmem_enabled").write_text(text)

    assert (huge_pages.mapping_for(fd, REGION_BYTES) is not None) == are_allowed


@pytest.mark.parametrize(
    "num_bytes", [0, 1 << 50], ids=["nothing", "more than there are addresses"]
)
def test_what_cannot_be_mapped_is_made_without(settings: Path, fd: int, num_bytes: int) -> None:
    """An empty region has no page to map, and one that finds no room among the addresses is made in small pages."""
    (settings / "shmem_enabled").write_text("[advise]")
    os.ftruncate(fd, num_bytes)

    assert huge_pages.mapping_for(fd, num_bytes) is None


def test_file_follows_its_mount_alone(settings: Path, tmp_path: Path) -> None:
    """A file on a mount that has no huge pages gets none, whatever is set for other memory."""
    (settings / "shmem_enabled").write_text("[always]")
    (tmp_path / "region").write_bytes(b"\0" * REGION_BYTES)

    with (tmp_path / "region").open("r+b") as file:
        assert huge_pages.mapping_for(file.fileno(), REGION_BYTES) is None


def test_populating_makes_each_page_once_and_changes_none(settings: Path, fd: int) -> None:
    """Memory that is made through a mapping is whole, ends with the region, and keeps what was written."""
    (settings / "shmem_enabled").write_text("[advise]")
    os.pwrite(fd, b"kept", HUGE_BYTES + 5000)

    chunks = list(cpu.populate_chunks(fd, REGION_BYTES, HUGE_BYTES))

    assert chunks == [HUGE_BYTES] * 3 + [5000]
    assert os.fstat(fd).st_blocks * 512 == 3 * HUGE_BYTES + 8192
    assert os.pread(fd, 4, HUGE_BYTES + 5000) == b"kept"
    assert not np.frombuffer(os.pread(fd, HUGE_BYTES, 0), np.uint8).any()


def test_populated_memory_lies_in_huge_pages(fd: int) -> None:
    """Where the kernel gives huge pages, all whole ones of a region are such, and no page lies behind its end."""
    if huge_pages.mapping_for(fd, REGION_BYTES) is None:
        pytest.skip("the kernel is set to give memory no huge pages")

    list(cpu.populate_chunks(fd, REGION_BYTES, HUGE_BYTES))
    region = cpu.map_region(fd, REGION_BYTES)
    region[:: 1 << 12] = 7

    assert os.fstat(fd).st_blocks * 512 == 3 * HUGE_BYTES + 8192
    assert _mapped_in_huge_pages(region) == 3 * HUGE_BYTES


def _mapped_in_huge_pages(region: np.ndarray) -> int:
    """Return the bytes of a mapping that this process's page table holds as huge pages."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            is_it = start <= region.ctypes.data < end
        elif is_it and first == "ShmemPmdMapped:":
            return int(line.split()[1]) * 1024
    return 0
