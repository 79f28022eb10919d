"""Own every error that kvlease raises at a caller; what kvlease itself does wrong is an assertion, not one of these.

The tree::

    KVLeaseError
    ├── InvalidError           INVALID          the call is malformed
    ├── RefusedError                            the call is sound, the answer is no
    │   ├── NeverFitsError     NEVER_FITS       ask for less
    │   ├── PoolFullError      POOL_FULL        try again after retry_after_ms
    │   ├── BusyError          BUSY             try again after retry_after_ms
    │   ├── DrainingError      DRAINING         try another daemon
    │   ├── StartingError      STARTING         try again after retry_after_ms
    │   ├── TooLargeError      TOO_LARGE        split the call
    │   ├── WrongStateError    WRONG_STATE      the object is elsewhere in its life
    │   ├── CacheInUseError    CACHE_IN_USE     detach its workers first
    │   ├── LayoutMismatchError LAYOUT_MISMATCH delete the cache, or register under another name
    │   ├── StaleRevisionError STALE_REVISION   read the limits again
    │   └── CopyFailedError    COPY_FAILED      recompute
    ├── StaleError                              the caller speaks of something that has ended
    │   ├── StaleEpochError    STALE_EPOCH      attach again
    │   ├── UnknownLeaseError  UNKNOWN_LEASE    reserve again
    │   ├── UnknownWorkerError UNKNOWN_WORKER   attach again
    │   │   └── NoSuchWorkerError                   an operator named one that is not there
    │   ├── UnknownCacheError  UNKNOWN_CACHE    register it
    │   └── IdReusedError      ID_REUSED        use a fresh id
    ├── NotYoursError          NOT_YOURS        another worker's, or not for this role
    ├── DeadlineError          DEADLINE         the answer did not come in time
    ├── UnavailableError       UNAVAILABLE      the daemon cannot be reached
    └── InternalError          INTERNAL         a fault of the daemon's own
"""

import inspect
from dataclasses import dataclass
from typing import ClassVar, Final, Self

__all__ = [
    "BY_CODE",
    "BY_NUMBER",
    "BusyError",
    "CacheInUseError",
    "CopyFailedError",
    "DeadlineError",
    "DrainingError",
    "Holding",
    "IdReusedError",
    "InternalError",
    "InvalidError",
    "KVLeaseError",
    "LayoutMismatchError",
    "NeverFitsError",
    "NotYoursError",
    "PoolFullError",
    "RefusedError",
    "StaleEpochError",
    "StaleError",
    "StaleRevisionError",
    "StartingError",
    "TooLargeError",
    "UnavailableError",
    "UnknownCacheError",
    "UnknownLeaseError",
    "UnknownWorkerError",
    "WrongStateError",
]


@dataclass(frozen=True, slots=True)
class Holding:
    """Some blocks of a pool, by who has them and what for; the holdings of a refusal add up to the whole pool."""

    owner: str
    """"you", "others" or "nobody"."""
    state: str
    """"leased", "pinned", "copying", "cached", "quarantined", "scrubbing", "bad", "free", "in_magazine" or "parked"."""
    num_blocks: int

    def __str__(self) -> str:
        """Say it in three words, such as "you leased 12"."""
        return f"{self.owner} {self.state} {self.num_blocks}"


class KVLeaseError(Exception):
    """Something went wrong in kvlease."""

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 18
    """The ErrorCode of the protocol, for columnar answers."""
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    """Whether the very same call can succeed later."""

    def __init__(  # noqa: PLR0913 - one parameter a part of the explanation
        self,
        message: str | None = None,
        *,
        resource: str | None = None,
        need: int | None = None,
        available: int | None = None,
        limit: int | None = None,
        retry_after_ms: int | None = None,
        rule: str | None = None,
        remedies: tuple[str, ...] = (),
        holdings: tuple[Holding, ...] = (),
    ) -> None:
        """Keep the explanation; the class docstring is the message where none is given.

        `resource` names what is wrong or too little, such as an argument or device_blocks. In its unit, `need` is what
        the call asks for, `available` what there is now, and `limit` the most that there may be. `rule` is the stable
        name of the rule that was broken, where there are several under one code; `remedies` are settings, each written
        name=value, with which the same call would work; `holdings` tell who has the pool.
        """
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or ""))
        self.resource = resource
        self.need = need
        self.available = available
        self.limit = limit
        self.retry_after_ms = retry_after_ms
        self.rule = rule
        self.remedies = remedies
        self.holdings = holdings

    @property
    def message(self) -> str:
        """The sentence that says what to change."""
        return str(self.args[0])


class InvalidError(KVLeaseError):
    """An argument is malformed or out of range."""

    code = "INVALID"
    number = 1
    http_status = 422
    grpc_status = "INVALID_ARGUMENT"


class RefusedError(KVLeaseError):
    """The call is sound but cannot be granted."""


class NeverFitsError(RefusedError):
    """The request is larger than can ever fit; ask for less or plan a larger pool."""

    code = "NEVER_FITS"
    number = 2
    http_status = 409
    grpc_status = "OUT_OF_RANGE"


class PoolFullError(RefusedError):
    """More is asked for than is free now; try again after retry_after_ms, or wait longer."""

    code = "POOL_FULL"
    number = 3
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class BusyError(RefusedError):
    """Too many callers wait already; try again after retry_after_ms."""

    code = "BUSY"
    number = 4
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class DrainingError(RefusedError):
    """The daemon, or the cache, is draining and grants nothing new; another daemon can."""

    code = "DRAINING"
    number = 5
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class StartingError(RefusedError):
    """The cache's memory is still being populated; try again after retry_after_ms."""

    code = "STARTING"
    number = 6
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class StaleError(KVLeaseError):
    """The caller speaks of something that has ended."""


class StaleEpochError(StaleError):
    """The daemon was restarted since; attach again to learn which leases survived."""

    code = "STALE_EPOCH"
    number = 7
    http_status = 412
    grpc_status = "ABORTED"


class UnknownLeaseError(StaleError):
    """There is no such lease; it was released, or its worker died."""

    code = "UNKNOWN_LEASE"
    number = 8
    http_status = 404
    grpc_status = "NOT_FOUND"


class UnknownWorkerError(StaleError):
    """Nobody has this token, or none was sent; a worker must attach first and send the token that attach returned."""

    code = "UNKNOWN_WORKER"
    number = 9
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class NoSuchWorkerError(UnknownWorkerError):
    """No worker has this id; it has ended, or never was."""

    http_status = 404
    grpc_status = "NOT_FOUND"


class UnknownCacheError(StaleError):
    """There is no cache of this name; register it first."""

    code = "UNKNOWN_CACHE"
    number = 10
    http_status = 404
    grpc_status = "NOT_FOUND"

    @classmethod
    def of_long_name(cls, name: str, limit: int) -> Self:
        """Return the refusal of a name that is too long for any cache."""
        found = f"its name has {len(name)} characters, at most {limit} are allowed"
        message = f"there is no cache {name[:limit]!r}: {found}"
        return cls(message, resource="cache", need=len(name), limit=limit)


class IdReusedError(StaleError):
    """The id was used before with another body; retries must repeat the call exactly."""

    code = "ID_REUSED"
    number = 11
    http_status = 409
    grpc_status = "ALREADY_EXISTS"


class LayoutMismatchError(RefusedError):
    """The layout differs from the registered one; delete that cache, or register this one under another name."""

    code = "LAYOUT_MISMATCH"
    number = 12
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class NotYoursError(KVLeaseError):
    """It is another worker's, or not for the caller's role."""

    code = "NOT_YOURS"
    number = 13
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class TooLargeError(RefusedError):
    """The message or batch is above a limit; split it, or send less."""

    code = "TOO_LARGE"
    number = 14
    http_status = 413
    grpc_status = "INVALID_ARGUMENT"

    @classmethod
    def of_message(cls, num_bytes: int, limit: int) -> Self:
        """Return the refusal of a message that has more bytes than the daemon's settings allow."""
        message = (
            f"the message has at least {num_bytes} bytes, but the limit is {limit} (max_message_bytes); "
            "send less at once"
        )
        return cls(message, resource="message_bytes", need=num_bytes, limit=limit)


class DeadlineError(KVLeaseError):
    """The answer did not come before the deadline."""

    code = "DEADLINE"
    number = 15
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    retryable = True


class WrongStateError(RefusedError):
    """The object is in a state that does not allow this."""

    code = "WRONG_STATE"
    number = 16
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class CacheInUseError(RefusedError):
    """Workers are attached to the cache; detach them first."""

    code = "CACHE_IN_USE"
    number = 17
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class InternalError(KVLeaseError):
    """The daemon made a mistake; its log says more."""


class UnavailableError(KVLeaseError):
    """The daemon cannot be reached; check that it runs and that the address is right."""

    code = "UNAVAILABLE"
    number = 19
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True


class CopyFailedError(RefusedError):
    """The bytes could not be brought back intact; recompute them."""

    code = "COPY_FAILED"
    number = 20
    http_status = 409
    grpc_status = "ABORTED"


class StaleRevisionError(RefusedError):
    """The limits are older than those that hold, and were not applied; read them again and send a higher revision."""

    code = "STALE_REVISION"
    number = 21
    http_status = 412
    grpc_status = "ABORTED"


_CONCRETE: Final = (
    InvalidError, NeverFitsError, PoolFullError, BusyError, DrainingError, StartingError, StaleEpochError,
    UnknownLeaseError, UnknownWorkerError, UnknownCacheError, IdReusedError, LayoutMismatchError, NotYoursError,
    TooLargeError, DeadlineError, WrongStateError, CacheInUseError, InternalError, UnavailableError, CopyFailedError,
    StaleRevisionError,
)  # fmt: skip

BY_CODE: Final[dict[str, type[KVLeaseError]]] = {error.code: error for error in _CONCRETE}
"""Every error that travels, by its code."""

BY_NUMBER: Final[dict[int, type[KVLeaseError]]] = {error.number: error for error in _CONCRETE}
"""Every error that travels, by its number in columnar answers."""
