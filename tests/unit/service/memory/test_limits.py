"""The memory limit is the least of all that apply."""

import os
from pathlib import Path

import pytest

from kvleased.memory.limits import memory_limit_bytes, memory_used

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "limit_bytes"),
    [
        pytest.param(
            "0::/a/b\n",
            {"a/memory.max": f"{8 * MIB}\n", "a/b/memory.max": "max\n"},
            8 * MIB,
            id="v2 parent",
        ),
        pytest.param("0::/gone\n", {"memory.max": f"{9 * MIB}\n"}, 9 * MIB, id="v2 container"),
        pytest.param("0::/a\n", {"unified/a/memory.max": f"{7 * MIB}\n"}, 7 * MIB, id="hybrid"),
        pytest.param(
            "4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": f"{6 * MIB}\n"},
            6 * MIB,
            id="v1",
        ),
        pytest.param(
            "4:cpu,memory:/x\n",
            {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"},
            MACHINE,
            id="v1 unlimited",
        ),
        pytest.param("0::/\n", {"memory.max": "max\n"}, MACHINE, id="v2 unlimited"),
    ],
)
def test_limit_is_the_least_that_applies(
    tmp_path: Path, membership: str, files: dict[str, str], limit_bytes: int
) -> None:
    """A limit counts wherever it is set: at the process's own cgroup, at a parent, or at a container's root."""
    _write(tmp_path, files)
    (tmp_path / "self").write_text(membership)

    assert memory_limit_bytes(tmp_path, tmp_path / "self") == limit_bytes


def test_machine_is_the_limit_where_there_are_no_cgroups(tmp_path: Path) -> None:
    """Without cgroups the machine's memory is the limit."""
    assert memory_limit_bytes(tmp_path, tmp_path / "missing") == MACHINE


def a_cgroup(root: Path, *, version: int) -> Path:
    """Make a cgroup that may use 1000 bytes and uses 700, of which the kernel can drop 200."""
    folder = root / ("pod" if version == 2 else "memory/pod")
    folder.mkdir(parents=True)
    files = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    (folder / files[0]).write_text("1000\n")
    (folder / files[1]).write_text("700\n")
    (folder / "memory.stat").write_text(f"anon 400\n{files[2]} 200\nactive_file 100\n")
    membership = root / "membership"
    membership.write_text("0::/pod\n" if version == 2 else "4:memory:/pod\n")
    return membership


@pytest.mark.parametrize("version", [1, 2])
def test_use_is_told_where_least_is_left(tmp_path: Path, version: int) -> None:
    """If a cgroup has less left than the machine, its use counts, without what the kernel can drop."""
    membership = a_cgroup(tmp_path, version=version)

    assert memory_used(tmp_path, membership) == (500, 1000)


def test_use_of_the_machine_is_told_where_nothing_limits(tmp_path: Path) -> None:
    """Without a limit that can be read, the machine's own memory counts."""
    membership = a_cgroup(tmp_path, version=2)
    (tmp_path / "pod" / "memory.max").write_text("max\n")

    used, limit = memory_used(tmp_path, membership)

    assert 0 < used < limit
    assert limit > 1 << 20
    assert memory_used(tmp_path, tmp_path / "nothing")[1] == limit
