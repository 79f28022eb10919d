"""Own the way from errors to the protocol's Error and back; statuses are the adapters' business.

A transport that carries only text has holdings as one sentence, such as "you leased 12, others cached 3".
"""

from collections.abc import Iterable
from typing import Final

from kvlease.errors import BY_CODE, Holding, InternalError, KVLeaseError
from kvlease.v1 import kvlease_pb2 as pb

_INT64_MAX: Final = 2**63 - 1


def error_to_proto(error: KVLeaseError) -> pb.Error:
    """Return the message that explains `error`."""
    return pb.Error(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        resource=error.resource or "",
        need=fitting(error.need),
        available=fitting(error.available),
        limit=fitting(error.limit),
        retry_after_ms=error.retry_after_ms,
        rule=error.rule or "",
        remedies=error.remedies,
        holdings=[
            pb.Holding(owner=one.owner, state=one.state, num_blocks=one.num_blocks)
            for one in error.holdings
        ],
    )


def fitting(number: int | None) -> int | None:
    """Return a number if an Error can carry it, else None: a refusal may repeat any number that a caller gave."""
    return number if number is not None and -_INT64_MAX <= number <= _INT64_MAX else None


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
        holdings=tuple(
            Holding(owner=one.owner, state=one.state, num_blocks=one.num_blocks)
            for one in message.holdings
        ),
    )


def holdings_to_text(holdings: Iterable[Holding]) -> str:
    """Return holdings as one sentence."""
    return ", ".join(map(str, holdings))


def holdings_from_text(text: str) -> list[pb.Holding]:
    """Return the holdings in a sentence as messages; parts that are not written as holdings are skipped."""
    parts = [part.split() for part in text.split(",")]
    return [
        pb.Holding(owner=part[0], state=part[1], num_blocks=int(part[2]))
        for part in parts
        if len(part) == 3 and part[2].isdecimal()  # noqa: PLR2004 - owner, state, number
    ]
