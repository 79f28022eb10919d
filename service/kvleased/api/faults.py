"""Own how each transport tells an error, and the only place of the adapters where unforeseen errors are caught."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import structlog
from google.protobuf.message import Message

from kvlease.errors import InternalError, KVLeaseError, UnavailableError, UnknownWorkerError
from kvlease.wire.faults import fitting, holdings_to_text
from kvleased.access.callers import Caller
from kvleased.api.rest.bodies import InvalidBodyError
from kvleased.api.seam import Backend

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # it has no stubs

PROBLEM_TYPE: Final = b"application/problem+json"
"""The media type of every refusal over HTTP."""

DOMAIN: Final = "kvlease"
"""The domain of ErrorInfo."""

_NUMBERS: Final = ("need", "available", "limit", "retry_after_ms")
_MS_PER_SECOND: Final = 1000

log: Final[structlog.stdlib.BoundLogger] = structlog.get_logger()


def ask(
    call: Callable[[str, Message, Caller], Message | asyncio.Future[Message]],
    verb: str,
    request: Message,
    caller: Caller,
) -> Message | asyncio.Future[Message] | KVLeaseError:
    """Call the daemon; a refusal is returned, because it is an answer like any other."""
    try:
        return call(verb, request, caller)
    except KVLeaseError as error:
        return without_frames(error)
    except Exception as cause:  # noqa: BLE001 - what nobody foresaw is answered and logged here
        return _unforeseen(verb, cause)


def outcome(verb: str, future: asyncio.Future[Message]) -> Message | KVLeaseError:
    """Return the result of a future; if it is not done yet, its call was given up and may still be ending."""
    if not future.done():
        return UnavailableError("the caller gave up before the call was answered")
    try:
        return future.result()
    except KVLeaseError as error:
        return without_frames(error)
    except asyncio.CancelledError:
        return UnavailableError(
            "the daemon stopped, or the caller gave up, before the call was answered"
        )
    except Exception as cause:  # noqa: BLE001 - what nobody foresaw is answered and logged here
        return _unforeseen(verb, cause)


async def stream(
    daemon: Backend, verb: str, request: Message, caller: Caller
) -> AsyncIterator[Message | KVLeaseError]:
    """Yield the daemon's answers without end; if the daemon ends them, the reason comes last."""
    try:
        async for answer in daemon.stream(verb, request, caller):
            yield answer
    except KVLeaseError as error:
        yield error
    except Exception as cause:  # noqa: BLE001 - the same
        yield _unforeseen(verb, cause)


def without_frames(error: KVLeaseError) -> KVLeaseError:
    """Return an error that is kept as an answer, without its traceback.

    A frame of the traceback holds the answer, which is a cycle: only the garbage collector would free it, and it would
    hold up all calls meanwhile.
    """
    return error.with_traceback(None)


def code_of(answer: object) -> str:
    """Return the code by which an answer is counted."""
    return answer.code if isinstance(answer, KVLeaseError) else "OK"


def problem(error: KVLeaseError, status: int | None = None) -> bytes:
    """Return the RFC 9457 document of an error; `status` replaces the error's own status if HTTP itself refuses."""
    if type(error) is UnknownWorkerError and _says_words_alone(error):
        # A flood of strangers is answered with few different texts, all our own, so these documents are cached.
        return _problem_of_stranger(error.message, error.resource, status)
    return _problem(error, status or error.http_status)


def _says_words_alone(error: KVLeaseError) -> bool:
    has_numbers = any(getattr(error, name) is not None for name in _NUMBERS)
    return not (has_numbers or error.rule or error.remedies or error.holdings)


@lru_cache(maxsize=64)
def _problem_of_stranger(message: str, resource: str | None, status: int | None) -> bytes:
    error = UnknownWorkerError(message, resource=resource)
    return _problem(error, status or error.http_status)


def _problem(error: KVLeaseError, status: int) -> bytes:
    fields: dict[str, object] = {
        "type": f"urn:kvlease:error:{error.code}",
        "title": HTTPStatus(status).phrase
        if status != error.http_status
        else title_of(type(error)),
        "status": status,
        "detail": error.message,
        "code": error.code,
        "retryable": error.retryable,
    }
    if error.resource:
        fields["resource"] = error.resource
    if error.rule:
        fields["rule"] = error.rule
    if isinstance(error, InvalidBodyError):
        fields["errors"] = [
            {"pointer": one.pointer, "field": one.field, "detail": one.detail}
            for one in error.errors
        ]
    if error.remedies:
        fields["remedies"] = error.remedies
    if error.holdings:
        fields["holdings"] = [asdict(one) for one in error.holdings]
    numbers = {name: fitting(getattr(error, name)) for name in _NUMBERS}
    fields |= {name: number for name, number in numbers.items() if number is not None}
    return json.dumps(fields, separators=(",", ":")).encode()


def problem_headers(error: KVLeaseError, body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that go with a problem."""
    headers = [(b"content-type", PROBLEM_TYPE), (b"content-length", b"%d" % len(body))]
    if error.retry_after_ms is not None:
        # The header counts whole seconds; rounded down, it would make callers come back too early.
        headers.append((b"retry-after", b"%d" % -(-error.retry_after_ms // _MS_PER_SECOND)))
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.http_status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers.append((b"accept-encoding", b"identity"))
    return headers


def title_of(kind: type[KVLeaseError]) -> str:
    """Return the sentence that is the same for every error of a class."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def grpc_status(error: KVLeaseError) -> "Status":
    """Return the google.rpc.Status of an error: always with ErrorInfo, and with RetryInfo if a retry can help."""
    # Imported here, because gRPC takes 0.1 s at the start and may not be served at all.
    from google.protobuf.any_pb2 import Any  # noqa: PLC0415
    from google.rpc.error_details_pb2 import (  # type: ignore[import-untyped]  # noqa: PLC0415
        ErrorInfo,
        RetryInfo,
    )
    from google.rpc.status_pb2 import Status  # noqa: PLC0415
    from grpc import StatusCode  # noqa: PLC0415

    metadata = {
        name: str(number)
        for name in _NUMBERS
        if (number := fitting(getattr(error, name))) is not None
    }
    metadata["retryable"] = "true" if error.retryable else "false"
    if error.resource:
        metadata["resource"] = error.resource
    if error.rule:
        metadata["rule"] = error.rule
    if error.remedies:
        # Metadata values are strings, and a remedy may contain any character.
        metadata["remedies"] = json.dumps(error.remedies)
    if error.holdings:
        metadata["holdings"] = holdings_to_text(error.holdings)
    details = [Any(), Any()]
    details[0].Pack(ErrorInfo(reason=error.code, domain=DOMAIN, metadata=metadata))
    if error.retry_after_ms is None:
        details.pop()
    else:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        details[1].Pack(retry)
    code: int = StatusCode[error.grpc_status].value[0]
    return Status(code=code, message=error.message, details=details)


def _unforeseen(verb: str, cause: Exception) -> InternalError:
    log.error("call_failed", verb=verb, exc_info=cause)
    return InternalError()
