"""Own how messages of answers become records; which answer belongs to which call is `calls`' business."""

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import cache as once
from typing import Any, Final, TypeVar

import numpy as np

from kvlease.options import CacheOptions
from kvlease.plan import CachePlan
from kvlease.replies import (
    CacheInfo,
    CacheStats,
    Event,
    Explanation,
    GhostStats,
    Inspection,
    LeaseInfo,
    MagazineInfo,
    Miss,
    PinInfo,
    PoolStats,
    Stats,
    TenantInfo,
    TierInfo,
    WaitingInfo,
    WorkerInfo,
)
from kvlease.v1 import kvlease_pb2 as pb

R = TypeVar("R")

_OUR_OWN: Final = frozenset({"refusal"})
"""Fields that no message has; the client itself fills them if there is no answer."""


@once
def reader(record: Callable[..., R]) -> Callable[[Any], R]:
    """Return a function that makes a `record` from a message whose fields have the same names."""
    every = fields(record)  # type: ignore[arg-type]  # every record is a dataclass
    names = tuple(field.name for field in every if field.name not in _OUR_OWN)
    return lambda message: record(**{name: getattr(message, name) for name in names})


def itself(reply: R) -> R:
    """Return an answer as it came."""
    return reply


def forked(reply: pb.ForkResponse) -> pb.ReserveResponse:
    """Return the lease that a fork granted."""
    return reply.lease


def is_released(reply: pb.ReleaseResponse | pb.UnpinResponse) -> bool:
    """Tell whether there was something to release."""
    return reply.released


def info(message: pb.CacheInfo) -> CacheInfo:
    """Return a registered cache."""
    return CacheInfo(
        cache=message.cache,
        status=message.status,
        bytes_populated=message.bytes_populated,
        num_workers=message.num_workers,
        plan=CachePlan.from_proto(message.plan),
        options=CacheOptions.from_proto(message.options),
        tiers=tuple(map(reader(TierInfo), message.tiers)),
        is_draining=message.is_draining,
        longest_request_tokens=message.longest_request_tokens,
    )


def stats(reply: pb.StatsResponse) -> Stats:
    """Return all caches at one instant."""
    return Stats(
        epoch=reply.epoch,
        caches=tuple(map(_cache_stats, reply.caches)),
        is_draining=reply.is_draining,
        is_stopping=reply.is_stopping,
    )


def _cache_stats(message: pb.CacheStats) -> CacheStats:
    return CacheStats(
        cache=message.cache,
        pools=tuple(map(reader(PoolStats), message.pools)),
        num_leases=message.num_leases,
        num_waiting=message.num_waiting,
        num_workers=message.num_workers,
        counters=dict(message.counters),
        ghosts=tuple(map(reader(GhostStats), message.ghosts)),
    )


def inspection(reply: pb.InspectResponse) -> Inspection:
    """Return one page of a list."""
    return Inspection(
        num_total=reply.num_total,
        workers=tuple(map(reader(WorkerInfo), reply.workers)),
        leases=tuple(_lease(lease) for lease in reply.leases),
        pins=tuple(map(reader(PinInfo), reply.pins)),
        waiting=tuple(map(reader(WaitingInfo), reply.waiting)),
        tenants=tuple(map(reader(TenantInfo), reply.tenants)),
        magazines=tuple(map(_magazine, reply.magazines)),
    )


def explanation(reply: pb.ExplainResponse) -> Explanation:
    """Return where the tokens of a lease's prefix came from."""
    return Explanation(
        lease_id=reply.lease_id,
        num_tokens=reply.num_tokens,
        hit_tokens=dict(reply.hit_tokens),
        misses=misses(reply.misses),
    )


def misses(found: Iterable[pb.Miss]) -> tuple[Miss, ...]:
    """Return which parts of a prefix were not found, and why."""
    return tuple(_miss(one) for one in found)


def event(message: pb.WatchResponse) -> Event:
    """Return one event."""
    read: Event = reader(Event)(message)
    snapshot = _cache_stats(message.snapshot) if message.HasField("snapshot") else None
    return replace(read, snapshot=snapshot)


def _lease(message: pb.LeaseInfo) -> LeaseInfo:
    read: LeaseInfo = reader(LeaseInfo)(message)
    return read if message.HasField("age_ms") else replace(read, age_ms=None)


def _magazine(message: pb.MagazineInfo) -> MagazineInfo:
    read: MagazineInfo = reader(MagazineInfo)(message)
    worker_ids = tuple(np.frombuffer(message.worker_ids, "<i8").tolist())
    return replace(
        read, worker_ids=worker_ids, age_ms=message.age_ms if message.HasField("age_ms") else None
    )


def _miss(message: pb.Miss) -> Miss:
    read: Miss = reader(Miss)(message)
    return read if message.HasField("age_ms") else replace(read, age_ms=None)
