"""Own how long the blocks of a lease stay cached: by the class that it gives them, which `eviction.classes` heeds.

A restart forgets the classes: blocks committed before it are normal after it. Blocks that a fork computes are normal.
"""

from math import inf
from typing import Final

from kvlease.errors import InvalidError
from kvleased.core.commands import Reserve
from kvleased.core.eviction.classes import HIGH, LOW, NORMAL
from kvleased.core.ids import Ids
from kvleased.core.lease.leases import Lease
from kvleased.core.lease.phases import Phase
from kvleased.core.state import CacheState

_CLASSES: Final = (LOW, NORMAL, HIGH)
"""The class that each priority stands for."""
PRIORITY_NORMAL: Final = _CLASSES.index(NORMAL)


def check_class(state: CacheState, command: Reserve) -> None:
    """Refuse a class or a time that makes no sense; the first class that is not normal puts classes into effect."""
    highest, retain_priority = len(_CLASSES) - 1, command.retain_priority
    if not 0 <= command.priority <= highest:
        msg = f"priority is {command.priority}; it must be from 0 to {highest}"
        raise InvalidError(msg, resource="priority", need=command.priority, limit=highest)
    if retain_priority is not None and not LOW <= retain_priority <= HIGH:
        msg = f"retain_priority is {retain_priority}; it must be from {LOW} to {HIGH}"
        raise InvalidError(msg, resource="retain_priority", need=retain_priority, limit=HIGH)
    if command.retain_seconds < 0:
        msg = f"retain_seconds is {command.retain_seconds}; it must be at least 0"
        raise InvalidError(msg, resource="retain_seconds", need=command.retain_seconds)
    if class_of(command) != NORMAL and not state.device.has_classes:
        state.device.begin_classes()


def class_of(request: Reserve) -> int:
    """Return the class that a request gives its blocks: its `retain_priority`, or that of its priority."""
    if request.retain_priority is not None:
        return request.retain_priority
    return _CLASSES[request.priority]


def keep_class(state: CacheState, lease: Lease, entries: Ids) -> None:
    """Give the lease's class to blocks that it is about to let go of, unless they have a higher one."""
    owners = state.device.owners
    assert owners is not None, "classes are kept beside the owners"
    if lease.phase is Phase.EVICTED:
        return
    blocks = lease.moving_to if lease.phase is Phase.RELOADING else entries
    request = lease.request
    if not isinstance(request, Reserve):
        owners.order.raise_to(blocks, NORMAL, inf)
    else:
        owners.order.raise_to(blocks, class_of(request), request.retain_seconds or inf)
