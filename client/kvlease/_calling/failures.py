"""Own what the failure of a verb means for its lease; what is then done about the lease is the session's business."""

from kvlease.errors import (
    CopyFailedError,
    InvalidError,
    KVLeaseError,
    NotYoursError,
    RefusedError,
    StaleError,
)


def is_doubt(error: KVLeaseError) -> bool:
    """Tell whether a call that failed with this error may nevertheless have been carried out."""
    return not isinstance(error, RefusedError | StaleError | NotYoursError | InvalidError)


def ends_lease(error: KVLeaseError) -> bool:
    """Tell whether the daemon no longer grants us the lease: after a failed copy it does, unless bytes are damaged."""
    is_damaged = isinstance(error, CopyFailedError) and error.resource == "lease"
    return is_damaged or isinstance(error, StaleError | NotYoursError)
