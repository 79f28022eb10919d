"""Own the check whether a host pool's files were cut off or deleted: the daemon hears of neither otherwise.

Only files in `host_dir` can be, by somebody who may write there. Bytes behind a new end are lost, even if the file is
made longer again; nothing may rely on such a pool. A deleted file keeps its bytes for as long as this container lives.
"""

import os
from collections.abc import Mapping
from typing import Final

import structlog

from kvleased.caches.entries import CacheEntry
from kvleased.core.effects import Tier
from kvleased.memory.regions import HOST, HOST_RECORDS
from kvleased.movers.protocol import Status

CUT_OFF: Final = Status(
    is_on=False,
    reason="its file in host_dir was truncated, and what was in it is lost; delete the cache and register it again",
)
_LOG = structlog.get_logger()


def is_cut_off(entry: CacheEntry) -> bool:
    """Tell whether a cache's host pool was found cut off before."""
    return entry.stores.get(Tier.HOST) is CUT_OFF


def look(entry: CacheEntry, *, is_in_files: bool) -> bool:
    """Look at a cache's host pool; tell whether its file was cut off since the last look, and note a deleted one.

    `is_in_files` tells whether it lies in files of `host_dir`: memory without a file always looks deleted.
    """
    if HOST not in entry.fds or is_cut_off(entry):
        return False
    if is_in_files and not entry.is_host_deleted:
        entry.is_host_deleted = _is_deleted(entry.fds)
        if entry.is_host_deleted:
            _LOG.warning(
                "host_file_deleted",
                cache=entry.name,
                advice="the pool is used on, but a restart of the container loses its blocks; to have a pool that "
                "outlives it, delete the cache and register it again",
            )
    try:
        num_bytes = os.fstat(entry.fds[HOST]).st_size
    except OSError:
        return False  # a failed fstat says nothing about the file
    if num_bytes >= entry.plan.host_bytes:
        return False
    _LOG.error(
        "host_file_cut_off",
        cache=entry.name,
        bytes=num_bytes,
        of_bytes=entry.plan.host_bytes,
        advice="delete the cache and register it again",
    )
    return True


def _is_deleted(fds: Mapping[str, int]) -> bool:
    """Tell whether one of the pool's two files has no name any more: the next life needs both."""
    try:
        return not all(os.fstat(fds[kind]).st_nlink for kind in (HOST, HOST_RECORDS))
    except OSError:
        return False
