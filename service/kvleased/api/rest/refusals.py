"""Own the refusals in the description of REST: with which errors each route is refused, and an example of each."""

import json
from collections.abc import Iterable, Mapping
from typing import Final

from kvlease.errors import (
    BY_CODE,
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
    NoSuchWorkerError,
    NotYoursError,
    PoolFullError,
    StaleEpochError,
    StaleRevisionError,
    StartingError,
    TooLargeError,
    UnavailableError,
    UnknownCacheError,
    UnknownLeaseError,
    UnknownWorkerError,
    WrongStateError,
)
from kvleased.api import faults
from kvleased.api.rest.bodies import EncodedBodyError
from kvleased.api.rest.conversion import Json
from kvleased.api.rest.routes import Route

Kinds = tuple[type[KVLeaseError], ...]

_ANY: Final[Kinds] = (
    InvalidError, UnknownWorkerError, NotYoursError, StaleEpochError, IdReusedError, InternalError,
    UnavailableError,
)  # fmt: skip
"""Refusals of any call: it is malformed, its caller may not make it, or the daemon ends meanwhile."""
_CACHE: Final[Kinds] = (UnknownCacheError, StartingError)
_LEASE: Final[Kinds] = (*_CACHE, UnknownLeaseError, WrongStateError)
_ROOM: Final[Kinds] = (
    PoolFullError, NeverFitsError, BusyError, DeadlineError, DrainingError, WrongStateError,
)  # fmt: skip
"""Refusals of calls that wait for blocks."""
_COPY: Final[Kinds] = (*_ROOM, CopyFailedError)

OF_VERB: Final[Mapping[str, Kinds]] = {
    "attach": (*_CACHE, BusyError, DrainingError, LayoutMismatchError, WrongStateError, UnknownLeaseError),
    "clear": _CACHE,
    "commit": (*_LEASE, PoolFullError),
    "delete_cache": (*_CACHE, CacheInUseError, WrongStateError),
    "detach": (*_CACHE, WrongStateError),
    "drain": _CACHE,
    "evict": (*_LEASE, *_COPY),
    "exchange": (*_CACHE, *_ROOM),
    "explain": _LEASE,
    "extend": (*_LEASE, *_ROOM),
    "fork": (*_LEASE, *_ROOM),
    "get_cache": _CACHE,
    "get_tenant": (),
    "heartbeat": _CACHE,
    "inspect": _CACHE,
    "inventory": (*_CACHE, WrongStateError),
    "list_caches": (),
    "lookup": _CACHE,
    "map": _LEASE,
    "pin": (*_CACHE, *_ROOM),
    "plan": (NeverFitsError,),
    "register_cache": (*_CACHE, *_ROOM, LayoutMismatchError),
    "release": _LEASE,
    "reload": (*_LEASE, *_COPY),
    "reserve": (*_CACHE, *_COPY),
    "resize": (*_CACHE, *_ROOM),
    "set_tenant": (BusyError, NeverFitsError, StaleRevisionError),
    "stats": _CACHE,
    "step": (*_LEASE, *_ROOM),
    "trace": (*_CACHE, BusyError),
    "trim": _LEASE,
    "undrain": (*_CACHE, DrainingError),
    "unpin": (*_CACHE, UnknownLeaseError, WrongStateError),
    "watch": (*_CACHE, BusyError),
}  # fmt: skip
"""The refusals of each verb, beside those of any call."""
_OF_OPERATION: Final[Mapping[str, Kinds]] = {"end_worker": (NoSuchWorkerError,)}
"""Further refusals of operations that are only a part of their verb."""

_EXAMPLES: Final = (
    BusyError(resource="waiting", need=257, limit=256, retry_after_ms=100),
    CacheInUseError("2 workers are attached to this cache; detach them first", resource="workers", need=0, available=2),
    CopyFailedError("bytes of the lease do not match their checksum, so it ended; reserve again", resource="lease"),
    DeadlineError(resource="blocks", need=12, available=3, retry_after_ms=400),
    DrainingError(resource="daemon", retry_after_ms=5000),
    EncodedBodyError((
        "the body's Content-Encoding is 'gzip'; send the body without encoding it"
    ), resource="content-encoding"),
    IdReusedError('a request "request-1" has a lease already; use a fresh id', resource="request_id"),
    InternalError(),
    InvalidError("num_tokens must be from 1 to 2147483647, not 0", resource="num_tokens", limit=2**31 - 1),
    LayoutMismatchError("the cache has 16 tokens per block, but the call asks for 8", resource="tokens_per_block"),
    NeverFitsError(resource="blocks", need=5000, limit=4096),
    NoSuchWorkerError("there is no worker 99, or it has ended; kvlease workers lists them", resource="worker_id"),
    NotYoursError(
        "a reader may not do this, only an operator may; docs/security.md says who may call what",
        resource="role",
        rule="role",
    ),
    PoolFullError(resource="blocks", need=12, available=3, limit=4096, retry_after_ms=40),
    StaleEpochError((
        "the call names epoch 7, but the current epoch is 8; attach again"
    ), resource="epoch", need=7, available=8),
    StaleRevisionError((
        "the limits have revision 9 already, and the call gives 9"
    ), resource="revision", need=10, available=9),
    StartingError(resource="daemon", retry_after_ms=100),
    TooLargeError.of_message(2 << 20, 1 << 20),
    UnavailableError("the daemon stopped before the call was answered"),
    UnknownCacheError('there is no cache "main"; register it', resource="cache"),
    UnknownLeaseError(resource="lease"),
    UnknownWorkerError(resource="token"),
    WrongStateError("the lease is being reloaded; wait until the reload has ended", resource="lease"),
)  # fmt: skip
_STATUS_OF_PATH: Final = 404
"""The status of a path that no route takes, such as one whose parameter is empty."""


def kinds(route: Route) -> Kinds:
    """Return the errors with which a route is refused."""
    of_body = () if route.body is None else (TooLargeError, EncodedBodyError)
    return tuple(
        dict.fromkeys(
            (*_ANY, *of_body, *OF_VERB[route.verb], *_OF_OPERATION.get(route.operation_id, ()))
        )
    )


def refusals(route: Route) -> dict[int | str, Json]:
    """Return the refusals of a route for OpenAPI, by status, as references to `shared`."""
    return {
        status: {
            "$ref": f"#/components/responses/{_name(status, found)}",
            "description": ", ".join(f"`{kind.code}`" for kind in found),
        }
        for status, found in _by_status(route).items()
    }


def shared(routes: Iterable[Route]) -> dict[str, Json]:
    """Return all refusals of the routes, each once, by the names in `refusals`, with an example of every code."""
    return {
        _name(status, found): _response(status, found)
        for route in routes
        for status, found in _by_status(route).items()
    }


def examples() -> dict[str, Json]:
    """Return an example of the problem document of every code, by the names in `shared`."""
    return {
        _example(type(error)): {
            "summary": faults.title_of(type(error)),
            "value": json.loads(faults.problem(error)),
        }
        for error in _EXAMPLES
    }


def _example(kind: type[KVLeaseError]) -> str:
    """Return the name of a class's example: its code, with the status unless the class is the usual one of the code."""
    is_usual = BY_CODE[kind.code] is kind
    return kind.code if is_usual else f"{kind.code}_{kind.http_status}"


def _by_status(route: Route) -> dict[int, Kinds]:
    found: dict[int, Kinds] = {}
    for kind in sorted(kinds(route), key=lambda kind: (kind.http_status, kind.number)):
        found[kind.http_status] = (*found.get(kind.http_status, ()), kind)
    if route.in_path:
        found[_STATUS_OF_PATH] = (*found.get(_STATUS_OF_PATH, ()), InvalidError)
    return found


def _name(status: int, found: Kinds) -> str:
    return "_".join((str(status), *(kind.code for kind in found)))


def _response(status: int, found: Kinds) -> Json:
    told = "\n\n".join(f"`{kind.code}`: {faults.title_of(kind)}" for kind in found)
    response: Json = {
        "description": told,
        "content": {
            faults.PROBLEM_TYPE.decode(): {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "examples": {
                    kind.code: {"$ref": f"#/components/examples/{_example(kind)}"}
                    for kind in found
                    if kind.http_status == status
                },
            }
        },
    }
    return response
