"""Own the check whether a host pool's file was cut off: then nothing may rely on it.

Only files in `host_dir` can be cut off, by somebody who may write there. The bytes behind the new end are lost, even if
the file is made longer again.
"""

import os
from typing import Final

import structlog

from kvleased.caches.registry import CacheEntry
from kvleased.core.effects import Tier
from kvleased.memory.regions import HOST
from kvleased.movers.protocol import Status

CUT_OFF: Final = Status(
    is_on=False,
    reason="its file in host_dir was truncated, and what was in it is lost; delete the cache and register it again",
)
_LOG = structlog.get_logger()


def is_cut_off(entry: CacheEntry) -> bool:
    """Tell whether a cache's host pool was found cut off before."""
    return entry.stores.get(Tier.HOST) is CUT_OFF


def look(entry: CacheEntry) -> bool:
    """Look at the file of a cache's host pool; tell whether it was cut off since the last look."""
    fd = entry.fds.get(HOST)
    if fd is None or is_cut_off(entry):
        return False
    try:
        num_bytes = os.fstat(fd).st_size
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
