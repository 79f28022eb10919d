"""Own the one table from errors to the Error of the protocol and back; statuses are the adapters' business."""

from kvlease.errors import BY_CODE, InternalError, KVLeaseError
from kvlease.v1 import kvlease_pb2 as pb


def error_to_proto(error: KVLeaseError) -> pb.Error:
    """Return the message that explains `error`."""
    return pb.Error(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        resource=error.resource or "",
        need=error.need,
        available=error.available,
        limit=error.limit,
        retry_after_ms=error.retry_after_ms,
        rule=error.rule or "",
        remedies=error.remedies,
    )


def error_from_proto(message: pb.Error) -> KVLeaseError:
    """Return the error that a message explains; an unknown code becomes InternalError."""
    return BY_CODE.get(message.code, InternalError)(
        message.message or None,
        resource=message.resource or None,
        need=message.need if message.HasField("need") else None,
        available=message.available if message.HasField("available") else None,
        limit=message.limit if message.HasField("limit") else None,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        rule=message.rule or None,
        remedies=tuple(message.remedies),
    )
