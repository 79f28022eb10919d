"""kvlease: reserve, map, evict and reload KV-cache blocks of a per-node daemon.

The public surface is `__all__`. Names load when they are first used, so that importing the package costs
next to nothing and never brings in torch, grpc or a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvlease.aio import AsyncClient
    from kvlease.aio_worker import AsyncWorker
    from kvlease.client import Client
    from kvlease.credentials import Credentials
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
        StaleRevisionError,
        StartingError,
        TooLargeError,
        UnavailableError,
        UnknownCacheError,
        UnknownLeaseError,
        UnknownWorkerError,
        WrongStateError,
    )
    from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
    from kvlease.items import ContextItem, EmbeddedSpan
    from kvlease.keys import BlockKeys, KeyChain
    from kvlease.layout import Layout
    from kvlease.lease import AsyncLease, Lease
    from kvlease.magazine import AsyncMagazine, Magazine
    from kvlease.operating import (
        Cleared,
        Deleted,
        Drained,
        DrainedCache,
        Resized,
        TenantLimits,
        TenantRule,
    )
    from kvlease.options import CacheOptions
    from kvlease.plan import (
        BackendInputs,
        CachePlan,
        EngineInputs,
        Extent,
        GroupPlan,
        LayerPlacement,
        ParallelInputs,
        PlanInputs,
        RankInputs,
        RankPlan,
        TensorPlan,
        Waste,
    )
    from kvlease.plan_report import Equation, ExplainedPlan, PlanOutcome, PlanReport, WhatIf
    from kvlease.replies import (
        CacheInfo,
        CacheStats,
        Committed,
        Event,
        Evicted,
        Explanation,
        Found,
        GhostStats,
        Inspection,
        LeaseInfo,
        MagazineInfo,
        Miss,
        PinInfo,
        Pinned,
        PoolStats,
        Reloaded,
        ReserveSpec,
        Stats,
        StepColumns,
        TenantInfo,
        TierInfo,
        WaitingInfo,
        WorkerInfo,
    )
    from kvlease.spec import (
        MLA,
        ChunkedLocal,
        CrossAttention,
        EncoderOnly,
        FullAttention,
        HiddenState,
        LayerSpec,
        RetainedWindow,
        RingState,
        SinkAttention,
        SlidingWindow,
        SlidingWindowMLA,
        StateSpace,
    )
    from kvlease.tables import RowTable
    from kvlease.traces import TracedRequest
    from kvlease.worker import Worker

__all__ = [
    "MLA",
    "AsyncClient",
    "AsyncLease",
    "AsyncMagazine",
    "AsyncWorker",
    "BackendInputs",
    "BlockKeys",
    "BusyError",
    "CacheInUseError",
    "CacheInfo",
    "CacheOptions",
    "CachePlan",
    "CacheStats",
    "ChunkedLocal",
    "Cleared",
    "Client",
    "Committed",
    "ContextItem",
    "CopyFailedError",
    "Credentials",
    "CrossAttention",
    "DeadlineError",
    "Deleted",
    "Drained",
    "DrainedCache",
    "DrainingError",
    "EmbeddedSpan",
    "EncoderOnly",
    "EngineInputs",
    "Equation",
    "Event",
    "Evicted",
    "ExchangeOrder",
    "Exchanged",
    "ExplainedPlan",
    "Explanation",
    "Extent",
    "Found",
    "FullAttention",
    "GhostStats",
    "GroupPlan",
    "HiddenState",
    "IdReusedError",
    "Inspection",
    "InternalError",
    "InvalidError",
    "Inventory",
    "KVLeaseError",
    "KeyChain",
    "LayerPlacement",
    "LayerSpec",
    "Layout",
    "LayoutMismatchError",
    "Lease",
    "LeaseInfo",
    "Magazine",
    "MagazineInfo",
    "Miss",
    "NeverFitsError",
    "NotYoursError",
    "ParallelInputs",
    "PinInfo",
    "Pinned",
    "PlanInputs",
    "PlanOutcome",
    "PlanReport",
    "PoolFullError",
    "PoolStats",
    "RankInputs",
    "RankPlan",
    "RefusedError",
    "Reloaded",
    "ReserveSpec",
    "Resized",
    "RetainedWindow",
    "RingState",
    "RowTable",
    "SinkAttention",
    "SlidingWindow",
    "SlidingWindowMLA",
    "StaleEpochError",
    "StaleError",
    "StaleRevisionError",
    "StartingError",
    "StateSpace",
    "Stats",
    "StepColumns",
    "TenantInfo",
    "TenantLimits",
    "TenantRule",
    "TensorPlan",
    "TierInfo",
    "TooLargeError",
    "TracedRequest",
    "UnavailableError",
    "UnknownCacheError",
    "UnknownLeaseError",
    "UnknownWorkerError",
    "WaitingInfo",
    "Waste",
    "WhatIf",
    "Worker",
    "WorkerInfo",
    "WrongStateError",
]

_HOMES: Final = {
    "kvlease.aio": ("AsyncClient",),
    "kvlease.aio_worker": ("AsyncWorker",),
    "kvlease.client": ("Client",),
    "kvlease.exchanges": ("ExchangeOrder", "Exchanged", "Inventory"),
    "kvlease.items": ("ContextItem", "EmbeddedSpan"),
    "kvlease.keys": ("BlockKeys", "KeyChain"),
    "kvlease.lease": ("AsyncLease", "Lease"),
    "kvlease.layout": ("Layout",),
    "kvlease.magazine": ("AsyncMagazine", "Magazine"),
    "kvlease.credentials": ("Credentials",),
    "kvlease.operating": (
        "Cleared", "Deleted", "Drained", "DrainedCache", "Resized", "TenantLimits", "TenantRule",
    ),
    "kvlease.options": ("CacheOptions",),
    "kvlease.plan": (
        "BackendInputs", "CachePlan", "EngineInputs", "Extent", "GroupPlan", "LayerPlacement", "ParallelInputs",
        "PlanInputs", "RankInputs", "RankPlan", "TensorPlan", "Waste",
    ),
    "kvlease.plan_report": (
        "Equation", "ExplainedPlan", "PlanOutcome", "PlanReport", "WhatIf",
    ),
    "kvlease.replies": (
        "CacheInfo", "CacheStats", "Committed", "Event", "Evicted", "Explanation", "Found", "GhostStats",
        "Inspection", "LeaseInfo", "MagazineInfo", "Miss", "PinInfo", "Pinned", "PoolStats", "Reloaded",
        "ReserveSpec", "Stats", "StepColumns", "TenantInfo", "TierInfo", "WaitingInfo", "WorkerInfo",
    ),
    "kvlease.spec": (
        "MLA", "ChunkedLocal", "CrossAttention", "EncoderOnly", "FullAttention", "HiddenState", "LayerSpec",
        "RetainedWindow", "RingState", "SinkAttention", "SlidingWindow", "SlidingWindowMLA", "StateSpace",
    ),
    "kvlease.tables": ("RowTable",),
    "kvlease.traces": ("TracedRequest",),
    "kvlease.worker": ("Worker",),
}  # fmt: skip
"""The module that each public name lives in; names that are not listed are errors and live in `kvlease.errors`."""


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
