"""Own how each verb becomes a request and what its answer means; sending is the clients' business.

An `Ask` is one call, complete but for what its caller adds: token, epoch, idempotency key and deadline.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache as once
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import ArrayLike, NDArray

from kvlease._checks import given
from kvlease.errors import InvalidError
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import ExplainedPlan, PlanReport, WhatIf
from kvlease.replies import (
    CacheInfo,
    CacheStats,
    Committed,
    Event,
    Evicted,
    Found,
    Inspection,
    LeaseInfo,
    PinInfo,
    Pinned,
    PoolStats,
    Reloaded,
    ReserveSpec,
    Stats,
    WorkerInfo,
)
from kvlease.v1 import kvlease_pb2 as pb

R = TypeVar("R")

KEYED: Final = frozenset(
    {
        "register_cache",
        "delete_cache",
        "reserve",
        "extend",
        "commit",
        "evict",
        "reload",
        "release",
        "pin",
        "unpin",
        "step",
    }
)
"""Verbs that carry an idempotency key, so that a retry is answered as the first try was."""


class Ask(NamedTuple, Generic[R]):
    """One call and how to read its answer; a tuple, because one is made per call of the hot path."""

    verb: str
    request: Message
    read: Callable[[Any], R]
    wait_ms: int = 0
    """Milliseconds that the daemon may wait, which come on top of the caller's deadline."""
    cache: str = ""
    """The cache that an operator means."""


def plan(inputs: PlanInputs) -> Ask[CachePlan]:
    """Ask for a plan."""
    return _ask(
        "plan",
        lambda: pb.PlanRequest(inputs=inputs.to_proto()),
        lambda reply: CachePlan.from_proto(reply.plan),
    )


def explain(inputs: PlanInputs, changes: Sequence[str]) -> Ask[ExplainedPlan]:
    """Ask for a plan with its equations, and for what changes would change."""
    return _ask(
        "plan",
        lambda: pb.PlanRequest(inputs=inputs.to_proto(), report=True, what_if=changes),
        lambda reply: ExplainedPlan(
            plan=CachePlan.from_proto(reply.plan),
            report=PlanReport.from_proto(reply.report),
            what_ifs=tuple(map(WhatIf.from_proto, reply.what_ifs)),
        ),
    )


def register(cache: str, inputs: PlanInputs, integrity: str) -> Ask[CacheInfo]:
    """Ask for a cache to be created or found."""
    return _ask(
        "register_cache",
        lambda: pb.RegisterCacheRequest(cache=cache, inputs=inputs.to_proto(), integrity=integrity),
        lambda reply: _info(reply.info),
    )


def get_cache(cache: str) -> Ask[CacheInfo]:
    """Ask about one cache."""
    return _ask(
        "get_cache",
        lambda: pb.GetCacheRequest(**given(cache=cache)),
        lambda reply: _info(reply.info),
    )


def list_caches() -> Ask[tuple[CacheInfo, ...]]:
    """Ask about all caches."""
    return _ask(
        "list_caches",
        pb.ListCachesRequest,
        lambda reply: tuple(_info(info) for info in reply.caches),
    )


def delete_cache(cache: str) -> Ask[None]:
    """Ask for a cache to be freed."""
    return _ask("delete_cache", lambda: pb.DeleteCacheRequest(**given(cache=cache)), lambda _: None)


def stats(cache: str) -> Ask[Stats]:
    """Ask for a snapshot."""
    return _ask("stats", lambda: pb.StatsRequest(**given(cache=cache)), _stats)


def inspect(cache: str, what: str, limit: int, after_id: int) -> Ask[Inspection]:
    """Ask for a page of the workers, leases or pins of a cache."""
    return _ask(
        "inspect",
        lambda: pb.InspectRequest(**given(cache=cache, what=what, limit=limit, after_id=after_id)),
        _inspection,
    )


def watch(cache: str, after_sequence: int) -> Ask[None]:
    """Ask for events."""
    return _ask(
        "watch",
        lambda: pb.WatchRequest(**given(cache=cache, after_sequence=after_sequence)),
        lambda _: None,
    )


def lookup(keys: bytes, cache: str = "") -> Ask[Found]:
    """Ask how much of a prefix is cached."""
    return _ask("lookup", lambda: pb.LookupRequest(**given(keys=keys)), _reader(Found), cache=cache)


def pin(keys: bytes, cache: str = "") -> Ask[Pinned]:
    """Ask for cached blocks to be held."""
    return _ask("pin", lambda: pb.PinRequest(**given(keys=keys)), _reader(Pinned), cache=cache)


def unpin(pin_id: int, cache: str = "") -> Ask[bool]:
    """Ask for a pin to end."""
    return _ask("unpin", lambda: pb.UnpinRequest(**given(pin_id=pin_id)), _is_released, cache=cache)


def evict(
    *, lease_id: int = 0, keys: bytes = b"", num_blocks: int = 0, wait_ms: int = 0, cache: str = ""
) -> Ask[Evicted]:
    """Ask for blocks to leave the device pool."""
    return _ask(
        "evict",
        lambda: pb.EvictRequest(
            **given(lease_id=lease_id, keys=keys, num_blocks=num_blocks, wait_ms=wait_ms)
        ),
        _reader(Evicted),
        wait_ms=wait_ms,
        cache=cache,
    )


def reload_keys(keys: bytes, wait_ms: int, cache: str = "") -> Ask[Reloaded]:
    """Ask for blocks to come back by their keys."""
    return _ask(
        "reload",
        lambda: pb.ReloadRequest(**given(keys=keys, wait_ms=wait_ms)),
        _reader(Reloaded),
        wait_ms=wait_ms,
        cache=cache,
    )


def reload_lease(lease_id: int, wait_ms: int) -> Ask[pb.ReloadResponse]:
    """Ask for an evicted lease to come back."""
    return _ask(
        "reload",
        lambda: pb.ReloadRequest(**given(lease_id=lease_id, wait_ms=wait_ms)),
        _itself,
        wait_ms=wait_ms,
    )


def reserve(
    request_id: str, num_tokens: int, keys: bytes, wait_ms: int, token_ids: bytes
) -> Ask[pb.ReserveResponse]:
    """Ask for blocks for one request."""
    try:
        request = _reserve_request(request_id, num_tokens, keys, wait_ms, token_ids)
        return Ask("reserve", request, _itself, wait_ms)
    except _WRONG as error:
        raise InvalidError(f"reserve: {error}") from error


def map_row(lease_id: int) -> Ask[pb.MapResponse]:
    """Ask for a lease's row to be published."""
    return _ask("map", lambda: pb.MapRequest(**given(lease_id=lease_id)), _itself)


def extend(lease_id: int, num_tokens: int, wait_ms: int) -> Ask[pb.ExtendResponse]:
    """Ask for a lease to cover more tokens."""
    return _ask(
        "extend",
        lambda: pb.ExtendRequest(
            lease_id=lease_id, wait_ms=wait_ms, **given(num_tokens=num_tokens)
        ),
        _itself,
        wait_ms=wait_ms,
    )


def commit(lease_id: int, num_tokens: int, keys: bytes, first_block: int) -> Ask[Committed]:
    """Ask for full blocks to become findable."""
    return _ask(
        "commit",
        lambda: pb.CommitRequest(
            **given(lease_id=lease_id, num_tokens=num_tokens, keys=keys, first_block=first_block)
        ),
        _reader(Committed),
    )


def release(lease_id: int) -> Ask[bool]:
    """Ask for a lease to end."""
    return Ask("release", pb.ReleaseRequest(lease_id=lease_id), _is_released)


def heartbeat(lease_ids: bytes, newest_lease_id: int) -> Ask[NDArray[np.int64]]:
    """Renew an inventory; the answer is the ids that the daemon does not know."""
    return _ask(
        "heartbeat",
        lambda: pb.HeartbeatRequest(lease_ids=lease_ids, newest_lease_id=newest_lease_id),
        lambda reply: np.frombuffer(reply.unknown_lease_ids, "<i8"),
    )


def detach(worker_id: int = 0) -> Ask[int]:
    """End the calling worker, or as an operator another one; the answer is the number of leases that ended."""
    return _ask(
        "detach",
        lambda: pb.DetachRequest(worker_id=worker_id),
        lambda reply: int(reply.num_leases),
    )


def step(  # noqa: PLR0913 - one parameter a column
    *,
    verbs: ArrayLike,
    lease_ids: ArrayLike,
    num_tokens: ArrayLike,
    num_keys: ArrayLike | None,
    first_blocks: ArrayLike | None,
    keys: bytes,
    reserves: Sequence[ReserveSpec],
) -> Ask[pb.StepResponse]:
    """Ask for all operations of one scheduler step."""
    return _ask(
        "step",
        lambda: pb.StepRequest(
            verbs=_packed(verbs, _UINT8),
            lease_ids=_packed(lease_ids, _INT64),
            num_tokens=_packed(num_tokens, _INT32),
            num_keys=b"" if num_keys is None else _packed(num_keys, _INT32),
            first_blocks=b"" if first_blocks is None else _packed(first_blocks, _INT32),
            keys=keys,
            reserves=[
                _reserve_request(spec.request_id, spec.num_tokens, spec.keys, 0, spec.token_ids)
                for spec in reserves
            ],
        ),
        _itself,
    )


def event(message: pb.WatchResponse) -> Event:
    """Read one event."""
    read: Callable[[Any], Event] = _reader(Event)
    return read(message)


def _ask(
    verb: str,
    build: Callable[[], Message],
    read: Callable[[Any], R],
    *,
    wait_ms: int = 0,
    cache: str = "",
) -> Ask[R]:
    """Build the request; what protobuf does not take is the caller's mistake, not the wire's."""
    try:
        return Ask(verb, build(), read, wait_ms, cache)
    except _WRONG as error:
        raise InvalidError(f"{verb}: {error}") from error


_WRONG: Final = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a value that its field does not take."""


def _itself(reply: R) -> R:
    return reply


def _is_released(reply: pb.ReleaseResponse | pb.UnpinResponse) -> bool:
    return reply.released


@once
def _reader(record: Callable[..., R]) -> Callable[[Any], R]:
    """Return a function that makes `record` of a message with fields of the same names."""
    names = tuple(field.name for field in fields(record))  # type: ignore[arg-type]  # every record is a dataclass
    return lambda message: record(**{name: getattr(message, name) for name in names})


def _info(message: pb.CacheInfo) -> CacheInfo:
    return CacheInfo(
        cache=message.cache,
        status=message.status,
        bytes_populated=message.bytes_populated,
        num_workers=message.num_workers,
        plan=CachePlan.from_proto(message.plan),
    )


def _stats(reply: pb.StatsResponse) -> Stats:
    caches = tuple(
        CacheStats(
            cache=each.cache,
            pools=tuple(map(_reader(PoolStats), each.pools)),
            num_leases=each.num_leases,
            num_waiting=each.num_waiting,
            num_workers=each.num_workers,
            counters=dict(each.counters),
        )
        for each in reply.caches
    )
    return Stats(epoch=reply.epoch, caches=caches)


def _inspection(reply: pb.InspectResponse) -> Inspection:
    return Inspection(
        num_total=reply.num_total,
        workers=tuple(map(_reader(WorkerInfo), reply.workers)),
        leases=tuple(_lease(lease) for lease in reply.leases),
        pins=tuple(map(_reader(PinInfo), reply.pins)),
    )


def _lease(message: pb.LeaseInfo) -> LeaseInfo:
    read: LeaseInfo = _reader(LeaseInfo)(message)
    return read if message.HasField("age_ms") else replace(read, age_ms=None)


def _reserve_request(
    request_id: str, num_tokens: int, keys: bytes, wait_ms: int, token_ids: bytes
) -> pb.ReserveRequest:
    request = pb.ReserveRequest(request_id=request_id, **given(num_tokens=num_tokens))
    if keys:
        request.keys = keys
    if wait_ms:
        request.wait_ms = wait_ms
    if token_ids:
        request.token_ids = token_ids
    return request


_UINT8: Final = np.dtype("u1")
_INT32: Final = np.dtype("<i4")
_INT64: Final = np.dtype("<i8")


def _packed(column: ArrayLike, dtype: "np.dtype[Any]") -> bytes:
    """Pack a column; numbers that its type cannot carry are refused, not wrapped."""
    given = np.asarray(column)
    if given.dtype == dtype:
        return given.tobytes()
    if given.size and given.dtype.kind not in "iu":
        message = f"a column of {given.dtype} cannot be sent as {dtype}"
        raise InvalidError(message, resource="columns")
    bounds = np.iinfo(dtype)
    if given.size and (given.min() < bounds.min or given.max() > bounds.max):
        message = (
            f"a column with numbers from {given.min()} to {given.max()} does not fit into {dtype}"
        )
        raise InvalidError(message, resource="columns", limit=int(bounds.max))
    return given.astype(dtype).tobytes()
