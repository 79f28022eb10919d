"""kvlease: reserve, map, evict and reload KV-cache blocks of a per-node daemon.

The public surface is `__all__`. Names load when they are first used, so that importing the package costs
next to nothing and never brings in torch, grpc or a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvlease.aio import AsyncClient, AsyncWorker
    from kvlease.client import Client
    from kvlease.errors import (
        BusyError,
        CacheInUseError,
        CopyFailedError,
        DeadlineError,
        DrainingError,
        IdReusedError,
        InternalError,
        InvalidError,
        KVLeaseError,
        LayoutMismatchError,
        NeverFitsError,
        NotYoursError,
        PoolFullError,
        RefusedError,
        StaleEpochError,
        StaleError,
        StartingError,
        TooLargeError,
        UnavailableError,
        UnknownCacheError,
        UnknownLeaseError,
        UnknownWorkerError,
        WrongStateError,
    )
    from kvlease.keys import BlockKeys
    from kvlease.lease import AsyncLease, Lease
    from kvlease.plan import CachePlan, LayerPlacement, PlanInputs
    from kvlease.replies import (
        CacheInfo,
        CacheStats,
        Committed,
        Event,
        Evicted,
        Found,
        Pinned,
        PoolStats,
        Reloaded,
        ReserveSpec,
        Stats,
        StepColumns,
    )
    from kvlease.spec import FullAttention, LayerSpec
    from kvlease.tables import RowTable
    from kvlease.worker import Worker

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncWorker",
    "BlockKeys",
    "BusyError",
    "CacheInUseError",
    "CacheInfo",
    "CachePlan",
    "CacheStats",
    "Client",
    "Committed",
    "CopyFailedError",
    "DeadlineError",
    "DrainingError",
    "Event",
    "Evicted",
    "Found",
    "FullAttention",
    "IdReusedError",
    "InternalError",
    "InvalidError",
    "KVLeaseError",
    "LayerPlacement",
    "LayerSpec",
    "LayoutMismatchError",
    "Lease",
    "NeverFitsError",
    "NotYoursError",
    "Pinned",
    "PlanInputs",
    "PoolFullError",
    "PoolStats",
    "RefusedError",
    "Reloaded",
    "ReserveSpec",
    "RowTable",
    "StaleEpochError",
    "StaleError",
    "StartingError",
    "Stats",
    "StepColumns",
    "TooLargeError",
    "UnavailableError",
    "UnknownCacheError",
    "UnknownLeaseError",
    "UnknownWorkerError",
    "Worker",
    "WrongStateError",
]

_HOMES: Final = {
    "kvlease.aio": ("AsyncClient", "AsyncWorker"),
    "kvlease.client": ("Client",),
    "kvlease.keys": ("BlockKeys",),
    "kvlease.lease": ("AsyncLease", "Lease"),
    "kvlease.plan": ("CachePlan", "LayerPlacement", "PlanInputs"),
    "kvlease.replies": (
        "CacheInfo", "CacheStats", "Committed", "Event", "Evicted", "Found", "Pinned", "PoolStats", "Reloaded",
        "ReserveSpec", "Stats", "StepColumns",
    ),
    "kvlease.spec": ("FullAttention", "LayerSpec"),
    "kvlease.tables": ("RowTable",),
    "kvlease.worker": ("Worker",),
}  # fmt: skip
"""Where each name lives, but for the errors."""


def __getattr__(name: str) -> Any:
    """Load a public name on its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "kvlease.errors")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
