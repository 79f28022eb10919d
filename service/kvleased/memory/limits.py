"""Own how much memory and disk the daemon may use, and how much memory is used."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 writes a number near 2**63 if there is no limit."""


def memory_limit_bytes(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the smallest of the machine's memory and the limits of this process's cgroups, v1 or v2."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files(cgroup_root, membership):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            limits.append(int(text))
    return min(limits)


def memory_used(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> tuple[int, int]:
    """Return the used and the allowed bytes where the least is left: in a cgroup of this process, or in the machine.

    Memory that the kernel can drop without harm does not count: pages of files that nobody has touched for a while.
    """
    pairs = [_machine()]
    for path in _limit_files(cgroup_root, membership):
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text())
            if limit < _UNLIMITED_BYTES:
                pairs.append((_used(path), limit))
    return min(pairs, key=lambda pair: pair[1] - pair[0])


def _machine() -> tuple[int, int]:
    """Return the used bytes and all bytes of the machine."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total - available, total


def _used(limit_file: Path) -> int:
    is_new = limit_file.name == "memory.max"
    current = "memory.current" if is_new else "memory.usage_in_bytes"
    idle = "inactive_file " if is_new else "total_inactive_file "
    used = int(limit_file.with_name(current).read_text())
    for line in limit_file.with_name("memory.stat").read_text().splitlines():
        if line.startswith(idle):
            used -= int(line.removeprefix(idle))
    return max(0, used)


def disk_limit_bytes(where: Path | int) -> int:
    """Return the bytes that all disk stores may take if no limit is set: 80 % of the file system of a path or file.

    Raises:
        OSError: the file system does not say how large it is.
    """
    found = os.statvfs(where)
    return found.f_blocks * found.f_frsize * 4 // 5


def _limit_files(cgroup_root: Path, membership: Path) -> Iterator[Path]:
    """Yield the files in which a limit may be: of this process's cgroup and each of its parents, for both versions."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for entry in lines:
        hierarchy, _, rest = entry.partition(":")
        controllers, _, inner = rest.partition(":")
        if hierarchy == "0":
            bases, name = [cgroup_root, cgroup_root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            bases, name = [cgroup_root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's and not exist; then the root is the container's own cgroup.
        own = Path(inner.lstrip("/"))
        for base in bases:
            for folder in (own, *own.parents):
                yield base / folder / name
