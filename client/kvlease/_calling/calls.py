"""Own how each verb becomes a request and what its answer means; sending is the clients' business.

An `Ask` is one call without what its sender adds: token, epoch, idempotency key and deadline.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import ArrayLike, NDArray

from kvlease._calling import answers
from kvlease._calling.fields import from_zero, given, named, packed
from kvlease._checks import check_range, check_token_ids, check_type
from kvlease.errors import InvalidError
from kvlease.options import CacheOptions
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import ExplainedPlan, PlanReport, WhatIf
from kvlease.replies import (
    CacheInfo,
    Committed,
    Event,
    Evicted,
    Explanation,
    Found,
    Inspection,
    Pinned,
    Priority,
    Reloaded,
    ReserveSpec,
    Stats,
)
from kvlease.retention import RETAIN_PRIORITY_MAX
from kvlease.traces import TracedRequest
from kvlease.v1 import kvlease_pb2 as pb

R = TypeVar("R")

KEYED: Final = frozenset(
    {
        "register_cache", "delete_cache", "reserve", "extend", "commit", "evict", "reload", "fork", "trim", "release",
        "pin", "unpin", "step", "exchange",
    }
)  # fmt: skip
"""Verbs that carry an idempotency key, so that a retry gets the answer of the first try."""


class Ask(NamedTuple, Generic[R]):
    """One call and how to read its answer; a tuple, because one is made for each call of the hot path."""

    verb: str
    request: Message
    read: Callable[[Any], R]
    wait_ms: int = 0
    """Milliseconds that the daemon may wait; they are added to the caller's deadline."""
    cache: str = ""
    """The cache that an operator names."""


def plan(inputs: PlanInputs) -> Ask[CachePlan]:
    """Ask for a plan."""
    check_type("inputs", inputs, PlanInputs)
    return ask(
        "plan",
        lambda: pb.PlanRequest(inputs=inputs.to_proto()),
        lambda reply: CachePlan.from_proto(reply.plan),
    )


def explain(inputs: PlanInputs, changes: Sequence[str]) -> Ask[ExplainedPlan]:
    """Ask for a plan with its equations, and for what each of `changes` would alter."""
    check_type("inputs", inputs, PlanInputs)
    check_type("changes", changes, tuple[str, ...])
    return ask(
        "plan",
        lambda: pb.PlanRequest(inputs=inputs.to_proto(), report=True, what_if=changes),
        lambda reply: ExplainedPlan(
            plan=CachePlan.from_proto(reply.plan),
            report=PlanReport.from_proto(reply.report),
            what_ifs=tuple(map(WhatIf.from_proto, reply.what_ifs)),
        ),
    )


def register(cache: str, inputs: PlanInputs, options: CacheOptions) -> Ask[CacheInfo]:
    """Ask for a cache to be created or found."""
    check_type("inputs", inputs, PlanInputs)
    check_type("options", options, CacheOptions)
    return ask(
        "register_cache",
        lambda: pb.RegisterCacheRequest(
            **given(cache=cache), inputs=inputs.to_proto(), options=options.to_proto()
        ),
        lambda reply: answers.info(reply.info),
    )


def get_cache(cache: str) -> Ask[CacheInfo]:
    """Ask about one cache."""
    return ask(
        "get_cache",
        lambda: pb.GetCacheRequest(**given(cache=cache)),
        lambda reply: answers.info(reply.info),
    )


def list_caches() -> Ask[tuple[CacheInfo, ...]]:
    """Ask about all caches."""
    return ask(
        "list_caches", pb.ListCachesRequest, lambda reply: tuple(map(answers.info, reply.caches))
    )


def stats(cache: str) -> Ask[Stats]:
    """Ask for a snapshot."""
    return ask("stats", lambda: pb.StatsRequest(**given(cache=cache)), answers.stats)


def inspect(cache: str, what: str, limit: int, after_id: int) -> Ask[Inspection]:
    """Ask for a page of one of a cache's lists."""
    return ask(
        "inspect",
        lambda: pb.InspectRequest(**given(cache=cache, what=what, limit=limit, after_id=after_id)),
        answers.inspection,
    )


def explain_lease(lease_id: int, cache: str = "") -> Ask[Explanation]:
    """Ask why the rest of a lease's prefix was not found."""
    return ask(
        "explain",
        lambda: pb.ExplainRequest(**given(lease_id=lease_id, cache=cache)),
        answers.explanation,
    )


def watch(cache: str, after_sequence: int, with_snapshot: bool = False) -> Ask[Event]:
    """Ask for events."""
    return ask(
        "watch",
        lambda: pb.WatchRequest(
            **given(cache=cache, after_sequence=after_sequence, with_snapshot=with_snapshot)
        ),
        answers.event,
    )


def trace(cache: str) -> Ask[TracedRequest]:
    """Ask for a cache's requests as their leases end."""
    return ask("trace", lambda: pb.TraceRequest(**given(cache=cache)), TracedRequest.from_proto)


def lookup(keys: bytes, cache: str = "") -> Ask[Found]:
    """Ask how much of a prefix is cached."""
    return ask(
        "lookup", lambda: pb.LookupRequest(**given(keys=keys)), answers.reader(Found), cache=cache
    )


def pin(keys: bytes, cache: str = "") -> Ask[Pinned]:
    """Ask for cached blocks to be held."""
    return ask(
        "pin", lambda: pb.PinRequest(**given(keys=keys)), answers.reader(Pinned), cache=cache
    )


def unpin(pin_id: int, cache: str = "") -> Ask[bool]:
    """Ask for a pin to end."""
    return ask(
        "unpin", lambda: pb.UnpinRequest(**given(pin_id=pin_id)), answers.is_released, cache=cache
    )


def evict(
    *, lease_id: int = 0, keys: bytes = b"", num_blocks: int = 0, wait_ms: int = 0, cache: str = ""
) -> Ask[Evicted]:
    """Ask for blocks to leave the device pool."""
    return ask(
        "evict",
        lambda: pb.EvictRequest(
            **given(lease_id=lease_id, keys=keys, num_blocks=num_blocks, wait_ms=wait_ms)
        ),
        answers.reader(Evicted),
        wait_ms=wait_ms,
        cache=cache,
    )


def reload_keys(keys: bytes, wait_ms: int, cache: str = "") -> Ask[Reloaded]:
    """Ask for blocks to come back by their keys."""
    return ask(
        "reload",
        lambda: pb.ReloadRequest(**given(keys=keys, wait_ms=wait_ms)),
        answers.reader(Reloaded),
        wait_ms=wait_ms,
        cache=cache,
    )


def reload_lease(lease_id: int, wait_ms: int) -> Ask[pb.ReloadResponse]:
    """Ask for an evicted lease to come back."""
    return ask(
        "reload",
        lambda: pb.ReloadRequest(**given(lease_id=lease_id, wait_ms=wait_ms)),
        answers.itself,
        wait_ms=wait_ms,
    )


def reserve(  # noqa: PLR0913 - one parameter a field
    *,
    request_id: str,
    num_tokens: int,
    keys: bytes = b"",
    wait_ms: int = 0,
    token_ids: bytes = b"",
    priority: Priority = "normal",
    retain_seconds: int = 0,
    explain: bool = False,
    retain_priority: int | None = None,
) -> Ask[pb.ReserveResponse]:
    """Ask for blocks for one request."""
    try:
        # protobuf itself notices a plain number that is too large.
        if type(request_id) is not str or type(num_tokens) is not int or num_tokens <= 0:
            given(request_id=request_id, num_tokens=num_tokens)
        # Setting the fields one by one takes two thirds of the time that passing them to the class takes.
        request = pb.ReserveRequest()
        request.request_id, request.num_tokens = request_id, num_tokens
        if keys:
            request.keys = keys
        if wait_ms:
            request.wait_ms = wait_ms
        if token_ids:
            request.token_ids = token_ids
            check_token_ids(token_ids, num_tokens)
        if priority != "normal":
            request.priority = priority
        if retain_seconds:
            request.retain_seconds = retain_seconds
        if explain:
            request.explain = explain
        if retain_priority is not None:
            check_range("retain_priority", retain_priority, 0, RETAIN_PRIORITY_MAX)
            request.retain_priority = retain_priority
    except _WRONG as error:
        given(request_id=request_id, num_tokens=num_tokens, wait_ms=wait_ms, priority=priority)
        given(retain_seconds=retain_seconds, keys=keys, token_ids=token_ids)
        check_type("explain", explain, bool)
        check_type("retain_priority", retain_priority, int | None)
        raise InvalidError(f"reserve: {error}", resource="request") from error
    return Ask("reserve", request, answers.itself, wait_ms)


def reserve_of(spec: ReserveSpec, wait_ms: int = 0) -> Ask[pb.ReserveResponse]:
    """Ask for blocks for one request of a step."""
    if type(spec) is not ReserveSpec:
        check_type("reserves", spec, ReserveSpec)
    return reserve(
        request_id=spec.request_id,
        num_tokens=spec.num_tokens,
        keys=spec.keys,
        wait_ms=wait_ms,
        token_ids=spec.token_ids,
        priority=spec.priority,
        retain_seconds=spec.retain_seconds,
        explain=spec.explain,
        retain_priority=spec.retain_priority,
    )


def fork(lease_id: int, request_id: str, num_tokens: int, wait_ms: int) -> Ask[pb.ReserveResponse]:
    """Ask for a second lease that goes on from a first one."""
    return ask(
        "fork",
        lambda: pb.ForkRequest(
            **given(
                lease_id=lease_id, request_id=request_id, num_tokens=num_tokens, wait_ms=wait_ms
            )
        ),
        answers.forked,
        wait_ms=wait_ms,
    )


def trim(lease_id: int, num_tokens: int) -> Ask[int]:
    """Ask for the blocks behind the first `num_tokens` tokens to leave a lease."""
    return ask(
        "trim",
        lambda: pb.TrimRequest(**given(lease_id=lease_id), num_tokens=from_zero(num_tokens)),
        lambda reply: int(reply.num_given_back),
    )


def map_row(lease_id: int) -> Ask[pb.MapResponse]:
    """Ask for a lease's row to be published."""
    return ask("map", lambda: pb.MapRequest(**given(lease_id=lease_id)), answers.itself)


def extend(lease_id: int, num_tokens: int, wait_ms: int) -> Ask[pb.ExtendResponse]:
    """Ask for a lease to cover more tokens."""
    return ask(
        "extend",
        lambda: pb.ExtendRequest(
            **given(lease_id=lease_id, num_tokens=num_tokens, wait_ms=wait_ms)
        ),
        answers.itself,
        wait_ms=wait_ms,
    )


def commit(lease_id: int, num_tokens: int, keys: bytes, first_block: int) -> Ask[Committed]:
    """Ask for full blocks to become findable."""
    return ask(
        "commit",
        lambda: pb.CommitRequest(
            **given(lease_id=lease_id, keys=keys, first_block=first_block),
            num_tokens=from_zero(num_tokens),
        ),
        answers.reader(Committed),
    )


def release(lease_id: int) -> Ask[bool]:
    """Ask for a lease to end."""
    return Ask("release", pb.ReleaseRequest(lease_id=lease_id), answers.is_released)


def heartbeat(lease_ids: bytes, newest_lease_id: int) -> Ask[NDArray[np.int64]]:
    """Renew the leases of an inventory; the answer has the ids that the daemon does not know."""
    return ask(
        "heartbeat",
        lambda: pb.HeartbeatRequest(lease_ids=lease_ids, newest_lease_id=newest_lease_id),
        lambda reply: np.frombuffer(reply.unknown_lease_ids, "<i8"),
    )


def detach(worker_id: int = 0, *, force: bool = False) -> Ask[int]:
    """End the calling worker or, for an operator, another worker; the answer is the number of leases that ended."""
    return ask(
        "detach",
        lambda: pb.DetachRequest(**given(worker_id=worker_id), force=force),
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
    try:
        request = pb.StepRequest()
        request.verbs = packed(verbs, _UINT8)
        request.lease_ids = packed(lease_ids, _INT64)
        request.num_tokens = packed(num_tokens, _INT32)
        if num_keys is not None:
            request.num_keys = packed(num_keys, _INT32)
        if first_blocks is not None:
            request.first_blocks = packed(first_blocks, _INT32)
        if type(keys) is not bytes or keys:
            request.keys = given(keys=keys)["keys"]
        if len(reserves):
            asks = map(reserve_of, reserves)
            request.reserves.extend(cast("pb.ReserveRequest", one.request) for one in asks)
    except _WRONG as error:
        raise InvalidError(f"step: {error}", resource="request") from error
    return Ask("step", request, answers.itself)


def ask(
    verb: str,
    build: Callable[[], Message],
    read: Callable[[Any], R],
    *,
    wait_ms: int = 0,
    cache: str = "",
) -> Ask[R]:
    """Build the request; a value that protobuf does not take is the caller's mistake, so it raises InvalidError."""
    try:
        return Ask(verb, build(), read, wait_ms, named(cache))
    except _WRONG as error:
        raise InvalidError(f"{verb}: {error}", resource="request") from error


_WRONG: Final = (TypeError, ValueError, OverflowError)
"""What protobuf raises for a value that its field does not take."""


_UINT8: Final = np.dtype("u1")
_INT32: Final = np.dtype("<i4")
_INT64: Final = np.dtype("<i8")
