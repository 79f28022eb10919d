"""Own whether the kernel gives a region huge pages, and the mapping that asks for them.

A huge page is one entry of a page table where small ones are hundreds. So memory of huge pages is made and mapped in a
fraction of the time, its page tables take next to nothing, and copies miss fewer translations. Without any, all works
as well. In memory for which the kernel is set to `advise`, only a mapping gets them, which must ask; where it always
gives them, one that is asked for through a file may reach beyond the file's end, but none through a mapping does.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvleased.system.mounts import mount_of

_SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")
_ALLOWING: Final = {"always", "within_size", "advise", "force"}


def mapping_for(fd: int, num_bytes: int) -> NDArray[np.uint8] | None:
    """Map a region so that pages made by touching them may be huge.

    None if the kernel gives this file none, or if there is nothing to map or no room for it.
    """
    if not num_bytes or not _are_allowed(fd):
        return None
    try:
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)
    except OSError:
        return None
    mapping.madvise(mmap.MADV_DONTDUMP)
    with suppress(OSError):  # a kernel without huge pages of this kind refuses
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _are_allowed(fd: int) -> bool:
    mount = mount_of(os.fstat(fd).st_dev)
    if mount is not None:
        return mount.kind == "tmpfs" and mount.options.get("huge") in _ALLOWING
    overall = _chosen(_SETTINGS / "shmem_enabled")
    by_size = {_chosen(path) for path in _SETTINGS.glob("hugepages-*kB/shmem_enabled")}
    chosen = {overall if one == "inherit" else one for one in by_size or {"inherit"}}
    return overall != "deny" and not chosen.isdisjoint(_ALLOWING)


def _chosen(setting: Path) -> str:
    """Return the chosen one of a setting's words, which the kernel puts into brackets; "" if there is no setting."""
    try:
        return setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
